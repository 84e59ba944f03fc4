"""Does the engine serve the weights that are trained? Its log-probabilities of the sampled tokens must be the trainer's.

Checked on the first minibatch, before the weights change. A gap means that the engine kept old weights, or that it computes
differently; training on would learn from another policy's rollouts without saying so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.settings.sections import Settings
from fsbarrier.training.micro_batch import MicroBatch
from fsbarrier.training.processes import Processes

# The largest mean difference that the precision explains: where both compute in float32, and where one of them does not.
LIMITS = {True: 2e-3, False: 0.05}


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """The difference per token, mean and maximum; None where the policy to be trained has sampled nothing of the minibatch."""

    mean: float | None = None
    maximum: float | None = None


class GapSums:
    """The differences in one process's micro-batches, added up."""

    def __init__(self, device: torch.device) -> None:
        # Sum, number of tokens, maximum.
        self.values = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, new: Tensor, micro: MicroBatch, mask: Tensor) -> None:
        """`new`: the trainer's log-probabilities. What older policies sampled says nothing of this one's engine."""
        own = mask & micro.current[:, None]
        if bool(own.any()):
            gap = (new.detach() - micro.engine).abs()[own].double()
            self.values[0] += gap.sum()
            self.values[1] += len(gap)
            self.values[2] = torch.maximum(self.values[2], gap.max())

    def over_all(self, processes: Processes) -> LogprobGap:
        """Every process must call this, and gets the same."""
        everyone = processes.gather(self.values)
        count = float(everyone[:, 1].sum())
        if not count:
            return LogprobGap()
        return LogprobGap(float(everyone[:, 0].sum()) / count, float(everyone[:, 2].max()))


def check(gap: LogprobGap, settings: Settings, processes: Processes, model: Path) -> None:
    """Raises ProgramFailed where the gap is more than the precision explains."""
    # With these the engine samples from another distribution than the model's own.
    if settings.rollout.top_p < 1 or settings.rollout.top_k not in (-1, 0):
        return
    limit = settings.algorithm.max_logprob_gap or limit_of(settings, processes)
    # Written so that a mean that is no number fails too.
    if gap.mean is not None and not gap.mean <= limit:
        raise ProgramFailed(
            f"the sampled tokens' log-probabilities differ by {gap.mean:.4f} on average (at most {gap.maximum:.3f}) between "
            f"engine and trainer, more than {limit:g} (algorithm.max_logprob_gap): the engine does not serve the "
            f"weights in {model}, or computes them differently"
        )


def limit_of(settings: Settings, processes: Processes) -> float:
    return LIMITS[both_exact(settings, processes)]


def both_exact(settings: Settings, processes: Processes) -> bool:
    """Whether trainer and engine compute in float32. The engine's `auto` is that on a CPU, else bfloat16."""
    engine = settings.engine.dtype
    exact = engine == "float32" or (engine == "auto" and processes.device.type == "cpu")
    return exact and processes.dtype is torch.float32
