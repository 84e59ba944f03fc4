"""One node as seen from outside, and what a person should know about a run: its troubles, and the files to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsbarrier.rundir.names import MERGED
from fsbarrier.view.event_text import duration, one_line, ranks
from fsbarrier.view.watching import RunReader


@dataclass(frozen=True)
class PhaseAt:
    """A row of the program."""

    index: int
    name: str


@dataclass(frozen=True)
class NodeStatus:
    """One node rank.

    `state`: joining, running; suspected (its heartbeat stands still), lost (its process is gone, or the others went on without
    it); left, finished, stopped, broken (its own last word); absent (never seen). `activity`: working, or waiting (done with its
    row). `last_beat_age_s`: since its heartbeat was seen to move; None: unknown. `silent_s`: for how long it was watched in vain.
    """

    node_rank: int
    host: str | None
    pid: int | None
    incarnation: int | None
    state: str
    activity: str | None = None
    phase: PhaseAt | None = None
    iteration: int | None = None
    progress: Mapping[str, Any] | None = None
    last_beat_age_s: float | None = None
    silent_s: float | None = None
    last_beat_time: float | None = None  # seconds since 1970 by the shared filesystem's clock
    logs: str | None = None


def problems(reader: RunReader, nodes: Sequence[NodeStatus], state: str) -> list[str]:
    """What a person should know, the worst first; one line each."""
    found = []
    newest = reader.newest
    if newest is not None and newest.verdict is not None and state == "broken":
        found += newest.verdict.reason.splitlines()
    for node in nodes:
        name = f"node {node.node_rank}{f' ({node.host})' if node.host else ''}"
        if node.state == "absent" and newest is None:
            found.append(f"{name} has not been started yet")
        elif node.state == "suspected":
            found.append(f"{name}: no heartbeat while it was watched for {duration(node.silent_s or 0.0)}")
        elif node.state == "lost":
            why = _why_lost(reader, node)
            found.append(f"{name} is lost: {why}")
    if state != "broken" or newest is None or newest.verdict is None:
        found += _last_words(reader, nodes)
    if state in ("running", "stalled") or (state == "broken" and newest and newest.verdict is None):
        found += _failures(reader)
    if state == "stalled" and nodes and all(node.state in ("lost", "left", "absent") for node in nodes):
        found.append("no node of this run is alive; started again, it goes on where it was")
    return list(dict.fromkeys(found))


def _why_lost(reader: RunReader, node: NodeStatus) -> str:
    """How it is known that a node is lost: the others found out, or its process is not there."""
    member = reader.newest is not None and reader.newest.incarnation_of(node.node_rank) == node.incarnation
    known = [loss.why for loss in reader.history.losses if loss.node_rank == node.node_rank]
    if known and not member:
        return known[-1]
    return f"process {node.pid} is gone" if reader.process_gone(node.node_rank) else "no news"


def _last_words(reader: RunReader, nodes: Sequence[NodeStatus]) -> list[str]:
    """Why nodes left before the run's end, each reason once."""
    reasons: dict[str, list[int]] = {}
    for node in nodes:
        ending = reader.history.endings.get(node.node_rank)
        if node.state in ("left", "broken") and ending is not None:
            reasons.setdefault(one_line(ending.reason), []).append(node.node_rank)
    return [
        f"node{'s' if len(who) > 1 else ''} {ranks(who)} ended: {reason}" for reason, who in reasons.items()
    ]


def _failures(reader: RunReader) -> list[str]:
    """The programs that failed in the iteration under way, each once, with what they said last."""
    latest = {(f.node_rank, f.phase): f for f in reader.history.failures if f.iteration == reader.position[1]}
    found = []
    for (rank, phase), failure in list(latest.items())[-3:]:
        tries = sum(
            (f.node_rank, f.phase, f.iteration) == (rank, phase, failure.iteration)
            for f in reader.history.failures
        )
        times = f" ({tries} times)" if tries > 1 else ""
        where = f"node {rank}, iteration {failure.iteration}, phase {phase} {failure.phase_name}"
        found.append(f"{where} failed{times}: {one_line(failure.error)}")
        found += [f"  | {one_line(line)}" for line in failure.log[-5:]]
    return found


def files(reader: RunReader, nodes: Sequence[NodeStatus]) -> dict[str, str]:
    """What there is to look at, by what it is."""
    paths = reader.paths
    merged = {
        f"{split}_trajectories": max(
            _merged_files(paths.trajectories(split)),
            key=lambda path: (len(path.name), path.name),
            default=None,
        )
        for split in ("train", "test")
    }
    named = {
        "run": paths.root,
        "model": paths.served_model,
        **merged,
        "logs": paths.logs,
        "events": paths.events,
    }
    there = {
        name: str(path)
        for name, path in named.items()
        if path is not None and (path.exists() or path.is_symlink())
    }
    failed = {f.node_rank for f in reader.history.failures if f.iteration == reader.position[1]}
    troubled = [node for node in nodes if node.state in ("lost", "suspected") or node.node_rank in failed]
    return there | {f"node_{node.node_rank}_logs": node.logs for node in troubled[:4] if node.logs}


def _merged_files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if MERGED.parse(path.name) is not None]
    except OSError:
        return []
