"""Checks that the engine serves the weights being trained, by comparing its log-probabilities with the trainer's.

The check uses the first minibatch, before the weights change. A gap means that the engine kept old weights or computes differently;
training would then silently use another policy's rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir.known_logprobs import ENOUGH_TOKENS
from fsbarrier.settings.sections import Settings
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.micro_batch import MicroBatch
from fsbarrier.training.processes import Processes

# Maximum mean difference explained by precision: if both compute in float32, and otherwise.
LIMITS = {True: 2e-3, False: 0.05}


@dataclass(frozen=True, slots=True)
class EngineGap:
    """The differences for one engine; `replica`: -1 if the node's engines cannot be distinguished."""

    node_rank: int
    replica: int
    tokens: int
    mean: float
    maximum: float

    def __str__(self) -> str:
        engine = "an engine" if self.replica < 0 else f"engine {self.replica}"
        return f"{engine} of node {self.node_rank}"


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Mean and maximum difference per token; None if the current policy sampled nothing in the minibatch."""

    mean: float | None = None
    maximum: float | None = None
    engines: tuple[EngineGap, ...] = ()


class GapSums:
    """Accumulates the differences of one process's micro-batches, by engine."""

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        self._engines, self._engine_of = torch.unique(batch.engines, dim=0, return_inverse=True)
        # Sum, number of tokens, maximum.
        self._values = torch.zeros(len(self._engines), 3, dtype=torch.float64, device=device)

    def add(self, new: Tensor, micro: MicroBatch, mask: Tensor, chosen: list[int]) -> None:
        """Add a micro-batch. `new`: the trainer's log-probabilities of the sequences `chosen`. Tokens of older policies are ignored."""
        own = mask & micro.current[:, None] & ~micro.engine.isnan()
        if not bool(own.any()):
            return
        gap = torch.where(own, (new.detach() - micro.engine).abs(), 0).double()
        engine = self._engine_of[chosen].to(gap.device)
        self._values[:, 0].index_add_(0, engine, gap.sum(1))
        self._values[:, 1].index_add_(0, engine, own.sum(1).double())
        self._values[:, 2].scatter_reduce_(0, engine, gap.amax(1), "amax")

    def over_all(self, processes: Processes) -> LogprobGap:
        """Combine the sums of all processes. Every process must call this, and gets the same result."""
        everyone = processes.gather(self._values)
        sums, counts = everyone[..., 0].sum(0).tolist(), everyone[..., 1].sum(0).tolist()
        most = everyone[..., 2].amax(0).tolist()
        engines = tuple(
            EngineGap(node, replica, int(count), total / count, maximum)
            for (node, replica), total, count, maximum in zip(
                self._engines.tolist(), sums, counts, most, strict=True
            )
            if count
        )
        return LogprobGap(sum(sums) / sum(counts), max(most), engines) if engines else LogprobGap()


def check(gap: LogprobGap, settings: Settings, processes: Processes, model: Path) -> None:
    """Raises ProgramFailed if the gap of all engines, or of one, exceeds the limit."""
    limit = limit_of(settings, processes)
    judged = [engine for engine in gap.engines if engine.tokens >= ENOUGH_TOKENS]
    # The comparison is negated so that NaN counts as bad.
    bad = [engine for engine in judged if not engine.mean <= limit]
    if gap.mean is None or (not bad and gap.mean <= limit):
        return
    who = ", ".join(map(str, bad)) or "the engines"
    worst = max(bad, key=lambda engine: engine.mean, default=None)
    mean, maximum = (gap.mean, gap.maximum) if worst is None else (worst.mean, worst.maximum)
    advice = (
        f"; the other {len(judged) - len(bad)} engines agree: start that node again; to train on what was sampled all the "
        "same, raise algorithm.max_logprob_gap for one update"
        if 0 < len(bad) < len(judged)
        else "; check its log, or set engine.dtype=float32 to exclude a precision difference"
    )
    raise ProgramFailed(
        f"the sampled tokens' log-probabilities differ by {mean:.4f} on average (at most {maximum:.3f}) between "
        f"engine and trainer, more than {limit:g} (algorithm.max_logprob_gap), for {who}: the engine does not serve the "
        f"weights in {model}, or computes them differently{advice}"
    )


def limit_of(settings: Settings, processes: Processes) -> float:
    """The largest mean difference that is no fault."""
    return settings.algorithm.max_logprob_gap or LIMITS[both_exact(settings, processes)]


def both_exact(settings: Settings, processes: Processes) -> bool:
    """Whether trainer and engine both compute in float32. The engine's `auto` is float32 on a CPU, otherwise bfloat16."""
    engine = settings.engine.dtype
    exact = engine == "float32" or (engine == "auto" and processes.device.type == "cpu")
    return exact and processes.dtype is torch.float32
