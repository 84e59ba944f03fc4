"""`fsbarrier runs`: lists the runs in a folder."""

from __future__ import annotations

import argparse
import json
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.view.amounts import amount, duration, one_line, short
from fsbarrier.view.run_status import read_status

SUMMARY = "List the runs in a folder with state, iteration, rewards, size and last activity. Watches their heartbeats for 1.5 beats."
EXAMPLE = "fsbarrier runs runs"
#: Number of runs to inspect concurrently. Most of the time is spent waiting for heartbeats.
AT_ONCE = 16


FLAGS = {
    "--json": "print a JSON list",
    "--no-size": "do not compute the size of each run, which is slow for many runs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "the folder with the run directories (default: the parent of the default --log-path)"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=folder)
    flags.add(parser, FLAGS)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. `train_reward`, `test_reward`: the latest known. `last_activity_s`: seconds since the newest heartbeat."""

    path: str
    state: str
    iteration: int
    iterations: int | None
    nodes: int
    train_reward: float | None
    test_reward: float | None
    bytes: int | None
    last_activity_s: float | None


def main(args: argparse.Namespace) -> int:
    folder = preflight.absolute(args.folder) if args.folder else preflight.default_log_path(os.environ).parent
    try:
        # A folder that this user may not enter is skipped.
        found = sorted(path for path in folder.iterdir() if os.path.lexists(RunPaths(path).record))
    except OSError as error:
        raise UsageError(f"runs {folder}: {error.strerror}") from None
    # msgspec crashes if two threads are the first to use a type.
    msgspec.json.Decoder(RunRecord)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = [*pool.map(lambda path: _look(path, sized=not args.no_size), found)]
    for problem in (each for each in looked if isinstance(each, str)):
        flags.say(problem)
    runs = sorted(
        (each for each in looked if isinstance(each, Summary)),
        key=lambda run: (run.last_activity_s is None, run.last_activity_s),
    )
    if args.json:
        print(json.dumps([asdict(run) for run in runs], indent=2))
    elif not found:
        print(f"no runs in {folder}")
    else:
        _print(runs)
    return 0


def _look(path: Path, *, sized: bool) -> Summary | str:
    """Summarize one run, or return an error message."""
    try:
        status = read_status(path)
        size = sum(_sizes(path)) if sized else None
    except (FsbarrierError, OSError) as error:
        return f"skipped {path.name}: {one_line(str(error))}"
    except RecursionError:
        return f"skipped {path.name}: its folders are nested too deeply; list it with --no-size"
    beats = [node.last_beat_time for node in status.nodes if node.last_beat_time is not None]
    return Summary(
        path=str(path),
        state=status.state,
        iteration=status.iteration,
        iterations=status.iterations,
        nodes=status.num_nodes,
        train_reward=_newest([reward.train for reward in status.rewards]),
        test_reward=_newest([reward.test for reward in status.rewards]),
        bytes=size,
        last_activity_s=max(0.0, time.time() - max(beats)) if beats else None,
    )


def _newest(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _sizes(folder: Path) -> Iterator[int]:
    """The size of each regular file below `folder`. Counts hard links once and does not follow symbolic links."""
    known: set[tuple[int, int]] = set()
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(Path(where, name))
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in known:
                known.add((found.st_dev, found.st_ino))
                yield found.st_size


def _print(runs: list[Summary]) -> None:
    from fsbarrier.view.listing import print_listing
    from fsbarrier.view.terminal_lines import STATE_STYLE

    names = ("run", "state", "iteration", "nodes", "train", "held-out", "size", "last activity")
    rows = [
        (
            Path(run.path).name,
            run.state,
            f"{run.iteration}" if run.iterations is None else f"{run.iteration} of {run.iterations}",
            run.nodes,
            amount(run.train_reward),
            amount(run.test_reward),
            "–" if run.bytes is None else f"{short(run.bytes)}B",
            "–" if run.last_activity_s is None else f"{_roughly(run.last_activity_s)} ago",
        )
        for run in runs
    ]
    print_listing(names, rows, right=names[2:], shortened="run", styles=STATE_STYLE)


def _roughly(seconds: float) -> str:
    """A duration in its largest unit: 5 min, 2 h, 3 d."""
    return " ".join(duration(seconds).split()[:2])
