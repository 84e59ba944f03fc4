"""Measures barrier latency: the program `ping` on N daemons, `fsbarrier.join` in N scripts, and a bare scan loop as the baseline.

The latency of a barrier is the time from the last arrival to the last release, on this host's monotonic clock. In the bare loop each
process creates a file per round and scans the folder until all files exist, without records, membership or heartbeats.
`python -m fsbarrier.run.benchmark bare|group FOLDER RANK N ROUNDS` runs one process of the latter two.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.store import files
from fsbarrier.store.retry import Backoff

#: This interpreter, with the same -P option.
PYTHON = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
#: polling interval of the bare loop
PAUSES = Backoff(0.0001, 0.001)
#: Time limits in seconds: starting the Python processes, and one round of all of them.
START_S = 60.0
ROUND_S = 10.0


#: when a process came to a barrier, and when it was released, on the monotonic clock
Passage = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Latency:
    """Barrier times in seconds."""

    barriers: int
    median_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Statistics of several barriers. Raises ProgramFailed if there are none."""
        if not seconds:
            raise ProgramFailed("bench: no barriers were measured")
        ordered = sorted(seconds)
        return cls(
            len(ordered), statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]
        )


# --- daemons ------------------------------------------------------------------------------------------------------------


def ping(folder: Path, nodes: int, iterations: int) -> Latency:
    """Run `ping` in `folder`, which must be new. Raises the errors of a run, and ProgramFailed."""
    deadline_s = START_S + nodes + iterations * 14 * ROUND_S
    what = f"--nodes {nodes} --program ping --iterations {iterations} --log-path".split()
    command = [*PYTHON, "-m", "fsbarrier", "launch", "local", *what, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"bench: {nodes} nodes of ping did not end within {deadline_s:.0f} s") from None
    if done.returncode:
        error = FsbarrierError(f"bench: ping failed\n{done.stderr.strip()}")
        error.exit_code = done.returncode
        raise error
    return Latency.of(barrier_times(folder))


def barrier_times(log_path: Path) -> list[float]:
    """The latency of each barrier of a run, except those of the first iteration, when the nodes are still starting."""
    from fsbarrier.rundir.journal import JournalReader, journal_files
    from fsbarrier.view.timings import read_spans, row_times

    passed = row_times(read_spans(JournalReader(path).read() for path in journal_files(log_path)))
    return [row.coordination_s for row in passed if row.coordination_s is not None and row.iteration > 1]


# --- scripts, and the bare loop -----------------------------------------------------------------------------------------


def scripts(kind: str, folder: Path, nodes: int, rounds: int) -> Latency:
    """Measure N separate processes. `kind`: "group" for members of a `fsbarrier.join`, "bare" for the scan loop. Raises ProgramFailed."""
    files.make_dirs(folder)
    return barriers_of([*PYTHON, "-m", "fsbarrier.run.benchmark"], kind, folder, nodes, rounds)


def barriers_of(command: Sequence[str], kind: str, folder: Path, nodes: int, rounds: int) -> Latency:
    """Measure N processes of `command`, which gets kind, folder, rank, N and rounds as arguments. Raises ProgramFailed."""
    processes = [
        subprocess.Popen(
            [*command, kind, str(folder), str(rank), str(nodes), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nodes)
    ]
    times: list[list[Passage]] = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=START_S + nodes + rounds * ROUND_S)
            if process.returncode:
                said = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                raise ProgramFailed(f"bench: a {kind} process failed: {said}")
            times.append(json.loads(out))
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"bench: the {kind} processes did not end in time") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return latency(times)


def latency(times: Sequence[Sequence[Passage]]) -> Latency:
    """Statistics from each process's passages. Raises ProgramFailed if there are none."""
    # As with ping, skip the first barrier, when the processes are still starting.
    counted = list(zip(*times, strict=True))[1:]
    return Latency.of([max(left for _, left in one) - max(arrived for arrived, _ in one) for one in counted])


def passages(barrier: Callable[[int], object], rounds: int) -> list[Passage]:
    """Pass `rounds` barriers."""
    times = []
    for number in range(rounds):
        arrived = time.monotonic()
        barrier(number)
        times.append((arrived, time.monotonic()))
    return times


def bare_process(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    """One process of the bare loop. Raises TimeoutError."""
    deadline, idle = time.monotonic() + START_S + nodes + rounds * ROUND_S, threading.Event()

    def barrier(number: int) -> None:
        place, pauses = folder / f"round-{number:06d}", iter(PAUSES)
        place.mkdir(exist_ok=True)
        os.close(files.open_new(place / f"node-{rank:04d}"))
        while len(os.listdir(place)) < nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"round {number}: the other processes did not arrive")
            idle.wait(next(pauses))

    return passages(barrier, rounds)


def group_process(folder: Path, rank: int, nodes: int, rounds: int) -> list[Passage]:
    """One member of a group. Raises NodeError."""
    import fsbarrier

    timing = {"beat_s": 5.0, "suspect_s": 15.0, "dead_s": 60.0} if nodes > 16 else {}
    with fsbarrier.join(
        folder, node_rank=rank, num_nodes=nodes, timeout_s=START_S + nodes, **timing
    ) as group:
        return passages(lambda number: group.barrier(), rounds)


PROCESSES = {"bare": bare_process, "group": group_process}

if __name__ == "__main__":
    print(json.dumps(PROCESSES[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:6]))))
