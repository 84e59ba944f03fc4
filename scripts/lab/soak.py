#!/usr/bin/env python3
"""A week in an hour: real daemons of the toy program for thousands of iterations, struck now and then, and watched for growth.

    python scripts/lab/soak.py --nodes 8 --iterations 5000 --seed 7
    python scripts/lab/soak.py --go-on FOLDER --minutes 15     some more of a run that `--minutes` ended, or that was kept

Daemons are killed, stopped and started again at random, as scripts/lab/chaos.py does it but less often, until the run has done its
iterations, `--minutes` are over, or a bound is exceeded. All the while each daemon's memory and open files, the files in the run directory
and the journals are measured. Then tests/outside_checker.py judges the run. Exit code 0: every bound was kept, every daemon ended with 0,
and nothing is wrong.

The program is scripts/lab/soak_program.py, which starts processes in few iterations. The run lies in memory (/dev/shm) where no other place
is named: an iteration flushes some fifty files one after the other, and on a disk most of its time goes there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos import REPO, Chaos

sys.path.insert(0, str(REPO / "tests"))
import outside_checker
from soak_program import PROCESSES_EVERY

#: rows of the toy program
ROWS = 14
#: how often everything is measured
MEASURE_S = 5.0
#: a daemon's memory counts as settled so long after its start; from then on growth is counted
WARM_S = 60.0
#: of how many iterations the trajectories stay
KEPT = 100
MERGED = re.compile(r"train_trajectories\.pt\.iteration(\d+)")


@dataclass
class Bound:
    """One thing that is measured: the most that was seen, and the most that may be."""

    what: str
    unit: str
    most: float
    seen: float = 0.0

    def see(self, value: float) -> None:
        self.seen = max(self.seen, value)

    @property
    def exceeded(self) -> bool:
        return self.seen > self.most

    @property
    def line(self) -> str:
        verdict = "EXCEEDED" if self.exceeded else "ok"
        return f"{self.what:<58} {self.seen:>10.1f} {self.most:>10.1f} {self.unit:<6} {verdict}"


@dataclass
class Daemon:
    """One start of a daemon: when it was first measured, and its memory once that had settled."""

    since: float
    settled_mib: float | None = None


@dataclass
class Meter:
    """Measures a run while it goes on, from outside."""

    soak: Soak
    memory: Bound = field(default_factory=lambda: Bound("a daemon's memory", "MiB", 250.0))
    # Its caches of names (fsbarrier/rundir/names.py) take up to 32 MiB, and fill in about half an hour.
    growth: Bound = field(default_factory=lambda: Bound("its growth after the first minute", "MiB", 40.0))
    descriptors: Bound = field(default_factory=lambda: Bound("a daemon's open files", "", 64.0))
    daemons: dict[int, Daemon] = field(default_factory=dict)
    coordination: Bound = field(init=False)
    started: Bound = field(init=False)
    journal: Bound = field(init=False)
    data: Bound = field(init=False)

    def __post_init__(self) -> None:
        nodes = len(self.soak.nodes)
        # Three facts of each node a row, in two generations and in those that are about to be removed; then claims and folders.
        self.coordination = Bound("files of generations in coordination/", "", 4.0 * 3 * nodes * ROWS + 1000)
        self.started = Bound("other files, for each start or change of members", "", 12.0)
        self.journal = Bound("journal of a node, for each iteration", "KiB", 16.0)
        # Of each split the merged file and each rank's, under two names each. Those of an iteration under way are more than KEPT.
        self.data = Bound("files of trajectories, for each node and iteration kept", "", 4.6 + 4.0 / nodes)

    @property
    def bounds(self) -> list[Bound]:
        return [
            self.memory,
            self.growth,
            self.descriptors,
            self.coordination,
            self.started,
            self.journal,
            self.data,
        ]

    def measure(self, iteration: int) -> None:
        for node in self.soak.nodes:
            if node.process is not None and node.state == "alive":
                self._measure_daemon(node.process.pid)
        root, nodes = self.soak.log_path, len(self.soak.nodes)
        coordination = root / "coordination"
        self.coordination.see(sum(count_below(folder) for folder in coordination.glob("gen-0*")))
        known = {"coordination", "train_trajectories", "test_trajectories", "checkpoints"}
        others = sum(count_below(root / name) for name in ("logs", "events") if (root / name).is_dir()) + sum(
            count_below(coordination / name) for name in ("joins", "beats", "status", "generations", "stops")
        )
        starts = len(list((coordination / "joins").glob("*.json")))
        changes = len(list((coordination / "generations").glob("*.json")))
        self.started.see((others + len(set(os.listdir(root)) - known)) / max(1, starts + changes))
        if iteration > 5:
            journals = sum(path.stat().st_size for path in (root / "events").glob("*.jsonl"))
            # What a loss or a start adds is not the iterations'.
            self.journal.see(max(0.0, journals / 1024 - 32.0 * (starts + changes)) / iteration / nodes)
            trajectories = sum(count_below(root / f"{split}_trajectories") for split in ("train", "test"))
            kept = min(iteration, KEPT)
            self.data.see(max(0.0, trajectories - 2.0 * nodes * min(changes, kept)) / kept / nodes)

    def _measure_daemon(self, pid: int) -> None:
        now, proc = time.monotonic(), Path(f"/proc/{pid}")
        try:
            resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.descriptors.see(len(os.listdir(proc / "fd")))
        except (OSError, IndexError):
            return
        daemon = self.daemons.setdefault(pid, Daemon(now))
        self.memory.see(resident)
        if now - daemon.since >= WARM_S:
            daemon.settled_mib = resident if daemon.settled_mib is None else daemon.settled_mib
            self.growth.see(resident - daemon.settled_mib)


class Soak(Chaos):
    """Strikes until the run has done its iterations, and measures meanwhile."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        super().__init__(arguments, folder)
        self.nodes[0].argv += ["--iterations", str(arguments.iterations)]
        self.nodes[0].argv += [
            "--eval-interval",
            str(PROCESSES_EVERY),
            f"checkpoint.keep_trajectories={KEPT}",
        ]
        self.iterations, self.tasks = arguments.iterations, arguments.tasks
        self.meter = Meter(self)
        #: what is wrong with merged files, which are judged soon: later they are removed
        self.wrong: list[str] = []
        self._judged: set[int] = set()

    def iteration(self) -> int:
        """Where the furthest node is, by the heartbeats of their newest starts."""
        listed = sorted((self.log_path / "coordination" / "status").glob("*.json"))
        furthest = 0
        for path in {path.name.partition(".")[0]: path for path in listed}.values():
            try:
                beat = json.loads(path.read_bytes().partition(b"\n")[2])
            except (OSError, ValueError):
                continue
            furthest = max(furthest, int(beat["iteration"]))
        return furthest

    def soak(self, every: float, most_s: float) -> int:
        """Strike about once in `every` iterations until the last ones begin, time is up or a bound is exceeded; gives the iteration."""
        began, first = time.monotonic(), self.iteration()
        following, measured = first + self.dice.uniform(0.5, 1.5) * every, began
        while (iteration := self.iteration()) < self.iterations - 2:
            now = time.monotonic()
            if now - began >= most_s or self.wrong or any(bound.exceeded for bound in self.meter.bounds):
                break
            self.bring_back(now)
            if iteration >= following:
                self.strike_one(now)
                following = iteration + self.dice.uniform(0.5, 1.5) * every
            if now - measured >= MEASURE_S:
                self.meter.measure(iteration)
                self.judge_merged(iteration)
                measured = now
                rate = (iteration - first) / (now - began)
                self.show(f"iteration {iteration} of {self.iterations}, {rate:.2f} a second")
            if all(node.state == "dead" and node.due is None for node in self.nodes):
                break
            self.idle.wait(0.2)
        return iteration

    def judge_merged(self, before: int) -> None:
        """The merged files of the iterations before this one that are new."""
        for path in (self.log_path / "train_trajectories").glob("*"):
            match = MERGED.fullmatch(path.name)
            if match is None or (number := int(match[1])) in self._judged or number >= before:
                continue
            self._judged.add(number)
            try:
                found = outside_checker.one_merged(
                    outside_checker.read_torch(path), self.tasks, number, "train"
                )
                self.wrong += [f"{path.name}: {what}" for what in found]
            except FileNotFoundError:
                # This machine stood still for as long as it takes to remove the file.
                continue

    def finish(self, iteration: int) -> list[str]:
        """Bring back whoever is down, and wait for the end; before the last iterations ask for it. Gives what is wrong about it."""
        if iteration < self.iterations - 2:
            self.settle()
        self.bring_back(float("inf"))
        wrong = self.ends()
        self.meter.measure(iteration)
        return wrong


def count_below(folder: Path) -> int:
    """Files and folders below a folder that others write to."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=8, help="daemons (default 8)")
    parser.add_argument("--iterations", type=int, default=5000, help="of the run (default 5000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=60.0, help="iterations between strikes (default 60)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of striking at most (default: no limit)"
    )
    parser.add_argument("--beat-s", type=float, default=0.5, help="a heartbeat (default 0.5)")
    parser.add_argument("--tasks", type=int, default=16, help="tasks of an iteration (default 16)")
    parser.add_argument("--phase-s", type=float, default=0.05, help="seconds of a phase with processes")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--path", type=Path, help="where to make the run (default: in memory); kept if given")
    place.add_argument(
        "--go-on", type=Path, metavar="FOLDER", help="go on with the run that was kept here; kept again"
    )
    arguments = parser.parse_args()
    arguments.program = str(REPO / "scripts" / "lab" / "soak_program.py")
    in_memory = Path("/dev/shm")
    where = arguments.path or (in_memory if in_memory.is_dir() else None)
    folder = arguments.go_on or Path(tempfile.mkdtemp(prefix="soak-", dir=where))
    soak = Soak(arguments, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        soak.start()
        iteration = soak.soak(arguments.every, arguments.minutes * 60)
        wrong = soak.finish(iteration)
    finally:
        soak.kill_all()
    wrong += [*soak.wrong, *soak.leftovers()]
    judge = [sys.executable, str(REPO / "tests" / "outside_checker.py"), str(soak.log_path)]
    judged = subprocess.run(
        [*judge, "--tasks", str(arguments.tasks)], capture_output=True, text=True, check=False
    )
    wrong += [
        f"{bound.what}: {bound.seen:.1f} {bound.unit}, and {bound.most:.1f} is the bound"
        for bound in soak.meter.bounds
        if bound.exceeded
    ]
    print(f"\n{f'{iteration} iterations':<58} {'most':>10} {'bound':>10}")
    print("\n".join([*(bound.line for bound in soak.meter.bounds), *wrong]))
    print(f"the judge: {judged.stdout.strip()}{judged.stderr}")
    bad = bool(wrong or judged.returncode)
    if bad or arguments.path or arguments.go_on or iteration < soak.iterations - 2:
        print(f"kept: {folder}; seed {arguments.seed}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
