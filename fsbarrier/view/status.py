"""Where a run is: `fsbarrier status`. What is said of a node's life rests on its heartbeat's moving while we look, or on its
process, where it runs on this host; no two hosts' clocks are compared for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsbarrier.errors import EXIT_SIGINT, EXIT_SIGTERM
from fsbarrier.protocol.membership import GONE
from fsbarrier.view.history import Rewards
from fsbarrier.view.timings import IterationTime, phase_totals
from fsbarrier.view.troubles import NodeStatus, PhaseAt, files, problems
from fsbarrier.view.watching import RunReader, still_silent

LOOK_S = 0.05
WATCHED_BEATS = 1.5
SHOWN_ITERATIONS = 50
ALIVE = frozenset({"joining", "running"})


@dataclass(frozen=True)
class Waiting:
    """A barrier that some have reached: whom it waits for, and for how long (None: unknown)."""

    node_ranks: tuple[int, ...]
    for_s: float | None


@dataclass(frozen=True)
class RunStatus:
    """A run as it is now. `iterations`: the last one asked for; None: endless. `exit_code`: None while the run may go on."""

    state: str  # running | stalled | finished | stopped | broken
    run_id: str
    log_path: str
    program: str
    generation: int
    iteration: int
    iterations: int | None
    phase: PhaseAt | None
    leader: int | None
    num_nodes: int
    nodes: tuple[NodeStatus, ...]
    waiting_for: Waiting | None
    rewards: tuple[Rewards, ...]
    times: tuple[IterationTime, ...]
    problems: tuple[str, ...]
    files: Mapping[str, str]
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What `fsbarrier status --json` prints."""
        body = asdict(self)
        del body["times"]
        finished = [one for one in self.times if one.complete]
        body["phases_s"] = {
            name: round(seconds, 6) for (_, name), seconds in phase_totals(finished[-1:]).items()
        }
        body["coordination"] = [
            {
                "iteration": one.iteration,
                "seconds": round(one.seconds, 6),
                "coordination_s": round(one.coordination_s, 6),
                "share": round(one.share, 6),
                "one_clock": one.exact,
            }
            for one in finished
        ]
        return body


# --- looking --------------------------------------------------------------------------------------------------------------


def read_status(log_path: Path, *, watch: bool = True) -> RunStatus:
    """Look at a run once. `watch`: until every heartbeat has moved, or for one and a half beats, to tell who lives.

    Raises UsageError where there is no run.
    """
    reader = RunReader(log_path, keep=SHOWN_ITERATIONS)
    began = time.monotonic()
    deadline = began + WATCHED_BEATS * beat_s(reader) if watch else began
    pause = threading.Event()
    reader.poll(began)
    while still_silent(reader) and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        reader.poll(time.monotonic())
    return judge(reader, time.monotonic(), once=True)


def beat_s(reader: RunReader) -> float:
    """The seconds between two heartbeats of this run."""
    coordination = reader.record.settings.get("coordination")
    value = coordination.get("beat_s") if isinstance(coordination, Mapping) else None
    return min(60.0, max(0.01, float(value))) if isinstance(value, int | float) else 2.0


def suspect_s(reader: RunReader) -> float:
    """The seconds of silence after which this run suspects a node."""
    coordination = reader.record.settings.get("coordination")
    value = coordination.get("suspect_s") if isinstance(coordination, Mapping) else None
    return float(value) if isinstance(value, int | float) else 6.0


def judge(reader: RunReader, now: float, *, once: bool = False) -> RunStatus:
    """The status from what `reader` has seen so far. `once`: it has looked for a moment only, so its own times mean little."""
    generation, (number, iteration, phase) = reader.newest, reader.position
    nodes = tuple(_node(reader, rank, now) for rank in _ranks(reader))
    state, code = _state(reader, nodes)
    running = generation is not None and iteration > 0
    return RunStatus(
        state=state,
        run_id=reader.record.run_id,
        log_path=str(reader.log_path),
        program=Path(str(reader.record.settings.get("program", ""))).name,
        generation=max(number, generation.number if generation else 0),
        iteration=iteration,
        iterations=_until(reader),
        phase=PhaseAt(phase, reader.phase_name) if running else None,
        leader=generation.leader if generation and generation.members else None,
        num_nodes=_num_nodes(reader),
        nodes=nodes,
        waiting_for=_waiting(reader, nodes, state, now, once),
        rewards=tuple(reader.history.rewards()),
        times=tuple(one for one in reader.times() if one.complete or len(one.phases) > 1),
        problems=tuple(problems(reader, nodes, state)),
        files=files(reader, nodes),
        exit_code=code,
    )


def _num_nodes(reader: RunReader) -> int:
    value = reader.record.settings.get("num_nodes")
    return value if isinstance(value, int) and 0 < value < 100_000 else 1


def _ranks(reader: RunReader) -> list[int]:
    return sorted({*range(_num_nodes(reader)), *reader.joins, *reader.ledger.seen})


def _until(reader: RunReader) -> int | None:
    if reader.newest is not None and reader.newest.verdict is None:
        return reader.newest.until
    return reader.joins[min(reader.joins)].until if reader.joins else None


# --- nodes ----------------------------------------------------------------------------------------------------------------


def _node(reader: RunReader, rank: int, now: float) -> NodeStatus:
    join, beat = reader.joins.get(rank), reader.beat(rank)
    if join is None and beat is None:
        return NodeStatus(rank, None, None, None, "absent")
    host, pid = (join.host, join.pid) if join is not None else (beat.host, beat.pid) if beat else (None, None)
    incarnation = join.incarnation if join is not None else beat.incarnation if beat else None
    state = _node_state(reader, rank, now)
    alive = state in ALIVE or state == "suspected"
    _, iteration, phase, name = _place(reader, rank)
    if state == "joining":  # where an earlier incarnation was is nothing to it
        iteration = 0
    in_beat = beat is not None and (beat.iteration, beat.phase) == (iteration, phase)
    age = reader.silent_s(rank, now) if alive else None
    watched = reader.watched_s(rank, now)
    member = reader.newest is not None and rank in reader.newest.ranks
    waits = rank in reader.arrived
    return NodeStatus(
        node_rank=rank,
        host=host or None,
        pid=pid,
        incarnation=incarnation,
        state=state,
        activity=("waiting" if waits else "working") if state == "running" and member else None,
        phase=PhaseAt(phase, name) if iteration else None,
        iteration=iteration or None,
        progress=dict(beat.progress) if alive and beat and in_beat and beat.progress and not waits else None,
        last_beat_age_s=None if age is None else round(age, 3),
        silent_s=round(watched, 3) if state == "suspected" else None,
        last_beat_time=reader.beat_times.get(rank),
        logs=_log_folder(reader, rank),
    )


def _place(reader: RunReader, rank: int) -> tuple[int, int, int, str]:
    """(generation, iteration, phase, its name) of a node, from its journal or its heartbeat, whichever is further."""
    beat, line = reader.beat(rank), reader.places.get(rank)
    found = [(0, 0, 0, "")]
    if beat is not None:
        found.append((beat.generation, beat.iteration, beat.phase, beat.phase_name))
    if line is not None:
        found.append((line.generation, line.iteration, line.phase, line.phase_name))
    return max(found)


def _node_state(reader: RunReader, rank: int, now: float) -> str:
    beat, newest = reader.beat(rank), reader.newest
    patience = WATCHED_BEATS * beat_s(reader)
    if beat is None:
        if reader.process_gone(rank):
            return "lost"
        return "joining" if reader.here(rank) or reader.watched_s(rank, now) < patience else "suspected"
    if beat.state in GONE:
        return beat.state
    age, watched = reader.silent_s(rank, now), reader.watched_s(rank, now)
    moves = age is not None and age < suspect_s(reader)
    excluded = newest is not None and newest.incarnation_of(rank) != beat.incarnation
    lost = excluded and beat.incarnation <= reader.members.get(rank, 0)
    if moves:
        return "joining" if excluded else beat.state if beat.state in ALIVE else "running"
    if reader.process_gone(rank) or lost:
        return "lost"
    if age is not None or watched >= patience:
        return "suspected"
    return "joining" if excluded else beat.state if beat.state in ALIVE else "running"


def _log_folder(reader: RunReader, rank: int) -> str | None:
    """Where a node's newest logs are: the folder of its last start."""
    join = reader.joins.get(rank)
    if join is None:
        return None
    for attempt in range(join.incarnation, max(0, join.incarnation - 20), -1):
        # a node that rejoined by itself, as another incarnation, keeps its first folder
        folder = reader.paths.node_logs(attempt, rank)
        if folder.is_dir():
            return str(folder)
    return None


# --- the run --------------------------------------------------------------------------------------------------------------


def _state(reader: RunReader, nodes: tuple[NodeStatus, ...]) -> tuple[str, int | None]:
    """(state of the run, its exit code where it has ended)."""
    newest = reader.newest
    members = [node for node in nodes if newest is not None and node.node_rank in newest.ranks]
    alive = [node for node in nodes if node.state in ALIVE]
    joining = any(node.state == "joining" for node in nodes)
    if newest is not None and newest.verdict is not None and not joining:
        return ("broken" if newest.verdict.exit_code else "stopped"), newest.verdict.exit_code
    if alive:
        return "running", None
    words = [node for node in members or nodes if node.state in GONE]
    if any(node.state == "finished" for node in words):
        return "finished", 0
    if any(node.state == "broken" for node in words):
        return "broken", 1
    if words and len(words) == len(members or nodes):
        codes = [_ending_code(reader, node.node_rank) for node in words]
        bad = [code for code in codes if code not in (0, EXIT_SIGINT, EXIT_SIGTERM)]
        return ("broken", bad[0]) if bad else ("stopped", max(codes))
    return "stalled", None


def _ending_code(reader: RunReader, rank: int) -> int:
    ending = reader.history.endings.get(rank)
    return ending.code if ending is not None and ending.code is not None else 0


def _waiting(
    reader: RunReader, nodes: tuple[NodeStatus, ...], state: str, now: float, once: bool
) -> Waiting | None:
    if state not in ("running", "stalled"):
        return None
    newest = reader.newest
    if newest is None or newest.verdict is not None:
        missing = tuple(node.node_rank for node in nodes if node.state in ("absent", "lost"))
        return Waiting(missing, None) if missing else None
    waited = reader.waited_s(now)
    missing = tuple(rank for rank in newest.ranks if rank not in reader.arrived)
    if waited is None or not missing:
        return None
    seconds, exact = waited
    return Waiting(missing, round(seconds, 3) if exact or not once else None)
