"""Measure barrier latency with N daemons on this machine: the times from last arrival to last release, as JSON.

The daemons run the program `ping`. The latency of a barrier is the time from the last arrival to the last release, on this host's
monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import lab_command

from fsbarrier.cli.commands import flags
from fsbarrier.errors import FsbarrierError, ProgramFailed, UsageError
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.rundir.journal import JournalReader, journal_files
from fsbarrier.view.timings import read_spans, row_times

FLAGS = {
    "--nodes N": "daemons (default 3)",
    "--iterations K": "iterations of 14 barriers each, of which the first is not counted (default 20)",
    "--path DIR": "measure on this directory's filesystem (default: the temporary directory)",
}
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

    passed = row_times(read_spans(JournalReader(path).read() for path in journal_files(log_path)))
    return [row.coordination_s for row in passed if row.coordination_s is not None and row.iteration > 1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, FLAGS, nodes=3, iterations=20)


def main(args: argparse.Namespace) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="fsbarrier-bench-", dir=args.path) as folder:
            passed = ping(Path(folder) / "run", args.nodes, args.iterations)
    except OSError as error:
        raise UsageError(f"--path {args.path}: {error.strerror}") from None
    print(json.dumps({"nodes": args.nodes, **asdict(passed)}))
    return 0


if __name__ == "__main__":
    sys.exit(lab_command.run(__doc__, add_arguments, main))
