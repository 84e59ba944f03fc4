"""The policy as the update runs it: tokens in, log-probabilities of the tokens that are asked for out, and entropies."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsbarrier.training.log_prob_head import LogitScaling, LogProbHead
from fsbarrier.training.losses import token_log_probs


class PolicyModel(nn.Module):
    """A causal language model of transformers, whose logits are never whole.

    `causal` is that model, which is loaded, named and saved as ever; `head` computes with its output head, or is None where this
    architecture does something else around its head than is known here: then the model's own forward computes all logits at once.
    """

    def __init__(self, causal: PreTrainedModel, max_logits_bytes: int) -> None:
        super().__init__()
        self.causal = causal
        scaling = scaling_of(causal)
        self.head = (
            None
            if scaling is None
            else LogProbHead(causal.get_output_embeddings(), scaling, max_logits_bytes)
        )
        if self.head is None:
            print(
                f"{type(causal).__name__}: what it does around its output head is not known, so its logits are computed whole; "
                "a lower trainer.max_tokens_per_micro_batch keeps them small",
                file=sys.stderr,
            )

    def forward(
        self, inputs: Mapping[str, Tensor], wanted: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """float32 [wanted tokens], in order, twice: the log-probability of each given those before it, at the sampling temperature,
        and the entropy of the distribution that it was drawn from.

        `inputs`: what the model takes, among it input_ids [rows, length]. `wanted`: bool [rows, length], never a row's first token.
        """
        tokens = inputs["input_ids"]
        temperature = temperature if temperature > 0 else 1.0
        if self.head is None:
            logits = self.causal(**inputs, use_cache=False).logits
            log_probs, entropies = token_log_probs(logits, tokens, temperature)
            return log_probs[wanted], entropies[wanted]
        hidden = self.causal.base_model(**inputs, use_cache=False)[0]
        at = wanted.flatten().nonzero().squeeze(1)
        found: tuple[Tensor, Tensor] = self.head(
            hidden.flatten(0, 1)[at - 1], tokens.flatten()[at], temperature
        )
        return found


def packs(causal: PreTrainedModel) -> bool:
    """Whether several sequences may lie in one row. Another attention than this would compute what it then masks; a state that
    goes from token to token, which some architectures have in attention's place, would go on into the next sequence."""
    return causal.config._attn_implementation == "flash_attention_2" and not causal._is_stateful


def scaling_of(causal: PreTrainedModel) -> LogitScaling | None:
    """What a model does to the logits of its head; None where its forward does anything that is not known here.

    Its forward is tried with stand-ins for its body and its head: it must hand the hidden states over as they are, and give the
    head's answer back scaled as the configuration says. No weight is touched.
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
        # A forward of another kind may fail in any way there is.
        return None
    scaling = _configured(causal.config.get_text_config())
    known = torch.allclose(given, scaling.apply_(logits.clone()), rtol=1e-5)
    return scaling if known and len(handed_over) == 1 and torch.equal(handed_over[0], hidden) else None


def _configured(config: Any) -> LogitScaling:
    """Cohere multiplies by logit_scale, Granite divides by logits_scaling, Gemma 2 and later have a cap."""
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return LogitScaling(scale, getattr(config, "final_logit_softcapping", None))


class _BodyOutput:
    """Stands in for what a model's body gives: hidden states, and none of the rest."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
