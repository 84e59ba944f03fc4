"""`fsbarrier aggregate`, the same as `python -m fsbarrier.aggregate`: merges by hand what the ranks saved."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fsbarrier.data import rank_files
from fsbarrier.data.merge import OnProgress
from fsbarrier.data.merge_plan import missing_text
from fsbarrier.data.rank_files import FoundFile, RanksMerged, RanksRequest, merge_ranks
from fsbarrier.errors import UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files
from fsbarrier.store.printable import printable

SUMMARY = "Merge the trajectory files that the ranks wrote in one iteration, finished or not, into one file."
EXAMPLE = "fsbarrier aggregate --log-path runs/default --iteration 5 --dry-run"
#: in trajectories; a smaller merge is too quick for a progress bar
BAR_FROM = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-path", type=Path, default=None, metavar="D", help="the run directory")
    parser.add_argument("--iteration", type=int, required=True, metavar="N", help="the iteration to merge")
    parser.add_argument("--split", choices=SPLITS, help="merge only this split (default: both)")
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="merge even if tasks are missing, and record them in the result",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the files and show what would be merged")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """`fsbarrier aggregate`. Raises UsageError (nothing to merge, tasks missing), StoreError."""
    from fsbarrier.cli.start.preflight import default_log_path

    log_path: Path = args.log_path or default_log_path(os.environ)
    if args.iteration < 0:
        raise UsageError(f"--iteration {args.iteration}: must be 0 or more")
    if not log_path.is_dir():
        raise UsageError(f"--log-path {log_path}: no such directory")
    if runrecord.exists(log_path):
        files.set_shared_group(runrecord.load(log_path).settings.shared_group)
    chosen = [args.split] if args.split else list(SPLITS)
    found = {split: rank_files.find(log_path, split, args.iteration) for split in chosen}
    found = {split: items for split, items in found.items() if items}
    if not found:
        where = " or ".join(str(RunPaths(log_path).trajectories(split)) for split in chosen)
        raise UsageError(f"--iteration {args.iteration}: no rank wrote a file for this iteration in {where}")
    splits: dict[str, dict[str, object]] = {}
    if not args.json:
        for split, items in found.items():
            _print_table(split, args.iteration, items)
    for split, items in found.items():
        request = RanksRequest(
            log_path,
            split,
            args.iteration,
            tuple(items),
            allow_partial=args.allow_partial,
            dry_run=args.dry_run,
        )
        merged = merge_with_bar(request)
        splits[split] = {"files": [_file_json(item) for item in items], **merged.as_json()}
        if not args.json:
            _print_outcome(split, merged)
    if args.json:
        outcome = {"log_path": str(log_path), "iteration": args.iteration, "dry_run": args.dry_run}
        print(json.dumps({**outcome, "splits": splits}, indent=2))
    return 0


def _file_json(item: FoundFile) -> dict[str, object]:
    return {
        "path": str(item.path),
        "node_rank": item.node_rank,
        "state": item.state.value,
        "note": item.note,
        **item.counts(),
        "reward_mean": item.file.reward_mean if item.file else None,
        "duplicates": item.duplicates,
    }


def merge_with_bar(request: RanksRequest) -> RanksMerged:
    """Merge, with a progress bar on a terminal if it takes a while. Raises the errors of `merge_ranks`."""
    if not sys.stderr.isatty():
        return merge_ranks(request)
    with _bar(f"merging {request.out.name}") as show:
        return merge_ranks(request, show)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(name, total=None)

    def show(done: int, total: int) -> None:
        # The total is not known earlier.
        if total >= BAR_FROM:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _print_table(split: str, iteration: int, items: list[FoundFile]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{split}, iteration {iteration}: files of each rank", title_justify="left", box=None)
    for name in ("rank", "gen", "state", "groups", "trajectories", "reward", "torn bytes", "duplicates"):
        table.add_column(name, justify="left" if name == "state" else "right")
    table.add_column("file", overflow="fold")
    for item in items:
        there = item.file
        generation = str(item.generation) if item.generation >= 0 else "-"
        numbers = ["-"] * 5
        if there:
            reward = "-" if there.reward_mean is None else f"{there.reward_mean:.3f}"
            counts = (len(there.groups), there.trajectories, reward, there.torn_bytes, item.duplicates)
            numbers = [str(value) for value in counts]
        name = item.path.name + (f" ({item.note})" if item.note else "")
        table.add_row(str(item.node_rank), generation, item.state.value, *numbers, Text(printable(name)))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def _print_outcome(split: str, merged: RanksMerged) -> None:
    if merged.expected is None:
        print(f"{split}: these files do not record which tasks were assigned")
    elif merged.missing:
        print(f"{split}: {missing_text(merged.missing)} of {merged.expected}")
    report = merged.report
    if report is None:
        would = merged.would_merge or {}
        print(f"{split}: would merge {would['groups']} groups into {would['out']}")
        return
    reward = "-" if report.reward_mean is None else f"{report.reward_mean:.3f}"
    what = f"{report.trajectories} trajectories in {report.groups} groups, reward {reward}"
    print(f"{split}: {'already merged' if report.already_done else 'merged'}: {what}: {report.out}")
    for note in report.damaged:
        print(f"{split}: dropped because damaged: {printable(note)}")
