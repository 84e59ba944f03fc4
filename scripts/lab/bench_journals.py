"""How long `status`, `top` and `report` take on the journals of a long run, and how much memory.

    python scripts/lab/bench_journals.py --nodes 64 --iterations 430

writes such a run, looks at it with each of them, and prints the best of three looks. 64 nodes and 430 iterations of ten minutes are three
days, and some 190 MB. `top` is measured until its first picture, on a terminal of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Generation, Join, Member, Position
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.resolve import resolve
from fsbarrier.store import files

#: seconds of work in the phases that have some, and those in which only the leader works
WORK = {1: 0.02, 2: 300.0, 4: 2.0, 5: 0.01, 6: 30.0, 7: 0.5, 8: 1.5, 9: 0.01, 10: 240.0, 11: 3.0, 12: 4.0}
LEADERS = frozenset({1, 4, 5, 8, 11})
RESULTS = {4: "rolled_out", 6: "evaluated", 8: "batch_prepared", 10: "updated", 11: "weights_published"}
ENGINE_START = 12
COORDINATION_S = 0.01
ITERATION_S = sum(WORK.values()) + COORDINATION_S * len(PHASE_NAMES)


def write_run(folder: Path, nodes: int, iterations: int) -> None:
    """A run of the program `rl` whose nodes are in the last phase of its last iteration. Raises OSError, UsageError."""
    paths = RunPaths(folder)
    settings = resolve((), {"program": "rl", "num_nodes": nodes}, cross_checks=False)
    record = runrecord.new(folder, settings, tasks={}, model=None)
    runrecord.publish(record)
    for needed in (paths.joins, paths.status, paths.generations, paths.events):
        files.make_dirs(needed)
    members = tuple(Member(rank, 1, f"host{rank}") for rank in range(nodes))
    generation = Generation(1, members, 0, Position(1, 0), "start", created_by=0)
    paths.generation(1).write_bytes(encode(generation))
    for member in members:
        rank = member.rank
        join = Join(rank, 1, member.host, 1000 + rank, f"boot{rank}", ("192.0.2.1",), None, "0")
        paths.join(rank, 1).write_bytes(encode(join))
        beat = Beat(rank, 1, 9, member.host, join.pid, "running", 1, iterations, 13, PHASE_NAMES[13])
        paths.beat(rank, 1).write_bytes(encode(beat))
        with paths.journal(rank, 1).open("w") as journal:
            for line in lines(record.run_id, rank, nodes, iterations):
                journal.write(line)


def lines(run_id: str, rank: int, nodes: int, iterations: int) -> Iterator[str]:
    """The journal of one node."""
    began = time.time() - iterations * ITERATION_S

    def line(after_s: float, iteration: int, phase: int, event: str, **fields: object) -> str:
        body = {
            "time": datetime.fromtimestamp(began + after_s, UTC).isoformat(timespec="milliseconds"),
            "mono_s": round(1000.0 + after_s, 4),
            "run_id": run_id,
            "node_rank": rank,
            "generation": 1,
            "iteration": iteration,
            "phase": phase,
            "phase_name": PHASE_NAMES[phase],
            "event": event,
            **fields,
        }
        return json.dumps(body, separators=(",", ":")) + "\n"

    yield line(0.0, 1, 0, "generation_started", number=1, members=[*range(nodes)], leader=0, reason="start")
    now = 0.0
    for iteration in range(1, iterations + 1):
        for phase in range(len(PHASE_NAMES)):
            works = phase in WORK and (rank == 0 or phase not in LEADERS)
            work_s = WORK[phase] * (1 - 0.1 * rank / nodes) if works else 0.0
            if works:
                yield line(now, iteration, phase, "phase_started")
            else:
                yield line(now, iteration, phase, "phase_started", waits=True)
            if phase == ENGINE_START:
                ready = {"replica": 0, "serving": iteration, "engine_action": "reloaded", "engine_s": 4.0}
                yield line(now + work_s, iteration, phase, "engine_ready", incarnation=1, **ready)
            if rank == 0 and phase in RESULTS:
                result = {
                    "reward_mean": 0.5,
                    "trajectories": 2048,
                    "policy_version": iteration - 1,
                    "loss": 0.1,
                    **{f"figure_{number}": 0.123456 for number in range(25)},
                }
                yield line(now + work_s, iteration, phase, RESULTS[phase], **result)
            if rank == 0 and phase in LEADERS:
                yield line(
                    now + work_s,
                    iteration,
                    phase,
                    "decision",
                    value={"evaluate": True, "wanted": "<list of 2048>", "shares": f"<dict of {nodes}>"},
                )
            seconds = WORK.get(phase, 0.0) + COORDINATION_S
            now += seconds
            if (iteration, phase) == (iterations, len(PHASE_NAMES) - 1):
                return
            parts = {"start_s": 0.1, "work_s": work_s - 0.1, "wait_s": seconds - work_s} if works else {}
            told = {name: round(value, 4) for name, value in {"seconds": seconds, **parts}.items()}
            yield line(now, iteration, phase, "phase_finished", **told)
        yield line(now, iteration, len(PHASE_NAMES) - 1, "iteration_finished")


@dataclass(frozen=True, order=True)
class Look:
    """What one look took; `cpu_s`: of the processor."""

    seconds: float
    cpu_s: float
    memory_mb: float


def look(words: Sequence[str], until: bytes | None = None) -> Look:
    """Run a command of fsbarrier on a terminal; one that shows `until` is then asked to end. Raises SystemExit where it fails."""
    began = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "fsbarrier", *words])
    seconds, said = 0.0, b""
    while True:
        try:
            said += os.read(terminal, 1 << 16)
        except OSError:
            # So a terminal says that nobody writes to it any more.
            break
        if until is not None and not seconds and until in said:
            seconds = time.perf_counter() - began
            os.kill(pid, signal.SIGINT)
    _, status, used = os.wait4(pid, 0)
    os.close(terminal)
    if (until is None and status != 0) or (until is not None and not seconds):
        raise SystemExit(f"fsbarrier {' '.join(words)} failed: {said.decode(errors='replace')}")
    return Look(
        seconds or time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=430)
    parser.add_argument("--looks", type=int, default=3, help="of each command, of which the best counts")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-journals-", dir=args.dir) as folder:
        run = Path(folder) / "run"
        write_run(run, args.nodes, args.iterations)
        size = sum(path.stat().st_size for path in RunPaths(run).events.iterdir())
        each = size / args.nodes / args.iterations / 1e3
        print(
            f"{args.nodes} nodes, {args.iterations} iterations: {size / 1e6:.0f} MB of journals, {each:.1f} kB each"
        )
        where = ("--log-path", str(run))
        for words, until in (
            (("status", "--no-watch", *where), None),
            (("top", *where), b"host0"),
            (("report", *where, "--out", str(Path(folder) / "page.html")), None),
        ):
            best = min(look(words, until) for _ in range(args.looks))
            print(
                f"{words[0]:7} {best.seconds:6.2f} s ({best.cpu_s:.2f} s of the processor), {best.memory_mb:4.0f} MB"
            )


if __name__ == "__main__":
    main()
