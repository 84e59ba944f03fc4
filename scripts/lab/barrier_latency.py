"""Measures barrier latency: the program `ping` on N daemons of this machine.

The latency of a barrier is the time from the last arrival to the last release, on this host's monotonic clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.processes.supervisor import own_program, with_this_package

#: Time limits in seconds: starting the Python processes, and one barrier of all of them.
START_S = 60.0
BARRIER_S = 10.0


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


def ping(folder: Path, nodes: int, iterations: int) -> Latency:
    """Run `ping` in `folder`, which must be new. Raises the errors of a run, and ProgramFailed."""
    deadline_s = START_S + nodes + iterations * 14 * BARRIER_S
    what = f"--nodes {nodes} --program ping --iterations {iterations} --log-path".split()
    command = own_program("fsbarrier", "launch", "local", *what, str(folder))
    try:
        env = with_this_package(os.environ)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline_s)
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
