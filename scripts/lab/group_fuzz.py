#!/usr/bin/env python3
"""Groups of real processes (`fsbarrier.join`) that call at random and are struck at random, and a judge that only reads what each saw.

    python scripts/lab/group_fuzz.py --nodes 8 --seconds 60 --seed 7

All members draw the same sequence of collectives from the seed, the generation and the number of the call. Now and then one calls
something else, does nothing for a while, leaves, has a filesystem that fails, or answers an error in another way than the others. From
outside they are killed, started again, and stopped. Each writes down what it called and what came of it. From this alone the judge
concludes: whoever completed a call got the same, made of what each member gave to that very call; nobody completed it before all had
begun it; every call ended within its time, with a value or a typed error that names a node. Exit code 0: nothing is wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "scripts" / "lab")]

from group_judge import Line, digest, filling, judge, read, timing  # noqa: E402

import fsbarrier  # noqa: E402
from fsbarrier.errors import FsbarrierError, NodeError  # noqa: E402

#: characters that a member adds to what it gives
SIZES = (0, 0, 10, 1000, 100_000)
END_S = 600.0

# --- a member -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A collective as all members draw it. `size`: of what each adds."""

    name: str
    src: int
    size: int

    @classmethod
    def drawn(cls, seed: int, generation: int, number: int, members: tuple[int, ...]) -> Call:
        dice = random.Random(f"{seed}/{generation}/{number}")
        name = "sync" if number % 4 == 0 else dice.choice(("barrier", "broadcast", "all_gather"))
        return cls(name, dice.choice(members) if name == "broadcast" else -1, dice.choice(SIZES))


class Ended(Exception):
    """This member is done."""


class Caller:
    """The script of one member: calls until a file says stop."""

    def __init__(self, folder: Path, rank: int, nodes: int, seed: int) -> None:
        self.folder, self.rank, self.nodes, self.seed = folder, rank, nodes, seed
        # Each start of a rank has dice of its own.
        self.start = sum(path.name.startswith(f"{rank}.") for path in (folder / "seen").iterdir())
        self.dice = random.Random(f"{seed}/{rank}/{self.start}")
        self.log = os.open(
            folder / "seen" / f"{rank}.{self.start}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY
        )
        self.failing_until, self.joined, self.idle = 0.0, 0, threading.Event()
        self.group: Any = None
        # Seconds in which this process was at work, not stopped and not waiting for a core.
        self.awake_s = 0.0
        threading.Thread(target=self.count_seconds, daemon=True).start()

    def count_seconds(self) -> None:
        at = time.monotonic()
        while True:
            self.idle.wait(0.05)
            before, at = at, time.monotonic()
            self.awake_s += min(at - before, 0.2)

    def write(self, what: str, **fields: Any) -> float:
        """Write a line down, whole or not at all; gives when, in seconds of this process."""
        line = {"t": time.monotonic(), "what": what, "rank": self.rank, "joined": self.joined, **fields}
        os.write(self.log, json.dumps(line).encode() + b"\n")
        return self.awake_s

    def run(self) -> None:
        self.let_the_mount_fail()
        while not self.stopping():
            try:
                self.joined += 1
                about: Line = {"g": 0, "n": self.joined, "call": "join", "src": -1}
                began = self.write("begin", **about)
                try:
                    self.group = fsbarrier.join(
                        self.folder / "group", node_rank=self.rank, num_nodes=self.nodes, **timing(self.nodes)
                    )
                except NodeError as error:
                    self.failed(error, began, about)
                    continue
                self.write("member", g=self.group.generation, members=self.group.members)
                self.call_until_the_end()
            except Ended:
                return
            except fsbarrier.Fenced:
                # Another start of this rank may live; if not, this process comes back.
                if self.dice.random() < 0.3:
                    return
            finally:
                if self.group is not None:
                    self.group.leave()
                    self.write("left")
                    self.group = None

    def stopping(self) -> bool:
        return (self.folder / "stop").exists()

    def call_until_the_end(self) -> None:
        number = 0
        while True:
            drawn = Call.drawn(self.seed, self.group.generation, number, self.group.members)
            self.something_odd()
            if self.dice.random() < 0.01 and not self.stopping():
                drawn = Call("barrier" if drawn.name != "barrier" else "all_gather", -1, 0)
            number = number + 1 if self.complete(drawn, number) else 0

    def something_odd(self) -> None:
        odd, times = self.dice.random(), timing(self.nodes)
        if self.stopping():
            return
        if odd < 0.01:
            self.idle.wait(self.dice.random() * 1.5 * times["timeout_s"])
        elif odd < 0.02:
            self.failing_until = time.monotonic() + self.dice.random() * 1.5 * times["dead_s"]
        elif odd < 0.023:
            raise Ended

    def complete(self, drawn: Call, number: int) -> bool:
        """Make this call until it has ended well; False where another generation has begun instead."""
        generation = self.group.generation
        origin = [self.rank, self.start, self.joined, generation, number]
        given = {
            "from": origin,
            "filling": filling(origin, drawn.size),
            "stop": self.stopping(),
            "joiners": bool(self.group.joiners),
        }
        about: Line = {"g": generation, "n": number, "call": drawn.name, "src": drawn.src}
        while True:
            began = self.write("begin", **about, origin=origin, size=drawn.size)
            try:
                got = self.make(drawn, given)
                break
            except NodeError as error:
                self.failed(error, began, about)
                if isinstance(error, fsbarrier.Fenced):
                    raise
                again = isinstance(error, fsbarrier.BarrierTimeout | fsbarrier.StoreError)
                if again and self.dice.random() < 0.2:
                    self.make_another(drawn, about, type(error).__name__)
                if not (again and self.dice.random() < 0.7):
                    self.regroup()
                    return False
        said = [[one["from"], digest(one["filling"])] for one in got]
        self.write("end", **about, got=said, members=self.group.members, seconds=self.awake_s - began)
        if drawn.name == "sync" and any(one["stop"] for one in got):
            raise Ended
        if drawn.name == "sync" and any(one["joiners"] for one in got):
            self.regroup()
            return False
        return True

    def make(self, drawn: Call, given: Line) -> list[Line]:
        if drawn.name == "barrier":
            self.group.barrier()
            return []
        if drawn.name == "broadcast":
            return [self.group.broadcast(given if drawn.src == self.rank else None, src=drawn.src)]
        gathered: list[Line] = self.group.all_gather(given)
        return gathered

    def make_another(self, drawn: Call, about: Line, expected: str) -> None:
        """A failed collective has not ended, so that any other call raises the same error."""
        said = ""
        try:
            self.group.all_gather("another") if drawn.name == "barrier" else self.group.barrier()
        except FsbarrierError as error:
            said = type(error).__name__
        if said not in (expected, "Fenced"):
            self.write("another", **about, expected=expected, said=said or "nothing")

    def regroup(self) -> None:
        while True:
            about: Line = {"g": self.group.generation, "n": -1, "call": "regroup", "src": -1}
            began = self.write("begin", **about)
            try:
                self.group.regroup()
                self.write("member", g=self.group.generation, members=self.group.members)
                return
            except NodeError as error:
                self.failed(error, began, about)
                if isinstance(error, fsbarrier.Fenced):
                    raise

    def failed(self, error: Any, began: float, about: Line) -> None:
        kind, whom = type(error).__name__, {"whom": error.rank, "host": error.host, "age": error.age}
        self.write("error", **about, error=kind, **whom, seconds=self.awake_s - began, message=str(error))

    def let_the_mount_fail(self) -> None:
        """From now on what this thread does fails with EIO until `failing_until`; heartbeats are another's."""
        from fsbarrier.rundir.record_store import PosixStore

        def failing(verb: str) -> Any:
            original = getattr(PosixStore, verb)

            def act(store: Any, path: Path, *more: Any, **named: Any) -> Any:
                mine = threading.current_thread() is threading.main_thread()
                if mine and time.monotonic() < self.failing_until:
                    raise OSError(errno.EIO, "the mount fails", str(path))
                return original(store, path, *more, **named)

            return act

        for verb in ("make_dir", "names", "read", "put", "create"):
            setattr(PosixStore, verb, failing(verb))


# --- who strikes --------------------------------------------------------------------------------------------------------------------


@dataclass
class Fuzz:
    """The members' processes, and what was done to them."""

    folder: Path
    nodes: int
    seed: int
    struck: Counter[str] = field(default_factory=Counter)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> list[str]:
        """Let the members call for so long, end them in order, and judge. Gives what is wrong."""
        dice, idle = random.Random(self.seed), threading.Event()
        (self.folder / "seen").mkdir()
        try:
            for rank in range(self.nodes):
                self.start(rank)
            self.until_all_are_in(idle)
            end, dead_s = time.monotonic() + seconds, timing(self.nodes)["dead_s"]
            while time.monotonic() < end:
                idle.wait(dice.random() * dead_s)
                self.strike(dice)
            for rank in range(self.nodes):
                self.go_on(rank)
                self.start(rank)
            (self.folder / "stop").touch()
            self.wrong += [wrong for rank in range(self.nodes) if (wrong := self.end_of(rank))]
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
        return self.wrong + judge(read(self.folder))

    def start(self, rank: int) -> None:
        """Start a rank that is not there."""
        process = self.processes.get(rank)
        if process is not None and process.poll() is None:
            return
        if process is not None and process.poll() not in (0, -signal.SIGKILL):
            self.wrong.append(f"node {rank} ended with {process.poll()}")
        words = [sys.executable, __file__, "--member", str(rank), "--path", str(self.folder)]
        words += ["--nodes", str(self.nodes), "--seed", str(self.seed)]
        with (self.folder / f"{rank}.txt").open("ab") as out:
            environ = {**os.environ, "PYTHONPATH": str(REPO)}
            self.processes[rank] = subprocess.Popen(words, env=environ, stdout=out, stderr=out)

    def until_all_are_in(self, idle: threading.Event) -> None:
        deadline = time.monotonic() + END_S
        while {line["rank"] for line in read(self.folder) if line["what"] == "member"} < set(
            range(self.nodes)
        ):
            if time.monotonic() > deadline:
                raise SystemExit("the members do not come together")
            idle.wait(0.1)

    def strike(self, dice: random.Random) -> None:
        rank, how = dice.randrange(self.nodes), dice.choice(("kill", "pause", "pause"))
        if self.processes[rank].poll() is not None:
            self.start(rank)
            how = "start"
        elif rank in self.stopped:
            self.go_on(rank)
            how = "go on"
        elif how == "kill":
            self.processes[rank].kill()
        else:
            self.processes[rank].send_signal(signal.SIGSTOP)
            self.stopped.add(rank)
        self.struck[how] += 1

    def go_on(self, rank: int) -> None:
        if rank in self.stopped:
            self.processes[rank].send_signal(signal.SIGCONT)
            self.stopped.discard(rank)

    def end_of(self, rank: int) -> str:
        """What is wrong with how a member's process ended, ""."""
        try:
            code = self.processes[rank].wait(END_S)
        except subprocess.TimeoutExpired:
            return f"node {rank} does not end"
        if code in (0, -signal.SIGKILL):
            return ""
        return f"node {rank} ended with {code}: {(self.folder / f'{rank}.txt').read_text()[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=8, help="processes, 2 to 64 (default 8)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of calls and strikes (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--path", type=Path, help="where to make the group (default: temporary); kept if given"
    )
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member is not None:
        Caller(arguments.path, arguments.member, arguments.nodes, arguments.seed).run()
        return 0
    folder = Path(tempfile.mkdtemp(prefix="group-fuzz-", dir=arguments.path))
    fuzz = Fuzz(folder, arguments.nodes, arguments.seed)
    wrong = fuzz.run(arguments.seconds)
    print("\n".join([*wrong, summary(read(folder), fuzz.struck)]))
    if wrong or arguments.path is not None:
        print(f"kept: {folder}; seed {arguments.seed}")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def summary(lines: list[Line], struck: Counter[str]) -> str:
    """What was done, so that people see that something was."""
    ends = Counter(line["call"] for line in lines if line["what"] == "end")
    errors = Counter(line["error"] for line in lines if line["what"] == "error")
    generations = len({line["g"] for line in lines if line["what"] == "member"})
    return (
        f"strikes: {dict(struck)}; completed: {dict(ends)}; errors: {dict(errors)}; {generations} generations"
    )


if __name__ == "__main__":
    sys.exit(main())
