"""List the runs in a folder with state, iteration, rewards and last activity. Watches their heartbeats for 1.5 beats."""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.view.run_status import read_status
from fsbarrier.wording import amount, duration, one_line

EXAMPLE = "fsbarrier runs runs"
#: Number of runs to inspect concurrently. Most of the time is spent waiting for heartbeats.
AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "the folder with the run directories (default: the parent of the default --log-path)"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=folder)
    flags.add(parser, {"--json": "print a JSON list"})


def main(args: argparse.Namespace) -> int:
    folder = preflight.absolute(args.folder) if args.folder else preflight.default_log_path(os.environ).parent
    try:
        # A folder that this user may not enter is skipped.
        run_dirs = sorted(path for path in folder.iterdir() if os.path.lexists(RunPaths(path).record))
    except OSError as error:
        raise UsageError(f"runs {folder}: {error.strerror}") from None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = [*pool.map(_look, run_dirs)]
    for problem in (each for each in looked if isinstance(each, str)):
        flags.say(problem)
    runs = [each for each in looked if not isinstance(each, str)]
    runs.sort(key=lambda run: (run["last_activity_s"] is None, run["last_activity_s"]))
    if args.json:
        print(json.dumps(runs, indent=2))
    elif not run_dirs:
        print(f"no runs in {folder}")
    else:
        _print(runs)
    return 0


def _look(path: Path) -> JsonObject | str:
    """One run, or an error message. The rewards are the latest known; `last_activity_s`: seconds since the newest heartbeat."""
    try:
        status = read_status(path)
    except (FsbarrierError, OSError) as error:
        return f"skipped {path.name}: {one_line(str(error))}"
    beats = [node.last_beat_time for node in status.nodes if node.last_beat_time is not None]
    return {
        "path": str(path),
        "state": status.state,
        "iteration": status.iteration,
        "iterations": status.iterations,
        "nodes": status.num_nodes,
        "train_reward": _newest([reward.train for reward in status.rewards]),
        "test_reward": _newest([reward.test for reward in status.rewards]),
        "last_activity_s": max(0.0, time.time() - max(beats)) if beats else None,
    }


def _newest(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _print(runs: list[JsonObject]) -> None:
    from fsbarrier.view.terminal_lines import STATE_STYLE, print_listing

    names = ("run", "state", "iteration", "nodes", "train", "held-out", "last activity")
    rows = []
    for run in runs:
        of = "" if run["iterations"] is None else f" of {run['iterations']}"
        ago_s = run["last_activity_s"]
        # In its largest unit: 5 min, 2 h, 3 d.
        ago = "–" if ago_s is None else f"{' '.join(duration(ago_s).split()[:2])} ago"
        rewards = amount(run["train_reward"]), amount(run["test_reward"])
        rows.append(
            (Path(run["path"]).name, run["state"], f"{run['iteration']}{of}", run["nodes"], *rewards, ago)
        )
    print_listing(names, rows, right=names[2:], shortened="run", styles=STATE_STYLE)
