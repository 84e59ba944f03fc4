"""Models that compute numbers for requested tokens: a policy log-probabilities, entropies and self-certainties, a critic values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fsbarrier.engine.model import placeholder_ids, sees
from fsbarrier.planning.memory import LOGITS_BYTES
from fsbarrier.training.log_prob_head import NEVER, LogitScaling, LogProbHead
from fsbarrier.training.losses import token_log_probs


class TokenModel(nn.Module):
    """A model of transformers that computes numbers for tokens. `causal`: the unchanged model, for loading, naming and saving; `head`: the
    part of it that is sharded as a unit of its own."""

    causal: PreTrainedModel
    head: nn.Module | None

    def forward(self, inputs: Mapping[str, Tensor], wanted: Tensor, temperature: float) -> tuple[Tensor, ...]:
        """Return one float32 [wanted tokens] for each number. `inputs`: the model's arguments, with input_ids [rows, length].
        `wanted`: bool [rows, length], never a row's first token."""
        raise NotImplementedError


class PolicyModel(TokenModel):
    """A language model of transformers, which may take images too, that does not materialize all logits.

    `head`: computes log-probabilities with the model's output head. It is None if the architecture processes its logits in an unknown
    way; then the model's own forward computes all logits at once.
    """

    def __init__(self, causal: PreTrainedModel, max_logits_bytes: int = LOGITS_BYTES) -> None:
        super().__init__()
        self.causal = causal
        self.banned = tuple(placeholder_ids(causal.config.to_dict()))
        scaling = scaling_of(causal)
        self.head = (
            None
            if scaling is None
            else LogProbHead(causal.get_output_embeddings(), scaling, max_logits_bytes, self.banned)
        )
        if self.head is None:
            print(
                f"{type(causal).__name__}: unsupported output head, so all logits are computed at once; "
                "lower trainer.max_tokens_per_micro_batch to save memory",
                file=sys.stderr,
            )

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the model; accelerate looks for it here."""
        return self.causal.config

    def forward(
        self, inputs: Mapping[str, Tensor], wanted: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probability of each token given those before it, at the sampling temperature, and the entropy and the self-certainty of
        the distribution that it was drawn from."""
        tokens = inputs["input_ids"]
        temperature = temperature if temperature > 0 else 1.0
        if self.head is None:
            logits = self.causal(**inputs, use_cache=False).logits
            logits[..., self.banned] = NEVER
            log_probs, entropies, certainties = token_log_probs(logits, tokens, temperature)
            return log_probs[wanted], entropies[wanted], certainties[wanted]
        hidden = self.causal.base_model(**inputs, use_cache=False)[0]
        at = wanted.flatten().nonzero().squeeze(1)
        outputs: tuple[Tensor, Tensor, Tensor] = self.head(
            hidden.flatten(0, 1)[at - 1], tokens.flatten()[at], temperature
        )
        return outputs


class ValueModel(TokenModel):
    """A token classifier of transformers with one label. Its output head is a part of the outermost unit when it is sharded."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.causal = classifier
        self.head = None

    def forward(self, inputs: Mapping[str, Tensor], wanted: Tensor, temperature: float) -> tuple[Tensor]:
        """The value of each token: the expected return from it on, given the tokens before it."""
        values = self.causal(**inputs, use_cache=False).logits.flatten()
        at = wanted.flatten().nonzero().squeeze(1)
        return (values[at - 1].float(),)


def packs(causal: PreTrainedModel) -> bool:
    """Whether several sequences can be packed into one row. Other attention implementations would compute the masked part too,
    recurrent architectures would carry their state into the next sequence, and vision models compute positions of their own."""
    flash = causal.config._attn_implementation == "flash_attention_2"
    return flash and not causal._is_stateful and not sees(causal.config.to_dict())


def scaling_of(causal: PreTrainedModel) -> LogitScaling | None:
    """How a model scales the logits of its head; None if its forward does something unknown.

    Runs its forward with stand-ins for body and head: it must pass the hidden states unchanged, and return the head's output scaled
    according to the configuration. Does not touch weights.
    """
    head, name = causal.get_output_embeddings(), causal.base_model_prefix
    names = [name for name, child in causal.named_children() if child is head]
    if not isinstance(head, nn.Linear) or not names or name not in causal._modules:
        return None
    hidden, logits = torch.randn(1, 2, head.in_features), torch.linspace(-60, 60, 64).expand(1, 2, 64)
    handed_over: list[Tensor] = []

    def answer(states: Tensor) -> Tensor:
        handed_over.append(states)
        return logits.clone()

    twin = copy.copy(causal)
    twin._modules = {**causal._modules, name: lambda **inputs: _BodyOutput(hidden), names[0]: answer}
    try:
        given = twin.forward(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    except Exception:
        # Another kind of forward may raise anything.
        return None
    scaling = _configured(causal.config.get_text_config())
    known = torch.allclose(given, scaling.apply_(logits.clone()), rtol=1e-5)
    return scaling if known and len(handed_over) == 1 and torch.equal(handed_over[0], hidden) else None


def _configured(config: Any) -> LogitScaling:
    """Cohere multiplies by logit_scale, Granite divides by logits_scaling, Gemma 2 and later have a cap."""
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return LogitScaling(scale, getattr(config, "final_logit_softcapping", None))


class _BodyOutput:
    """Stand-in for the output of a model's body: only hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
