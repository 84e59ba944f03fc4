"""Lists the built-in losses, and which settings have an effect with each.

training/losses.py computes them. mypy reports a loss that is in LossName and that `token_loss` there does not handle; a test reports
one that is not in LOSSES or not in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LossName = Literal["grpo", "gspo", "cispo", "sapo", "rft", "distil"]
Mismatch = Literal["none", "token_tis", "icepop", "sequence_mask"]
KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True)
class BuiltInLoss:
    """One built-in loss."""

    #: the line about it in docs/algorithms.md
    summary: str
    #: the settings of `algorithm` that bound its probability ratio; the other bounds are refused
    bounds: frozenset[str] = frozenset({"clip_low", "clip_high", "dual_clip"})
    #: Whether it weighs tokens with advantages. A loss without them learns from successes alone, whatever their baseline.
    has_advantages: bool = True


NO_BOUNDS: frozenset[str] = frozenset()
LOSSES: Mapping[LossName, BuiltInLoss] = {
    "grpo": BuiltInLoss("policy gradient with a clipped token ratio"),
    "gspo": BuiltInLoss("one clipped ratio per sequence"),
    "cispo": BuiltInLoss("the clipped ratio is a detached weight", frozenset({"clip_low", "clip_high"})),
    "sapo": BuiltInLoss("a soft gate instead of clipping", NO_BOUNDS),
    "rft": BuiltInLoss("fine-tuning on successful answers", NO_BOUNDS, has_advantages=False),
    "distil": BuiltInLoss("as `grpo`, with the advantages of a teacher (`engines.teacher`)"),
}
#: the settings that bound the ratio of some loss
BOUNDS = frozenset().union(*(loss.bounds for loss in LOSSES.values()))
