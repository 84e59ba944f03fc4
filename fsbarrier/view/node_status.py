"""The state of one node as seen from outside. A node is alive if its heartbeat advances or, on this host, if its process exists.

Never compares clocks of different hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.protocol.membership import GONE
from fsbarrier.view.run_reader import RunReader

#: how many beats to watch a heartbeat before reporting that it does not advance
WATCHED_BEATS = 1.5
ALIVE = frozenset({"joining", "running"})


@dataclass(frozen=True, slots=True)
class PhaseAt:
    """A row of the program."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node rank.

    `state`: joining, running; suspected (its heartbeat does not advance), lost (its process is gone, or the others continued without
    it); left, finished, stopped, broken (reported by the node at its end); absent (never seen). `activity`: working, or waiting (done
    with its row). `last_beat_age_s`: seconds since its heartbeat last advanced; None: unknown. `silent_s`: how long it was watched without
    an advance. `last_beat_time`: Unix time by the shared filesystem's clock. `engines`: its frozen engines by name, each with the `states`
    of its servers (off, starting, up, asleep, down), the number of `restarts`, and `why` the last one was needed.
    """

    node_rank: int
    host: str | None
    pid: int | None
    incarnation: int | None
    state: str
    activity: str | None = None
    phase: PhaseAt | None = None
    iteration: int | None = None
    progress: Mapping[str, object] | None = None
    last_beat_age_s: float | None = None
    silent_s: float | None = None
    last_beat_time: float | None = None
    logs: str | None = None
    engines: Mapping[str, object] = field(default_factory=dict)


def node_status(reader: RunReader, rank: int, now: float, logs: Path | None) -> NodeStatus:
    """A node as of the reader's last poll; `now`: this process's monotonic time; `logs`: the log folder of its last start."""
    beat, newest = reader.beat(rank), reader.newest
    start = reader.joins.get(rank) or beat
    if start is None:
        return NodeStatus(rank, None, None, None, "absent")
    state = _state(reader, rank, now)
    alive = state in ALIVE or state == "suspected"
    _, iteration, phase, phase_name = _place(reader, rank)
    if state == "joining":
        # An earlier incarnation's position does not apply to this one.
        iteration = 0
    waits = rank in reader.arrived
    reported = dict(beat.progress) if alive and beat is not None else {}
    engines = reported.pop("frozen", {})
    progress = None
    if not waits and beat is not None and (beat.iteration, beat.phase) == (iteration, phase):
        progress = reported or None
    activity = None
    if state == "running" and newest is not None and rank in newest.ranks:
        activity = "waiting" if waits else "working"
    age = reader.beat_age_s(rank, now) if alive else None
    return NodeStatus(
        node_rank=rank,
        host=start.host or None,
        pid=start.pid,
        incarnation=start.incarnation,
        state=state,
        activity=activity,
        phase=PhaseAt(phase, phase_name) if iteration else None,
        iteration=iteration or None,
        progress=progress,
        last_beat_age_s=None if age is None else round(age, 3),
        silent_s=round(reader.watched_s(rank, now), 3) if state == "suspected" else None,
        last_beat_time=reader.beat_times.get(rank),
        logs=None if logs is None else str(logs),
        engines=engines if isinstance(engines, dict) else {},
    )


def beat_s(reader: RunReader) -> float:
    """The heartbeat interval of this run, in seconds."""
    return min(60.0, max(0.01, reader.record.settings.coordination.beat_s))


def _place(reader: RunReader, rank: int) -> tuple[int, int, int, str]:
    """(generation, iteration, phase, phase name) of a node, from its journal or its heartbeat, whichever is further ahead."""
    beat, started = reader.beat(rank), reader.places.get(rank)
    places = [(0, 0, 0, "")]
    if beat is not None:
        places.append((beat.generation, beat.iteration, beat.phase, beat.phase_name))
    if started is not None:
        places.append((*started.row, started.phase_name))
    return max(places)


def _state(reader: RunReader, rank: int, now: float) -> str:
    beat, newest = reader.beat(rank), reader.newest
    watched = reader.watched_s(rank, now) >= WATCHED_BEATS * beat_s(reader)
    if beat is None:
        if reader.process_gone(rank):
            return "lost"
        return "suspected" if watched and not reader.is_here(rank) else "joining"
    if beat.state in GONE:
        return beat.state
    excluded = newest is not None and newest.incarnation_of(rank) != beat.incarnation
    living = "joining" if excluded else beat.state if beat.state in ALIVE else "running"
    age = reader.beat_age_s(rank, now)
    if age is not None and age < reader.record.settings.coordination.suspect_s:
        return living
    # It was in a generation but is not in the newest one: the others continued without it.
    left_behind = excluded and beat.incarnation <= reader.members.get(rank, 0)
    if left_behind or reader.process_gone(rank):
        return "lost"
    return "suspected" if watched or age is not None else living
