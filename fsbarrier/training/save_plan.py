"""Decides before training where the result will be stored, and checks that there is room."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from fsbarrier import files
from fsbarrier.errors import ProgramFailed
from fsbarrier.settings.sections import CheckpointSettings
from fsbarrier.training.checkpoint_write import sizes_on_disk
from fsbarrier.training.node_state import CHEAP_S, NodeState, is_due
from fsbarrier.training.processes import gather_json
from fsbarrier.training.slices import local_part
from fsbarrier.training.trainer import Trainer

GB = 1e9


def choose(
    trainer: Trainer,
    settings: CheckpointSettings,
    node: NodeState,
    out: Path,
    policy_version: int,
    *,
    last: bool,
    rollouts_follow: bool = False,
) -> NodeState | None:
    """Where the nodes keep the trainer state of the new version; None: in the shared directory, with the weights.

    Every process must call this and gets the same result. Raises ProgramFailed if `out` has not enough room.
    """
    processes, parameters = trainer.processes, trainer.backend.trained
    exact = processes.serving_dtype.itemsize == 4 and trainer.adapters is None
    # Two moments in fp32, plus fp32 weights unless the served weights are exact.
    per_number = 4 * (2 if exact else 3)
    held = sum(local_part(one, processes.rank, processes.world).data.numel() for one in parameters.values())
    on_this_node = held * per_number * (len(node.ranks) if trainer.layout.shards > 1 else 1)
    due = is_due(settings.trainer_every, policy_version, trainer.pace, last=last)
    # Do not block the trainer for a slow save if rollouts follow, which can overlap with it.
    follows = due and rollouts_follow and not last and trainer.pace.saved_s >= CHEAP_S
    shared = any(gather_json((due and not follows) or not node.has_room(on_this_node)))
    weights = sum(sizes_on_disk(trainer.backend.weights(), processes.serving_dtype).values())
    state = per_number * sum(one.numel() for one in parameters.values()) if shared or follows else 0
    reason = _lack_of_room(out, weights, state, policy_version) if processes.is_main else ""
    if reason := next(filter(None, gather_json(reason)), ""):
        raise ProgramFailed(reason)
    return None if shared else replace(node, follows=follows)


def _lack_of_room(out: Path, weights: int, state: int, policy_version: int) -> str:
    try:
        files.make_dirs(out.parent)
        free = shutil.disk_usage(out.parent).free
    except OSError as error:
        return f"{out.parent}: {error.strerror or error}"
    if free >= weights + state:
        return ""
    parts = f"{weights / GB:.1f} GB of weights" + (f", {state / GB:.1f} GB of trainer state" if state else "")
    return (
        f"policy version {policy_version} needs {(weights + state) / GB:.1f} GB ({parts}), but {out.parent} has only {free / GB:.1f} GB "
        "free; nothing was trained. Free disk space, lower checkpoint.keep, or raise checkpoint.trainer_every"
    )
