"""The critic during an update: computes a value for each of the requested tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from fsbarrier.training.policy_model import TokenModel


class ValueModel(TokenModel):
    """A token classifier of transformers with one label. Its output head is a part of the outermost unit when it is sharded."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.causal = classifier
        self.head = None

    def forward(self, inputs: Mapping[str, Tensor], wanted: Tensor, temperature: float) -> tuple[Tensor]:
        """The value of each token: what is still to come, as far as the tokens before it tell."""
        values = self.causal(**inputs, use_cache=False).logits.flatten()
        at = wanted.flatten().nonzero().squeeze(1)
        return (values[at - 1].float(),)
