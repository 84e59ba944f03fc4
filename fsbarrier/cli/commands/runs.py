"""List the runs in a folder with state, iteration, rewards and last activity. Watches their heartbeats for 1.5 beats."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.view.run_list import RunLine, look_at_runs, run_folders
from fsbarrier.wording import amount, duration

EXAMPLE = "fsbarrier runs runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "the folder with the run directories (default: the parent of the default --log-path)"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=folder)
    flags.add(parser, {"--json": "print a JSON list"})


def main(args: argparse.Namespace) -> int:
    folder = preflight.absolute(args.folder) if args.folder else preflight.default_log_path(os.environ).parent
    try:
        found = run_folders(folder)
    except UsageError as error:
        raise UsageError(f"runs {error}") from None
    runs, skipped = look_at_runs(found)
    for problem in skipped:
        flags.say(problem)
    if args.json:
        print(json.dumps([run.to_json() for run in runs], indent=2))
    elif not found:
        print(f"no runs in {folder}")
    else:
        _print(runs)
    return 0


def _print(runs: Sequence[RunLine]) -> None:
    from fsbarrier.view.terminal_lines import STATE_STYLE, print_listing

    names = ("run", "state", "iteration", "nodes", "train", "held-out", "last activity")
    rows = []
    for run in runs:
        of = "" if run.iterations is None else f" of {run.iterations}"
        ago_s = run.last_activity_s
        # In its largest unit: 5 min, 2 h, 3 d.
        ago = "–" if ago_s is None else f"{' '.join(duration(ago_s).split()[:2])} ago"
        rewards = amount(run.train_reward), amount(run.test_reward)
        rows.append((Path(run.path).name, run.state, f"{run.iteration}{of}", run.nodes, *rewards, ago))
    print_listing(names, rows, right=names[2:], shortened="run", styles=STATE_STYLE)
