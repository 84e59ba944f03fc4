"""The phases as people count and name them. Only here do the views ask the program about its phases."""

from __future__ import annotations

from collections.abc import Mapping

from fsbarrier.program import PHASE_NAMES, RL_SLICES

COUNT = len(PHASE_NAMES)

#: The phase whose heartbeats carry the train reward so far.
TRAIN_ROLLOUT = "train_rollout"

#: Phases that may take long, so that their beginning is news.
LONG = frozenset({TRAIN_ROLLOUT, "eval_rollout", "update"})


def phase_name(index: int) -> str:
    """The name of a phase; empty for a number that no phase has."""
    return PHASE_NAMES[index] if index < COUNT else ""


def last_phase(rl_phase: str, seen: Mapping[int, str]) -> int | None:
    """The phase that ends an iteration of a run with this --rl-phase. `seen`: the phases that the run's journals name.

    None for a program with phases of its own, whose number the views do not know.
    """
    if any(name != phase_name(index) for index, name in seen.items()):
        return None
    names = (part.last for part in RL_SLICES if part.name == rl_phase)
    return PHASE_NAMES.index(next(names, PHASE_NAMES[-1]))
