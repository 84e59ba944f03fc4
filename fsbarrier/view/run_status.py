"""The status of a run and its nodes, as shown by `fsbarrier status` and the live view."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fsbarrier.errors import EXIT_SIGINT, EXIT_SIGTERM
from fsbarrier.protocol.membership import GONE, UNWRITABLE
from fsbarrier.rundir.journal import text
from fsbarrier.rundir.logs import log_folders
from fsbarrier.rundir.names import MERGED
from fsbarrier.view.event_wording import TRAIN_ROLLOUT
from fsbarrier.view.history import Draws, Rewards
from fsbarrier.view.node_status import ALIVE, WATCHED_BEATS, NodeStatus, PhaseAt, beat_s, node_status
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.timings import NEWEST_ITERATIONS, IterationTime, goodput, together
from fsbarrier.wording import duration, one_line, ranks

#: polling interval while watching heartbeats
LOOK_S = 0.05

#: Time in seconds that a new generation must cost to be shown as an interruption.
LEAST_COST_S = 1.0
#: A filesystem with less free space than this counts as full.
FULL_BYTES = 1 << 20
#: number of iterations whose timings `status` keeps
KEPT_ITERATIONS = 50
#: How much of the end of the journals to read on the first poll: for `status` and `top`, which show only a few iterations, and for reports,
#: whose tables have many. With 64 nodes this is about 3 and 100 iterations.
STATUS_BYTES = 2 << 20
REPORT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Waiting:
    """A barrier that some members have reached: the missing members, and the waiting time (None: unknown)."""

    node_ranks: tuple[int, ...]
    for_s: float | None


@dataclass(frozen=True, slots=True)
class Interruption:
    """A generation before which time was lost, and why it began."""

    generation: int
    reason: str
    cost_s: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The current state of a run. `iterations`: the last requested; None: endless. `exit_code`: None while the run is active."""

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
    #: the latest figures of the training, by name
    figures: Mapping[str, float]
    #: productive time over wall time, in the iterations that were read; and the time lost before generations, largest first
    goodput: float | None
    interruptions: tuple[Interruption, ...]
    #: what became of the drawn tasks, if rollouts may end before all are done
    draws: Draws | None = None
    exit_code: int | None = None

    @property
    def finished_times(self) -> list[IterationTime]:
        """The timings of the complete iterations."""
        return [timing for timing in self.times if timing.complete]

    def to_json(self) -> dict[str, object]:
        """The output of `fsbarrier status --json`."""
        body = asdict(self)
        del body["times"]
        totals = together(self.finished_times[-1:]).phases
        body["phases_s"] = {name: round(seconds, 6) for (_, name), seconds in totals.items()}
        body["coordination"] = [
            {
                "iteration": timing.iteration,
                "seconds": round(timing.seconds, 6),
                "coordination_s": round(timing.coordination_s, 6),
                "share": round(timing.share, 6),
            }
            for timing in self.finished_times
        ]
        return body


def read_status(log_path: Path, *, watch: bool = True) -> RunStatus:
    """Read the status of a run. `watch`: wait until every heartbeat has advanced, at most 1.5 beats, to see which nodes are alive.

    Raises UsageError if there is no run.
    """
    reader = status_reader(log_path)
    began = time.monotonic()
    deadline = began + WATCHED_BEATS * beat_s(reader) if watch else began
    pause = threading.Event()
    reader.poll(began)
    while reader.unsure() and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        reader.poll(time.monotonic())
    return status_of(reader, time.monotonic())


def status_reader(log_path: Path) -> RunReader:
    """A reader for the current state of a run. Raises UsageError if there is no run."""
    return RunReader(log_path, KEPT_ITERATIONS, STATUS_BYTES, all_pasts=False)


def look_once(log_path: Path) -> tuple[RunReader, RunStatus]:
    """A reader with the history of a run, and its status. Raises UsageError if there is no run."""
    reader = RunReader(log_path, newest_bytes=REPORT_BYTES)
    reader.poll(time.monotonic())
    return reader, status_of(reader, time.monotonic())


def status_of(reader: RunReader, now: float) -> RunStatus:
    """The status according to `reader`. `now`: this process's monotonic time."""
    newest, (number, iteration, phase) = reader.newest, reader.position
    num_nodes = reader.settings.num_nodes
    ranks = sorted({*range(num_nodes), *reader.joins, *reader.ledger.seen})
    logs = log_folders(reader.paths)
    nodes = tuple(node_status(reader, rank, now, logs.get(rank)) for rank in ranks)
    state, exit_code = _state(reader, nodes)
    times = tuple(timing for timing in reader.times() if timing.complete or len(timing.phases) > 1)
    good = goodput(reader.rows())
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
        waiting_for=_waiting(reader, nodes, state),
        rewards=tuple(reader.history.rewards()),
        times=times,
        problems=tuple(problems(reader, nodes, state)),
        files=_files(reader, nodes),
        figures=_figures(reader, times) | (_time_left(reader, times) if state == "running" else {}),
        goodput=None if good is None else round(good.share, 4),
        interruptions=tuple(_interruptions(reader, {} if good is None else good.costs_s)),
        draws=reader.history.draws(),
        exit_code=exit_code,
    )


def elapsed_s(reader: RunReader) -> float | None:
    """Seconds since this session began, by wall clocks (for display only)."""
    starts = [
        event.at
        for event in reader.history.events
        if event.name == "generation_started" and event.text("reason").startswith("start")
    ]
    if not starts:
        return None
    begin, ends = max(starts), [ending.at for ending in reader.history.endings.values()]
    over = reader.newest is not None and len(ends) >= len(reader.newest.ranks) and min(ends) >= begin
    return max(0.0, (max(ends) if over else time.time()) - begin)


def _last_iteration(reader: RunReader) -> int | None:
    if reader.newest is not None and reader.newest.verdict is None:
        return reader.newest.until
    return reader.joins[min(reader.joins)].until if reader.joins else None


def _state(reader: RunReader, nodes: tuple[NodeStatus, ...]) -> tuple[str, int | None]:
    """The state of the run, and its exit code if it has ended."""
    newest = reader.newest
    if newest is not None and newest.verdict is not None and all(node.state != "joining" for node in nodes):
        return ("broken" if newest.verdict.exit_code else "stopped"), newest.verdict.exit_code
    if any(node.state in ALIVE for node in nodes):
        return "running", None
    members = [node for node in nodes if newest is not None and node.node_rank in newest.ranks]
    # Before the run began there are no members yet; ignore nodes that never started.
    members = members or [node for node in nodes if node.state != "absent"]
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
    return (ending.integer("code") if ending is not None else None) or 0


def _waiting(reader: RunReader, nodes: tuple[NodeStatus, ...], state: str) -> Waiting | None:
    if state not in ("running", "stalled"):
        return None
    newest = reader.newest
    if newest is None or newest.verdict is not None:
        missing = tuple(node.node_rank for node in nodes if node.state in ("absent", "lost"))
        return Waiting(missing, None) if missing else None
    missing = tuple(rank for rank in newest.ranks if rank not in reader.arrived)
    if not missing or not reader.arrived:
        return None
    waited_s = reader.waited_s()
    return Waiting(missing, None if waited_s is None else round(waited_s, 3))


# --- the training ---------------------------------------------------------------------------------------------------------


def _figures(reader: RunReader, times: Sequence[IterationTime]) -> dict[str, float]:
    """The latest loss, entropy, figures of answers, tokens per second of all nodes in a training rollout, and updates at risk."""
    figures = reader.history.latest_figures()
    phases_s = {
        timing.iteration: {name: seconds for (_, name), seconds in timing.phases.items()}
        for timing in times
        if timing.complete
    }
    for iteration, event in reader.history.reports("rolled_out").items():
        seconds = phases_s.get(iteration, {}).get(TRAIN_ROLLOUT)
        tokens = (event.number("answer_tokens_mean") or 0.0) * (event.number("trajectories") or 0.0)
        figures |= {"tokens_per_s": tokens / seconds} if seconds and tokens else {}
    return figures


def _interruptions(reader: RunReader, costs_s: Mapping[int, float]) -> Iterator[Interruption]:
    reasons = {
        event.generation: one_line(event.text("reason"))
        for event in reader.history.events
        if event.name == "generation_started"
    }
    for generation, seconds in sorted(costs_s.items(), key=lambda item: -item[1]):
        if seconds >= LEAST_COST_S:
            yield Interruption(generation, reasons.get(generation, ""), round(seconds, 3))


def _time_left(reader: RunReader, times: Sequence[IterationTime]) -> dict[str, float]:
    """Estimate the seconds until the last iteration ends from the mean of the newest ones; {} if there is no end, or none is complete."""
    newest = [timing.seconds for timing in times if timing.complete][-NEWEST_ITERATIONS:]
    until = _last_iteration(reader)
    left = until - reader.position[1] + 1 if until is not None else 0
    return {"left_s": left * sum(newest) / len(newest)} if newest and left > 0 else {}


# --- files ----------------------------------------------------------------------------------------------------------------


def _files(reader: RunReader, nodes: tuple[NodeStatus, ...]) -> dict[str, str]:
    """Paths of interest, by name."""
    paths = reader.paths
    named = {
        "run": paths.root,
        "model": paths.served_model,
        "train_trajectories": _newest_merged(paths.trajectories("train")),
        "test_trajectories": _newest_merged(paths.trajectories("test")),
        "logs": paths.logs,
        "events": paths.events,
    }
    files = {
        name: str(path)
        for name, path in named.items()
        if path is not None and (path.exists() or path.is_symlink())
    }
    failed = {
        failure.node_rank for failure in reader.history.failures if failure.iteration == reader.position[1]
    }
    troubled = [node for node in nodes if node.state in ("lost", "suspected") or node.node_rank in failed]
    return files | {f"node_{node.node_rank}_logs": node.logs for node in troubled[:4] if node.logs}


def _newest_merged(folder: Path) -> Path | None:
    """The merged file of the newest iteration in a folder of trajectories."""
    try:
        merged = {path: parsed.iteration for path in folder.iterdir() if (parsed := MERGED.parse(path.name))}
    except OSError:
        return None
    return max(merged, key=merged.__getitem__, default=None)


# --- problems -------------------------------------------------------------------------------------------------------------


def problems(reader: RunReader, nodes: Sequence[NodeStatus], state: str) -> list[str]:
    """Problems, one line each, the worst first. A line that begins with a space is a program's output."""
    problems = _unwritable(reader, nodes)
    verdict = reader.newest.verdict if reader.newest is not None else None
    if verdict is not None and state == "broken":
        problems += verdict.reason.splitlines()
    for node in nodes:
        name = f"node {node.node_rank}{f' ({node.host})' if node.host else ''}"
        if node.state == "absent" and reader.newest is None:
            problems.append(f"{name} has not been started yet")
        elif node.state == "suspected":
            problems.append(f"{name}: no heartbeat in {duration(node.silent_s or 0.0)} of watching")
        elif node.state == "lost":
            problems.append(f"{name} is lost: {_why_lost(reader, node)}")
            who = f"--worker {node.node_rank}" if node.node_rank else "--master"
            command = f"fsbarrier run {who} --log-path {shlex.quote(str(reader.log_path))}"
            problems.append(f"  start it again there: {command}")
        elif awaits := text(node.progress or {}, "awaits"):
            problems.append(one_line(f"{name}: {awaits}"))
    if state != "broken" or verdict is None:
        problems += _early_endings(reader, nodes)
    if state in ("running", "stalled") or (state == "broken" and reader.newest and verdict is None):
        problems += _failures(reader)
    if state == "stalled" and nodes and all(node.state in ("lost", "left", "absent") for node in nodes):
        problems.append("no node of this run is alive; start it again to resume")
    problems += [one_line(fault) for fault in reader.faults]
    return list(dict.fromkeys(problems))


def _unwritable(reader: RunReader, nodes: Sequence[NodeStatus]) -> list[str]:
    """The problem, if nodes cannot write: the disk is full (which also silences them), or their heartbeats' names report it."""
    root = reader.log_path
    with contextlib.suppress(OSError):
        room = os.statvfs(root)
        lacks = "bytes" if room.f_bavail * room.f_frsize < FULL_BYTES else ""
        lacks = "inodes" if room.f_files and not room.f_favail else lacks
        if lacks and any(node.activity or node.state in ("suspected", "lost") for node in nodes):
            return [
                f"the filesystem of {root} is full (no {lacks} left), "
                "so no node can write; make room, and start again those that have ended"
            ]
    beats = {rank: reader.beat(rank) for rank in sorted(reader.joins)}
    unwritable = [rank for rank, beat in beats.items() if beat is not None and beat.state == UNWRITABLE]
    who = f"node{'s' if len(unwritable) > 1 else ''} {ranks(unwritable)}"
    problem = f"{who} cannot write in {root} (room, quota, permission); their output says what fails"
    return [problem] if unwritable else []


def _why_lost(reader: RunReader, node: NodeStatus) -> str:
    """Why a node is considered lost: reported by other nodes, or its process is gone."""
    member = reader.newest is not None and reader.newest.incarnation_of(node.node_rank) == node.incarnation
    known = [why for (_, rank), why in reader.history.losses.items() if rank == node.node_rank]
    if known and not member:
        return known[-1]
    return f"process {node.pid} is gone" if reader.process_gone(node.node_rank) else "no heartbeat"


def _early_endings(reader: RunReader, nodes: Sequence[NodeStatus]) -> list[str]:
    """The reasons why nodes left before the run's end, each once."""
    reasons: dict[str, list[int]] = {}
    for node in nodes:
        ending = reader.history.endings.get(node.node_rank)
        if node.state in ("left", "broken") and ending is not None:
            reasons.setdefault(one_line(ending.text("reason")), []).append(node.node_rank)
    return [
        f"node{'s' if len(who) > 1 else ''} {ranks(who)} ended: {reason}" for reason, who in reasons.items()
    ]


def _failures(reader: RunReader) -> list[str]:
    """The programs that failed in the current iteration, each once, with their last log lines."""
    failures = [failure for failure in reader.history.failures if failure.iteration == reader.position[1]]
    latest = {(failure.node_rank, failure.phase): failure for failure in failures}
    problems = []
    for key, failure in list(latest.items())[-3:]:
        tries = sum((failure.node_rank, failure.phase) == key for failure in failures)
        times = f" ({tries} times)" if tries > 1 else ""
        phase = f"{failure.phase} {failure.phase_name}"
        where = f"node {failure.node_rank}, iteration {failure.iteration}, phase {phase}"
        problems.append(f"{where} failed{times}: {one_line(failure.text('error')) or 'unknown error'}")
        log = failure.lines("log")
        problems += [f"  | {one_line(line)}" for line in (*log[:1], *log[1:][-4:])]
    return problems
