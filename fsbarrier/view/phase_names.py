"""Phase names and numbers for the views. Only this module asks the program about its phases."""

from __future__ import annotations

from collections.abc import Mapping

from fsbarrier.program import PHASE_NAMES, RL_SLICES

COUNT = len(PHASE_NAMES)

#: the phase whose heartbeats contain the training reward so far
TRAIN_ROLLOUT = "train_rollout"

#: long phases, whose start is reported too
LONG = frozenset({TRAIN_ROLLOUT, "eval_rollout", "update"})


def phase_name(index: int) -> str:
    """The name of a phase; "" for an unknown number."""
    return PHASE_NAMES[index] if index < COUNT else ""


def last_phase(rl_phase: str, seen: Mapping[int, str]) -> int | None:
    """The last phase of an iteration with this --rl-phase. `seen`: the phases in the run's journals.

    None for a program whose phases the views do not know.
    """
    if any(name != phase_name(index) for index, name in seen.items()):
        return None
    names = (part.last for part in RL_SLICES if part.name == rl_phase)
    return PHASE_NAMES.index(next(names, PHASE_NAMES[-1]))
