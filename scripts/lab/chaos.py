#!/usr/bin/env python3
"""Many real daemons on this machine, struck at random, and a judge that knows nothing of their code.

    python scripts/lab/chaos.py --nodes 8 --minutes 2 --seed 7

For `--minutes` daemons are killed and started again, stopped and let go on, the leader more often than others. Then all are started,
the run is stopped in order, and tests/outside_checker.py reads what lies on disk. Exit code 0: every daemon ended with 0, nothing of
them is left, and the judge finds nothing wrong. The same seed strikes the same nodes in the same way, at about the same times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
# How often the live line is drawn.
LINE_S = 0.5
# How long settling and stopping may take.
END_S = 300.0
#: nodes up to which a beat of so many seconds is easy for one core: each daemon looks, beats and parses its peers' beats
BEATS = ((8, 0.2), (16, 0.5), (64, 2.0))


class Node:
    """One rank's daemon, as it is now."""

    def __init__(self, rank: int, argv: list[str], folder: Path) -> None:
        self.rank, self.argv, self.folder = rank, argv, folder
        self.process: subprocess.Popen[bytes] | None = None
        # when to start it again or let it go on
        self.due: tuple[float, str] | None = None

    @property
    def state(self) -> str:
        if self.process is None or self.process.poll() is not None:
            return "dead"
        return "paused" if self.due is not None else "alive"

    def start(self) -> None:
        with (self.folder / f"node_{self.rank}.txt").open("ab") as out:
            env = {k: v for k, v in os.environ.items() if "RANK" not in k} | {"PYTHONPATH": str(REPO)}
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def said(self, lines: int = 5) -> str:
        text = (self.folder / f"node_{self.rank}.txt").read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in text[-lines:])


class Chaos:
    """The daemons of one run and who strikes them."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.dice = random.Random(arguments.seed)
        self.log_path, self.idle = folder / "run", threading.Event()
        # a worker needs its rank and nothing else
        first = ["--master", "--num-nodes", str(arguments.nodes), "--program", arguments.program]
        first += self.flags(arguments)
        base = [sys.executable, "-m", "fsbarrier", "run", "--log-path", str(self.log_path)]
        self.nodes = [
            Node(rank, [*base, *(first if rank == 0 else ["--worker", str(rank)])], folder)
            for rank in range(arguments.nodes)
        ]
        self.struck: dict[str, int] = {}

    def flags(self, arguments: argparse.Namespace) -> list[str]:
        """What node 0 is told beside the program."""
        beat_s = arguments.beat_s or next((b for n, b in BEATS if n >= arguments.nodes), BEATS[-1][1])
        self.dead_s = 10 * beat_s
        return [
            f"coordination.beat_s={beat_s:g}",
            f"coordination.dead_s={self.dead_s:g}",
            f"toy.tasks={arguments.tasks}",
            f"toy.phase_s={arguments.phase_s:g}",
        ]

    def start(self) -> None:
        """Start all; returns once they are members."""
        before = self.newest().get("number", 0)
        for node in self.nodes:
            node.start()
        self.wait_for_all(after=before)
        self.show("started")

    def wait_for_all(self, after: int = 0) -> bool:
        """Wait until the newest generation, later than number `after`, holds every node; False if that does not come, or cannot."""
        deadline = time.monotonic() + END_S
        while self.newest().get("number", 0) <= after or len(self.members()) < len(self.nodes):
            if time.monotonic() > deadline or any(node.state == "dead" for node in self.nodes):
                return False
            self.idle.wait(0.2)
        return True

    # --- striking ---

    def strike(self, seconds: float) -> None:
        """Until `seconds` have passed: about one strike for each second and a half of `dead_s`."""
        end, shown = time.monotonic() + seconds, 0.0
        following = time.monotonic()
        while (now := time.monotonic()) < end:
            self.bring_back(now)
            if now >= following:
                self.strike_one(now)
                following = now + self.dice.uniform(0.2, 0.8) * self.dead_s
            if now - shown >= (LINE_S if sys.stdout.isatty() else 10.0):
                self.show(f"{end - now:.0f} s left")
                shown = now
            self.idle.wait(min(0.1, max(0.0, end - now)))

    def strike_one(self, now: float) -> None:
        alive = [node for node in self.nodes if node.state == "alive"]
        how, whom = self.dice.choice(("kill", "kill", "blink", "pause", "all")), self.dice.random()
        if len(alive) <= max(1, len(self.nodes) // 2):
            # Enough nodes are down.
            return
        if how == "all" and self.dice.random() < 0.8:
            how = "kill"
        back = now + self.dice.uniform(0.0, 2.0) * self.dead_s
        leader = self.newest().get("leader", 0)
        for node in alive if how == "all" else [alive[int(whom * len(alive))]]:
            if whom < 0.2 and self.nodes[leader] in alive:
                node = node if how == "all" else self.nodes[leader]
            if how in ("kill", "all"):
                node.send(signal.SIGKILL)
                node.due = back, "start"
            else:
                node.send(signal.SIGSTOP)
                node.due = (now + 0.3 * self.dead_s if how == "blink" else back), "go on"
        self.struck[how] = self.struck.get(how, 0) + 1

    def bring_back(self, now: float) -> None:
        for node in self.nodes:
            if node.due is not None and now >= node.due[0]:
                how, node.due = node.due[1], None
                if how == "start":
                    node.start()
                else:
                    node.send(signal.SIGCONT)

    # --- looking ---

    def newest(self) -> dict[str, Any]:
        """The newest generation's record: to show it, to find the leader, and to see who is in. Nothing is judged by it."""
        found = sorted((self.log_path / "coordination" / "generations").glob("gen-*.json"))
        try:
            record: dict[str, Any] = json.loads(found[-1].read_bytes().partition(b"\n")[2])
        except (IndexError, OSError, ValueError):
            return {}
        return record

    def members(self) -> list[int]:
        return [member["rank"] for member in self.newest().get("members", [])]

    def show(self, what: str) -> None:
        states = [node.state for node in self.nodes]
        merged = [
            p for p in self.log_path.glob("train_trajectories/*") if re.fullmatch(r".*iteration\d+", p.name)
        ]
        newest = self.newest()
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("alive", "paused", "dead"))
        struck = ", ".join(f"{count} x {how}" for how, count in sorted(self.struck.items())) or "none yet"
        line = (
            f"{what}: {counts}; generation {newest.get('number', 0)}, {len(merged)} merged; strikes: {struck}"
        )
        end = "\r" if sys.stdout.isatty() else "\n"
        print(f"{line:<110}" if end == "\r" else line, end=end, flush=True)

    # --- the end ---

    def settle(self) -> None:
        """All go on or are started again; once a generation holds them all, or time is up, the run is asked to stop."""
        self.bring_back(float("inf"))
        for node in self.nodes:
            # A dead node ended by itself, which is wrong: `ends` reports its exit code.
            if node.state == "dead":
                print(f"node {node.rank} had ended by itself\n{node.said()}", flush=True)
        self.show("settled" if self.wait_for_all() else "NOT settled")
        print(flush=True)
        argv = [sys.executable, "-m", "fsbarrier", "stop", "--log-path", str(self.log_path)]
        subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(REPO)}, check=False, timeout=END_S)

    def ends(self) -> list[str]:
        """How the daemons ended, as far as it is wrong."""
        wrong, deadline = [], time.monotonic() + END_S
        for node in self.nodes:
            assert node.process is not None
            try:
                code = node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                wrong.append(f"node {node.rank} does not end\n{node.said()}")
                continue
            if code:
                wrong.append(f"node {node.rank} ended with {code}\n{node.said()}")
        return wrong

    def leftovers(self) -> list[str]:
        """Processes that name this run in their command line, waiting a little for those that are ending."""
        found: list[str] = []
        for _ in range(50):
            found = []
            for entry in Path("/proc").iterdir():
                try:
                    line = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
                except OSError:
                    continue
                if os.fsencode(self.log_path) in line and int(entry.name) != os.getpid():
                    found.append(
                        f"process {entry.name} is left: {line.replace(bytes(1), b' ').decode(errors='replace')}"
                    )
            if not found:
                break
            self.idle.wait(0.1)
        return found

    def kill_all(self) -> None:
        for node in self.nodes:
            if node.state != "dead":
                node.send(signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=8, help="daemons, up to 64 (default 8)")
    parser.add_argument("--program", choices=("toy", "ping"), default="toy")
    parser.add_argument("--minutes", type=float, default=1.0, help="of striking (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--beat-s", type=float, help="a heartbeat; dead are those silent for ten (default: by nodes)"
    )
    parser.add_argument("--tasks", type=int, default=48, help="toy: tasks of an iteration (default 48)")
    parser.add_argument("--phase-s", type=float, default=0.2, help="toy: seconds of a working phase")
    parser.add_argument("--path", type=Path, help="where to make the run (default: temporary); kept if given")
    arguments = parser.parse_args()
    if not 1 <= arguments.nodes <= 64:
        parser.error(f"--nodes {arguments.nodes}: must be 1 to 64")
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=arguments.path))
    chaos = Chaos(arguments, folder)
    # SIGTERM also ends what was started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        chaos.start()
        chaos.strike(arguments.minutes * 60)
        chaos.settle()
        wrong = chaos.ends()
    finally:
        chaos.kill_all()
    wrong += chaos.leftovers()
    tasks = ["--tasks", str(arguments.tasks)] if arguments.program == "toy" else []
    judge = [sys.executable, str(REPO / "tests" / "outside_checker.py"), str(chaos.log_path), *tasks]
    judged = subprocess.run(judge, capture_output=True, text=True, check=False)
    print("\n".join([*wrong, f"the judge: {judged.stdout.strip()}{judged.stderr}"]))
    if wrong or judged.returncode or arguments.path is not None:
        print(f"kept: {folder}; seed {arguments.seed}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong or judged.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
