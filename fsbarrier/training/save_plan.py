"""Before an update trains: where its result will go, and whether there is room for it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from fsbarrier import files
from fsbarrier.errors import ProgramFailed
from fsbarrier.settings.sections import CheckpointSettings
from fsbarrier.training.checkpoint_write import sizes_on_disk
from fsbarrier.training.node_state import CHEAP_S, NodeState, is_due
from fsbarrier.training.processes import gather_objects
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
    """Where the nodes keep the trainer's state of the new version; None: it goes to the shared directory with the weights.

    The same on every process, which must all call this. Raises ProgramFailed where `out` lacks room, with the figures.
    """
    processes, parameters = trainer.processes, trainer.backend.trained
    exact = processes.serving_dtype.itemsize == 4 and trainer.adapters is None
    # Two moments, and the weights where what is served does not hold them to the last bit; all in fp32.
    per_number = 4 * (2 if exact else 3)
    held = sum(local_part(one, processes.rank, processes.world).data.numel() for one in parameters.values())
    on_this_node = held * per_number * (len(node.ranks) if trainer.layout.shards > 1 else 1)
    due = is_due(settings.trainer_every, policy_version, trainer.pace, last=last)
    # The trainer is not held for a save that takes long, unless nothing would be done in the meantime.
    follows = due and rollouts_follow and not last and trainer.pace.saved_s >= CHEAP_S
    shared = any(gather_objects((due and not follows) or not node.has_room(on_this_node)))
    weights = sum(sizes_on_disk(trainer.backend.weights(), processes.serving_dtype).values())
    state = per_number * sum(one.numel() for one in parameters.values()) if shared or follows else 0
    reason = _lack_of_room(out, weights, state, policy_version) if processes.is_main else ""
    if reason := next(filter(None, gather_objects(reason)), ""):
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
        f"policy version {policy_version} takes {(weights + state) / GB:.1f} GB ({parts}) and {out.parent} has {free / GB:.1f} GB "
        "free; nothing was trained. Make room, or lower checkpoint.keep, or raise checkpoint.trainer_every"
    )
