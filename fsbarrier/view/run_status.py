"""Where a run is and how its nodes are doing: what `fsbarrier status` prints and the live view shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fsbarrier.errors import EXIT_SIGINT, EXIT_SIGTERM
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.names import MERGED
from fsbarrier.view.history import Rewards
from fsbarrier.view.node_status import ALIVE, WATCHED_BEATS, NodeStatus, PhaseAt, beat_s, node_status
from fsbarrier.view.problems import problems
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.timings import IterationTime, together

#: While heartbeats are watched, the seconds between two looks.
LOOK_S = 0.05

#: Of how many iterations `status` knows the times.
KEPT_ITERATIONS = 50
#: How much of the journals is read whole at the first look, from their ends: what `status` and `top` show of now and of a few
#: iterations, and what a report shows of as many as its tables have. Of 64 nodes that is 3 and 100 iterations.
STATUS_BYTES = 2 << 20
REPORT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Waiting:
    """A barrier that some have reached: whom it waits for, and for how long (None: unknown)."""

    node_ranks: tuple[int, ...]
    for_s: float | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as it is now. `iterations`: the last one asked for; None: endless. `exit_code`: None while the run may go on."""

    # running | stalled | finished | stopped | broken
    state: str
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

    @property
    def finished_times(self) -> list[IterationTime]:
        """Of the iterations that are whole."""
        return [one for one in self.times if one.complete]

    def to_json(self) -> dict[str, object]:
        """What `fsbarrier status --json` prints."""
        body = asdict(self)
        del body["times"]
        totals = together(self.finished_times[-1:]).phases
        body["phases_s"] = {name: round(seconds, 6) for (_, name), seconds in totals.items()}
        body["coordination"] = [
            {
                "iteration": one.iteration,
                "seconds": round(one.seconds, 6),
                "coordination_s": round(one.coordination_s, 6),
                "share": round(one.share, 6),
                "one_clock": one.exact,
            }
            for one in self.finished_times
        ]
        return body


def read_status(log_path: Path, *, watch: bool = True) -> RunStatus:
    """Look at a run. `watch`: until every heartbeat has moved, or for one and a half beats, to tell who lives.

    Raises UsageError where there is no run.
    """
    reader = status_reader(log_path)
    began = time.monotonic()
    deadline = began + WATCHED_BEATS * beat_s(reader) if watch else began
    pause = threading.Event()
    reader.poll(began)
    while reader.unsure() and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        reader.poll(time.monotonic())
    return status_of(reader, time.monotonic(), one_look=True)


def status_reader(log_path: Path) -> RunReader:
    """A reader of where a run is now. Raises UsageError where there is no run."""
    return RunReader(log_path, KEPT_ITERATIONS, STATUS_BYTES, all_pasts=False)


def look_once(log_path: Path) -> tuple[RunReader, RunStatus]:
    """A run as it is at this moment and as it was, its status included. Raises UsageError where there is no run."""
    reader = RunReader(log_path, newest_bytes=REPORT_BYTES)
    reader.poll(time.monotonic())
    return reader, status_of(reader, time.monotonic(), one_look=True)


def status_of(reader: RunReader, now: float, *, one_look: bool = False) -> RunStatus:
    """The status from what `reader` has seen so far. `one_look`: that was a moment only, so its own times mean little."""
    newest, (number, iteration, phase) = reader.newest, reader.position
    num_nodes = reader.settings.num_nodes
    ranks = sorted({*range(num_nodes), *reader.joins, *reader.ledger.seen})
    nodes = tuple(node_status(reader, rank, now) for rank in ranks)
    state, exit_code = _state(reader, nodes)
    return RunStatus(
        state=state,
        run_id=reader.record.run_id,
        log_path=str(reader.log_path),
        program=Path(reader.record.settings.program).name,
        generation=max(number, newest.number if newest else 0),
        iteration=iteration,
        iterations=_last_iteration(reader),
        phase=PhaseAt(phase, reader.phase_name) if newest is not None and iteration > 0 else None,
        leader=newest.leader if newest and newest.members else None,
        num_nodes=num_nodes,
        nodes=nodes,
        waiting_for=_waiting(reader, nodes, state, now, one_look),
        rewards=tuple(reader.history.rewards()),
        times=tuple(one for one in reader.times() if one.complete or len(one.phases) > 1),
        problems=tuple(problems(reader, nodes, state)),
        files=_files(reader, nodes),
        exit_code=exit_code,
    )


def _last_iteration(reader: RunReader) -> int | None:
    if reader.newest is not None and reader.newest.verdict is None:
        return reader.newest.until
    return reader.joins[min(reader.joins)].until if reader.joins else None


def _state(reader: RunReader, nodes: tuple[NodeStatus, ...]) -> tuple[str, int | None]:
    """The state of the run, and its exit code where it has ended."""
    newest = reader.newest
    if newest is not None and newest.verdict is not None and all(node.state != "joining" for node in nodes):
        return ("broken" if newest.verdict.exit_code else "stopped"), newest.verdict.exit_code
    if any(node.state in ALIVE for node in nodes):
        return "running", None
    members = [node for node in nodes if newest is not None and node.node_rank in newest.ranks] or nodes
    ended = [node for node in members if node.state in GONE]
    if any(node.state == "finished" for node in ended):
        return "finished", 0
    if any(node.state == "broken" for node in ended):
        return "broken", 1
    if ended and len(ended) == len(members):
        codes = [_exit_code(reader, node.node_rank) for node in ended]
        failed = [code for code in codes if code not in (0, EXIT_SIGINT, EXIT_SIGTERM)]
        return ("broken", failed[0]) if failed else ("stopped", max(codes))
    return "stalled", None


def _exit_code(reader: RunReader, rank: int) -> int:
    ending = reader.history.endings.get(rank)
    return ending.code if ending is not None and ending.code is not None else 0


def _waiting(
    reader: RunReader, nodes: tuple[NodeStatus, ...], state: str, now: float, one_look: bool
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
    return Waiting(missing, round(seconds, 3) if exact or not one_look else None)


# --- files ----------------------------------------------------------------------------------------------------------------


def _files(reader: RunReader, nodes: tuple[NodeStatus, ...]) -> dict[str, str]:
    """What there is to look at, by what it is."""
    paths = reader.paths
    named = {
        "run": paths.root,
        "model": paths.served_model,
        "train_trajectories": _newest_merged(paths.trajectories("train")),
        "test_trajectories": _newest_merged(paths.trajectories("test")),
        "logs": paths.logs,
        "events": paths.events,
    }
    found = {
        name: str(path)
        for name, path in named.items()
        if path is not None and (path.exists() or path.is_symlink())
    }
    failed = {one.node_rank for one in reader.history.failures if one.iteration == reader.position[1]}
    troubled = [node for node in nodes if node.state in ("lost", "suspected") or node.node_rank in failed]
    return found | {f"node_{node.node_rank}_logs": node.logs for node in troubled[:4] if node.logs}


def _newest_merged(folder: Path) -> Path | None:
    """The merged file of the newest iteration in a folder of trajectories."""
    try:
        merged = {path: found.iteration for path in folder.iterdir() if (found := MERGED.parse(path.name))}
    except OSError:
        return None
    return max(merged, key=merged.__getitem__, default=None)
