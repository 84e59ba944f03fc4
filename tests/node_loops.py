"""Nodes of a run without threads and without programs: the loop over real files, which the test lets look and beat as it likes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsbarrier.coordination.loop import LookAgain, NodeLoop, WorkRunner, WriteEvent
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.poll_intervals import PollIntervals
from fsbarrier.group.collective import CollectiveWork
from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.state import Rules
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

PING = Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES)))
#: each look lists everything
NO_PAUSES = PollIntervals(0.0, 0.0)


def observer(folder: Path, store: PosixStore | None = None, table: Any = PING, **more: Any) -> Observer:
    """What one node sees of a run in `folder`, whose directories are there."""
    made = Observer(store or PosixStore(), RunPaths(folder), table, **more)
    made.prepare()
    return made


def node_loop(
    seen: Observer,
    rank: int = 0,
    rules: Rules | None = None,
    work: WorkRunner | None = None,
    tell: WriteEvent = lambda event, node, fields: None,
    **join: Any,
) -> NodeLoop:
    """A node that has joined the run that it sees."""
    here = Join(rank, 0, f"host{rank}", rank, "boot", **{"time": str(rank), **join})
    loop = NodeLoop(seen.store, seen, rules or Rules(seen.table, 2), work or CollectiveWork(), here, tell)
    loop.start(0.0)
    return loop


def settle(look: Callable[[float], LookAgain], now: float) -> None:
    """Call a node's or a member's `look` until nothing is left to do. Raises its errors."""
    while look(now) is LookAgain.NOW:
        pass
