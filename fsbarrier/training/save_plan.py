"""Decides before training whether the trainer state is saved with the new version, and checks that there is room."""

from __future__ import annotations

import shutil
from pathlib import Path

from fsbarrier.errors import ProgramFailed
from fsbarrier.store import files
from fsbarrier.training.checkpoint_write import sizes_on_disk
from fsbarrier.training.processes import gather_json
from fsbarrier.training.trainer import Trainer

GB = 1e9


def saves_state(every: int, policy_version: int, *, last: bool, stays: bool) -> bool:
    """Whether a version is saved with its trainer state. `last`: the run ends after it. `stays`: the processes hold the state until the
    next update; without a saved state nobody else does."""
    return last or not stays or policy_version % every == 0


def check_room(trainer: Trainer, out: Path, policy_version: int) -> None:
    """Check that the new version in `out` has room on disk, with its trainer state. Every process must call this.

    Raises ProgramFailed.
    """
    processes, parameters = trainer.processes, trainer.backend.trained
    exact = processes.serving_dtype.itemsize == 4 and trainer.adapters is None
    # Two moments in fp32, plus fp32 weights unless the served weights are exact.
    per_number = 4 * (2 if exact else 3)
    weights = sum(sizes_on_disk(trainer.backend.weights(), processes.serving_dtype).values())
    state = per_number * sum(one.numel() for one in parameters.values())
    reason = _lack_of_room(out, weights, state, policy_version) if processes.is_main else ""
    if reason := next(filter(None, gather_json(reason)), ""):
        raise ProgramFailed(reason)


def _lack_of_room(out: Path, weights: int, state: int, policy_version: int) -> str:
    try:
        files.make_dirs(out.parent)
        free = shutil.disk_usage(out.parent).free
    except OSError as error:
        return f"{out.parent}: {error.strerror or error}"
    if free >= weights + state:
        return ""
    parts = f"{weights / GB:.1f} GB of weights, {state / GB:.1f} GB of trainer state"
    return (
        f"policy version {policy_version} needs {(weights + state) / GB:.1f} GB ({parts}), but {out.parent} has only {free / GB:.1f} GB "
        "free; nothing was trained. Free disk space, or lower checkpoint.keep"
    )
