"""Runs a node: takes its rank, makes its folders, starts its daemon."""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from fsbarrier.coordination.ranks import RankTaken, free_ranks, hold_rank
from fsbarrier.errors import Fenced, UsageError
from fsbarrier.processes.limits import SHARED_MEMORY, free_bytes
from fsbarrier.protocol.facts import Payload
from fsbarrier.run.daemon import Daemon, starting
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files
from fsbarrier.store.local_folders import SHORT_PLACE, remove_abandoned, scratch_dir, user_dir
from fsbarrier.store.mounts import LOCAL, mount_of
from fsbarrier.training.weights_copy import WeightsCopy


def run_node(
    record: RunRecord,
    settings: Settings,
    stated: Payload,
    *,
    node_rank: int | None,
    until: int | None,
) -> int:
    """Run node `node_rank` (None: any free rank) until it ends; returns the exit code.

    `settings`: the run's settings with this start's choices. `stated`: the changeable settings on its command line, by dotted names.
    Raises UsageError (the rank is taken), StoreError.
    """
    files.set_shared_group(settings.shared_group)
    files.make_dirs_only_beside(record.paths.record)
    if node_rank is not None:
        return _run_as(record, settings, stated, node_rank, None, until)
    with starting(record):
        candidates = free_ranks(record.paths, settings.num_nodes, settings.coordination.dead_s)
    for start in candidates:
        # If another node takes this rank first, the next one may still be free.
        with contextlib.suppress(RankTaken):
            return _run_as(record, settings, stated, start.rank, start.incarnation, until)
    raise UsageError(
        f"--rank auto: all {settings.num_nodes} ranks of {record.log_path} are taken (fsbarrier status shows by whom)"
    )


def _run_as(
    record: RunRecord,
    settings: Settings,
    stated: Payload,
    rank: int,
    incarnation: int | None,
    until: int | None,
) -> int:
    with ExitStack() as stack:
        with starting(record):
            stack.enter_context(hold_rank(record.log_path, rank, settings.coordination.suspect_s))
            # Remove copies of weights and sockets that killed daemons left.
            for shared_place in (SHARED_MEMORY, SHORT_PLACE):
                remove_abandoned(shared_place)
            name = f"{record.run_id[-8:]}-n{rank}"
            work_dir = stack.enter_context(scratch_dir(user_dir(), name))
            place = place_for_weights(settings, record)
            weights = WeightsCopy(stack.enter_context(scratch_dir(place, name))) if place else None
            daemon = Daemon(record, settings.choices, stated, rank, until, work_dir, weights)
        stack.callback(daemon.close)
        with daemon.signals():
            try:
                daemon.join(incarnation)
            except Fenced as error:
                raise RankTaken(str(error)) from None
            if incarnation is not None:
                print(f"fsbarrier: --rank auto: this is node {rank}", file=sys.stderr, flush=True)
            return daemon.run()


def place_for_weights(settings: Settings, record: RunRecord) -> Path | None:
    """The folder for this node's copy of the newest weights; None: its engines read the run directory. Raises UsageError, OSError."""
    weights_dir = settings.checkpoint.weights_dir
    if weights_dir == "none" or not settings.manages_engine or settings.engine.nodes > 1:
        return None
    if weights_dir == "auto":
        # A copy in memory needs no disk.
        in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
        if settings.lora.rank and record.model is not None:
            # Versions are adapters, and each node merges them into a copy of its own.
            return in_memory if in_memory and _has_room(in_memory, Path(record.model)) else user_dir()
        return in_memory if mount_of(record.log_path).family.category != LOCAL else None
    try:
        files.make_dirs(Path(weights_dir))
    except OSError as error:
        raise UsageError(f"checkpoint.weights_dir={weights_dir}: {error.strerror or error}") from None
    return Path(weights_dir)


def _has_room(folder: Path, model: Path) -> bool:
    """Whether a copy of the model's weights fits into `folder`."""
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    # A copy may have twice the bytes of each number.
    return free_bytes(folder) > 2 * size
