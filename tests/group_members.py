"""Processes that are members of a group, for tests: each does what it is told, line by line, and answers with what came of it.

Run as a program it is such a process: its first line of input says how to join.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from waiting import DEADLINE_S

REPO = Path(__file__).resolve().parent.parent
#: for a group whose members are all in one process
FAST = {"beat_s": 0.2, "suspect_s": 1.0, "dead_s": 2.0, "timeout_s": 120.0}
#: where a silence is waited for, and a busy machine that holds a process up for a while makes no other one
SILENCE = {**FAST, "suspect_s": 2.0, "dead_s": 5.0}
#: else: however busy the machine is, nobody looks dead
PATIENT = {**FAST, "suspect_s": 10.0, "dead_s": 30.0}


class Failed(Exception):
    """What a member's call raised: `kind` is the type's name."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error']}: {answer['message']}")
        self.kind, self.message = answer["error"], answer["message"]
        self.rank, self.host, self.age = answer["rank"], answer["host"], answer["age"]


class Member:
    """One process."""

    def __init__(self, path: Path, rank: int, num_nodes: int, **join: Any) -> None:
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )
        self.buffer = b""
        self.arguments = {"path": str(path), "node_rank": rank, "num_nodes": num_nodes, **PATIENT, **join}

    def join(self) -> Member:
        """Let it begin to join."""
        return self.tell("join", **self.arguments)

    def ready(self) -> Member:
        """Wait until it has loaded what it needs to join."""
        assert self.ask("ready") is None
        return self

    def quit(self) -> None:
        """Let its interpreter end, without leaving the group before."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def tell(self, call: str, **arguments: Any) -> Member:
        """Let it begin a call."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([call, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self

    def answer(self, deadline_s: float = DEADLINE_S) -> Any:
        """What the call gave. Raises Failed."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"node {self.rank} does not answer"
            more = os.read(self.process.stdout.fileno(), 1 << 20)
            assert more, f"node {self.rank} ended"
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer)
        return answer["value"]

    def ask(self, call: str, **arguments: Any) -> Any:
        return self.tell(call, **arguments).answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()


class Members:
    """The members of one group, by rank."""

    def __init__(self, path: Path, num_nodes: int, **join: Any) -> None:
        self.path, self.num_nodes, self.arguments = path, num_nodes, join
        self.by_rank: dict[int, Member] = {}
        self.all: list[Member] = []

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.all:
            member.close()

    def __getitem__(self, rank: int) -> Member:
        return self.by_rank[rank]

    def start(self, *ranks: int, **join: Any) -> Members:
        """Start these (all, if none is named) without waiting for them."""
        for rank in ranks or range(self.num_nodes):
            member = Member(self.path, rank, self.num_nodes, **{**self.arguments, **join}).join()
            self.by_rank[rank] = member
            self.all.append(member)
        return self

    def restart(self, rank: int) -> Members:
        """Kill one, and let a process join in its place that has loaded what it needs: before `dead_s`, however busy the machine is."""
        again = Member(self.path, rank, self.num_nodes, **self.arguments).ready()
        self.all.append(again)
        self[rank].kill()
        self.by_rank[rank] = again.join()
        return self

    def joined(self, *ranks: int) -> Members:
        """Wait until these (all that were started, if none is named) are in."""
        for rank in ranks or tuple(self.by_rank):
            self[rank].answer(DEADLINE_S + float(self.arguments.get("timeout_s", 0.0)))
        return self

    def ask(self, call: str, *ranks: int, **arguments: Any) -> list[Any]:
        """The same call by these (all, if none is named) at once: their answers, an exception for a call that failed."""
        chosen = ranks or tuple(self.by_rank)
        for rank in chosen:
            self[rank].tell(call, **arguments)
        return [self.outcome(rank) for rank in chosen]

    def outcome(self, rank: int) -> Any:
        try:
            return self[rank].answer()
        except Failed as failed:
            return failed


def perform(group: Any, call: str, arguments: dict[str, Any]) -> Any:
    """One call on a group, in a member's process."""
    match call:
        case "barrier":
            entered = time.monotonic()
            group.barrier()
            return [entered, time.monotonic()]
        case "all_gather" | "broadcast":
            return getattr(group, call)(**arguments)
        case "big":  # as large as asked for, without a pipe that carries it here
            text = group.broadcast("x" * arguments["size"] if group.node_rank == arguments["src"] else None)
            return [len(text), text.count("x")]
        case "regroup":
            group.regroup()
            return [group.generation, list(group.members)]
        case "look":
            return {
                "generation": group.generation,
                "members": list(group.members),
                "joiners": list(group.joiners),
            }
        case "fail":  # what a with block does with an exception
            group.__exit__(ValueError, ValueError(arguments["text"]), None)
        case "interrupted":
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            return group.all_gather(**arguments)
        case "elastic":
            return elastic(group, Path(arguments["stop"]))
        case "leave":
            group.leave()
        case "exit":
            os._exit(0)
    return None


def elastic(group: Any, stop: Path) -> dict[str, Any]:
    """Steps until a file says stop, whoever dies meanwhile: what each collective gave, and whether all of them agreed."""
    import fsbarrier

    step, index, passed = 0, 0, []
    while True:
        mine = [group.generation, index, group.node_rank, step, stop.exists()]
        try:
            given = group.all_gather(mine)
        except fsbarrier.PeerLost:
            group.regroup()
            index = 0
            continue
        assert [(g, i) for g, i, *_ in given] == [(group.generation, index)] * len(given), given
        assert [rank for _, _, rank, *_ in given] == list(group.members), given
        passed.append([group.generation, index, given])
        step, index = max(entry[3] for entry in given) + 1, index + 1
        if any(entry[4] for entry in given):
            return {"step": step, "generation": group.generation, "passed": passed[-200:]}


def main() -> None:
    import fsbarrier

    group: Any = None
    for line in sys.stdin:
        call, arguments = json.loads(line)
        try:
            if call == "ready":
                value = fsbarrier.Group and None
            elif call == "join":
                group, value = fsbarrier.join(arguments.pop("path"), **arguments), socket.gethostname()
            else:
                value = perform(group, call, arguments)
            answer = {"value": value}
        except (Exception, KeyboardInterrupt) as error:
            about = {name: getattr(error, name, None) for name in ("rank", "host", "age")}
            answer = {"error": type(error).__name__, "message": str(error), **about}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
