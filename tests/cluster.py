"""A run of real daemons on this machine, for tests: start, kill, wait for what the journals say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forks import Daemon
from waiting import DEADLINE_S, until

from fsbarrier.processes import processes
from fsbarrier.protocol.facts import Beat
from fsbarrier.rundir.heartbeats import read_beats, request_stop
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import load, scan_rank_file

REPO = Path(__file__).resolve().parent.parent
Event = dict[str, Any]
#: A killed daemon is named at once. Its silence would not be, so that a busy machine makes nobody look dead.
FAST = (
    "coordination.beat_s=0.2",
    "coordination.dead_s=10",
    "toy.phase_s=0.1",
    "toy.tasks=24",
)


class Cluster:
    """`nodes` daemons of one run directory, each in its own process group with its own output file.

    Daemons are forks (forks.py), except those of the default program, those with another command or other modules to import, and all of a
    cluster that is `real`: a test that looks at guards, command lines or what is left over needs real ones.
    """

    def __init__(
        self, folder: Path, nodes: int = 3, *flags: str, program: str = "toy", real: bool = False
    ) -> None:
        self.log_path, self.nodes = folder / "run", nodes
        self.real = real or program == "rl"
        self.program, self.flags = program, ("--program", program, *flags)
        self.processes: dict[int, subprocess.Popen[bytes] | Daemon] = {}
        self.prefix: dict[int, tuple[str, ...]] = {}  # of a node's command
        self.env: dict[int, dict[str, str]] = {}
        self.modules = str(REPO)  # where daemons and their programs find modules
        self.output = folder / "output"
        self.output.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def start(self, *ranks: int) -> None:
        """Start these nodes (all, if none is named)."""
        for rank in ranks or range(self.nodes):
            if rank == 0:
                self.start_as(0, "--master", "--num-nodes", str(self.nodes), *self.flags)
            else:
                self.start_as(rank, "--worker", str(rank))

    def start_as(self, rank: int, *who: str) -> None:
        """Start one node with these words; its rank in the run may be another one, which only the journal tells."""
        words = ["run", "--log-path", str(self.log_path), *who]
        given = self.env.get(rank, {})
        env = {k: v for k, v in os.environ.items() if "RANK" not in k} | {"PYTHONPATH": self.modules} | given
        path = self.output / f"node_{rank}.txt"
        if not (self.real or rank in self.prefix or "PYTHONPATH" in given):
            self.processes[rank] = Daemon(words, env, path)
            return
        argv = [*self.prefix.get(rank, ()), sys.executable, "-m", "fsbarrier", *words]
        with path.open("ab") as out:
            self.processes[rank] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        self.processes[rank].wait()

    def wait(self, *ranks: int, deadline_s: float = DEADLINE_S) -> dict[int, int]:
        """The exit codes of these nodes (all that were started), once they have ended."""
        end = time.monotonic() + deadline_s
        codes = {}
        for rank in ranks or tuple(self.processes):
            try:
                codes[rank] = self.processes[rank].wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"node {rank} does not end\n{self.said(rank)}") from None
        return codes

    def stop(self) -> None:
        """Ask the run to end at its next safe point."""
        request_stop(self.log_path, now=False)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.log_path)

    def events(self) -> list[Event]:
        return [dict(event.fields) for event in read_events(self.log_path)]

    def wait_for(self, what: Callable[[Event], bool], deadline_s: float = DEADLINE_S) -> Event:
        """The first event that `what` accepts, waiting for it."""
        return until(lambda: next(filter(what, self.events()), None), self.said_by_all, deadline_s=deadline_s)

    def in_phase(self, rank: int, phase: int, iteration: int = 1) -> Event:
        """Wait until a node has entered a phase."""
        place = ("phase_started", rank, iteration, phase)
        return self.wait_for(lambda e: (e["event"], e["node_rank"], e["iteration"], e["phase"]) == place)

    def beating(self, rank: int, what: Callable[[Beat], bool], deadline_s: float = DEADLINE_S) -> Beat:
        """The first heartbeat of a node that `what` accepts, waiting for it."""

        def beat() -> Beat | None:
            found = read_beats(self.log_path).get(rank)
            return found if found is not None and what(found) else None

        return until(beat, lambda: self.said(rank), deadline_s=deadline_s)

    def tree(self, rank: int) -> dict[int, int]:
        """All that a node runs now, its daemon too: pid -> start time."""
        pid = self.processes[rank].pid
        return {pid: processes.Stat(pid).start, **processes.below(pid)}

    def running(self, rank: int, *words: str, deadline_s: float = 400.0) -> dict[int, int]:
        """All that a node runs, once each of these words is in a command line of it."""

        def tree() -> dict[int, int] | None:
            found = self.tree(rank)
            shown = command_lines(found)
            return found if all(word in shown for word in words) else None

        return until(
            tree,
            lambda: f"{words} do not appear\n{command_lines(self.tree(rank))}\n{self.said(rank)}",
            deadline_s=deadline_s,
        )

    def said_by_all(self) -> str:
        return "\n".join(self.said(rank) for rank in self.processes)

    def said(self, rank: int) -> str:
        path = self.output / f"node_{rank}.txt"
        return (
            f"--- node {rank}\n{path.read_text(errors='replace')}"
            if path.exists()
            else f"--- node {rank}: nothing"
        )


def command_lines(tree: Iterable[int]) -> str:
    """The command lines of these processes, one a line."""
    lines = []
    for pid in tree:
        with contextlib.suppress(OSError):
            lines.append(
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
    return "\n".join(lines)


def all_gone(tree: dict[int, int], deadline_s: float = DEADLINE_S) -> bool:
    """Whether all these processes end within the time given."""
    end, pause, now = time.monotonic() + deadline_s, threading.Event(), processes.scan()
    while any((one := now.get(pid)) and one.start == start and not one.ended for pid, start in tree.items()):
        if time.monotonic() > end:
            return False
        pause.wait(0.02)
        now = processes.scan()
    return True


def assert_exactly_once(log_path: Path, iterations: int, tasks: int = 24, split: str = "train") -> None:
    """Every task of every iteration is in the merged file once, sampled from the policy of that iteration."""
    for iteration in range(1, iterations + 1):
        merged = load(RunPaths(log_path).merged(split, iteration))
        counts = Counter(t["task_index"] for t in merged["trajectories"])
        assert counts == Counter(range(tasks)), f"{split}, iteration {iteration}"
        assert {t["policy_version"] for t in merged["trajectories"]} == {iteration - 1}
        assert all(len(t["token_ids"]) == len(t["loss_mask"]) for t in merged["trajectories"])


def rolled_out_twice(log_path: Path, iteration: int, split: str) -> list[int]:
    """The tasks that more than one part durably holds: what was there was not used."""
    folder, merged = RunPaths(log_path).trajectories(split), RunPaths(log_path).merged(split, iteration)
    parts = folder.glob(f"{merged.name}_rank_*.part")
    counts = Counter(group.task_index for part in parts for group in scan_rank_file(part).groups)
    return sorted(task for task, count in counts.items() if count > 1)


def leftovers(named: Path) -> dict[int, str]:
    """Processes that still name a path in their command line, with that line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(named) in line:
                found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found
