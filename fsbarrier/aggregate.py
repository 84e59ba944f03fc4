"""Merges what the ranks rolled out in one iteration, by hand or as the program that a phase starts.

`python -m fsbarrier.aggregate --log-path D --iteration 5` finds the rank files and the parts still growing, shows what each
left, and merges them (`fsbarrier aggregate` is the same). `python -m fsbarrier.aggregate --spec SPEC.json` is the worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.data import rankfiles
from fsbarrier.data.merge import AggregateReport, Progress, aggregate
from fsbarrier.data.mergeplan import Part, make_plan, missing_text
from fsbarrier.data.rankfiles import RankFile
from fsbarrier.data.shardscan import NotOurs, scan_shard
from fsbarrier.data.torchpickle import FormatError
from fsbarrier.errors import (
    EXIT_INTERNAL,
    FsbarrierError,
    ProgramFailed,
    StoreError,
    UsageError,
)
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.supervision import signals
from fsbarrier.trajectories import iter_trajectories, load

__all__ = ["AggregateReport", "Part", "Progress", "aggregate", "iter_trajectories", "load"]

SUMMARY = "merge what the ranks saved in one iteration, finished or not, into one file"
EXAMPLE = "fsbarrier aggregate --log-path runs/default --iteration 5 --dry-run"
PROGRESS_S = 0.25  # between two writings of the progress file
BAR_FROM = 64 << 20  # bytes; a smaller merge is over before a bar is drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-path", type=Path, default=None, metavar="D", help="the run directory")
    parser.add_argument("--iteration", type=int, required=True, metavar="N", help="the iteration to merge")
    parser.add_argument(
        "--split", choices=SPLITS, help="only this one (default: both, where there are files)"
    )
    parser.add_argument(
        "--allow-partial", action="store_true", help="merge although tasks are missing; the result says which"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="also take files that torch.save wrote with Python objects inside; loading one can run any code in it",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what there is and what would be done")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """By hand. Raises UsageError (nothing to merge, tasks missing, foreign files), StoreError, ProgramFailed."""
    from fsbarrier.start.preflight import default_log_path

    log_path: Path = args.log_path or default_log_path(os.environ)
    if args.iteration < 0:
        raise UsageError(f"--iteration {args.iteration}: not a number of an iteration")
    if not log_path.is_dir():
        raise UsageError(f"--log-path {log_path}: no such directory")
    chosen = [args.split] if args.split else list(SPLITS)
    found = {split: rankfiles.find(log_path, split, args.iteration) for split in chosen}
    found = {split: items for split, items in found.items() if items}
    if not found:
        where = " or ".join(str(RunPaths(log_path).trajectories(split)) for split in chosen)
        raise UsageError(f"no rank left a file of iteration {args.iteration} in {where}")
    outcome: dict[str, Any] = {
        "log_path": str(log_path),
        "iteration": args.iteration,
        "dry_run": args.dry_run,
        "splits": {split: {"files": [item.as_json() for item in items]} for split, items in found.items()},
    }
    if not args.json:
        for split, items in found.items():
            _print_table(split, args.iteration, items)
    for split, items in found.items():
        merged = merge_by_hand(log_path, split, items, args)
        outcome["splits"][split].update(merged)
        if not args.json:
            _print_outcome(split, merged)
    if args.json:
        print(json.dumps(outcome, indent=2))
    return 0


def merge_by_hand(
    log_path: Path, split: str, items: list[RankFile], args: argparse.Namespace
) -> dict[str, Any]:
    """Merge the files of one split; gives the report, or the plan for a dry run. Raises as `main`."""
    out = RunPaths(log_path).merged(split, args.iteration)
    for item in items:
        if item.state == "foreign" and not args.trust_pickle:
            raise UsageError(
                f"{item.path.name}: {item.note}, and unpickling it can run any code in it; if you trust it, add --trust-pickle"
            )
        if item.state == "unreadable" and not args.allow_partial:
            raise UsageError(
                f"{item.path.name}: {item.note}; move it away, or merge without it: --allow-partial"
            )
    with _converted(items, args) as usable:
        parts, expected = rankfiles.parts(usable), rankfiles.expected_tasks(usable)
        keep = rankfiles.groups_to_keep(usable)
        plan = make_plan(parts, expected, keep=keep)
        known = {"expected": None if expected is None else len(expected), "missing": list(plan.missing)}
        done = _already_there(out, set(plan.taken), set() if args.allow_partial else set(plan.missing))
        if done is not None:
            return {"report": asdict(done), **known}
        if plan.missing and not args.allow_partial:
            raise UsageError(
                f"{out.name}: {missing_text(plan.missing)}. To merge without them: --allow-partial"
            )
        if args.dry_run:
            counts = {"groups": len(plan.taken), "duplicates_dropped": plan.duplicates}
            return {"report": None, "would_merge": {"out": str(out), **counts}, **known}
        metadata = rankfiles.common_metadata(usable, split, args.iteration)
        metadata["allow_partial"] = args.allow_partial
        size = sum(part.valid_bytes or 0 for part in parts)
        with _bar(out.name, size) as show:
            report = aggregate(
                parts,
                out,
                metadata=metadata,
                expected=expected,
                keep=keep,
                allow_partial=args.allow_partial,
                on_progress=show,
            )
        return {"report": asdict(report), **known}


def _already_there(out: Path, tasks: set[int], missing: set[int]) -> AggregateReport | None:
    """The report of an intact merged file that has all of `tasks` already, and of `missing` says that the run cut them off."""
    try:
        if not out.exists():
            return None
        scan = scan_shard(out)
    except NotOurs as error:
        raise UsageError(f"{error}; move it away, it is not replaced") from None
    except FormatError:
        return None  # ours, but damaged: made anew
    if scan.damaged or not scan.merged or not tasks <= {group.task_index for group in scan.groups}:
        return None
    cut_off = scan.header.get("cut_off")
    if missing and not (isinstance(cut_off, list) and missing <= set(cut_off)):
        return None
    absent = scan.header.get("missing")
    return AggregateReport(
        out=str(out),
        trajectories=scan.trajectories,
        groups=len(scan.groups),
        missing=tuple(absent) if isinstance(absent, list) else (),
        duplicates_dropped=0,
        bytes=scan.valid_bytes,
        reward_mean=scan.reward_mean,
        already_done=True,
        fingerprint=scan.fingerprint,
    )


@contextlib.contextmanager
def _converted(items: list[RankFile], args: argparse.Namespace) -> Iterator[list[RankFile]]:
    """The usable files; with --trust-pickle the foreign ones, rewritten for as long as the merge lasts."""
    usable = [item for item in items if item.usable]
    foreign = [item for item in items if item.state == "foreign"]
    if not foreign:
        yield usable
        return
    with tempfile.TemporaryDirectory(prefix=".trusted-", dir=foreign[0].path.parent) as folder:
        for item in foreign:
            target = Path(folder) / item.path.name
            program = "fsbarrier.workers.trusted_pickle"
            command = [sys.executable, "-m", program, str(item.path), str(target), str(item.node_rank)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ProgramFailed(f"{item.path.name}: cannot be loaded: {last}")
            scan = scan_shard(target, verify=False)
            usable.append(RankFile(target, item.node_rank, "finished", "from a pickle", scan))
        yield usable


@contextlib.contextmanager
def _bar(name: str, size: int) -> Iterator[Callable[[Progress], None] | None]:
    """A progress bar on a terminal, for a merge that takes a while."""
    if size < BAR_FROM or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"merging {name}", total=size)
        yield lambda done: bar.update(task, completed=done.bytes, total=done.bytes_total)


def _print_table(split: str, iteration: int, items: list[RankFile]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{split}, iteration {iteration}: what each rank left", title_justify="left", box=None
    )
    for name in ("rank", "gen", "state", "groups", "trajectories", "reward", "torn bytes", "duplicates"):
        table.add_column(name, justify="left" if name == "state" else "right")
    table.add_column("file", overflow="fold")
    for item in items:
        scan = item.scan
        generation = str(item.generation) if item.generation >= 0 else "-"
        numbers = ["-"] * 5
        if scan:
            reward = "-" if scan.reward_mean is None else f"{scan.reward_mean:.3f}"
            counts = (len(scan.groups), scan.trajectories, reward, scan.torn_bytes, item.duplicates)
            numbers = [str(value) for value in counts]
        name = item.path.name + (f" ({item.note})" if item.note else "")
        table.add_row(str(item.node_rank), generation, item.state, *numbers, Text(name))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def _print_outcome(split: str, merged: dict[str, Any]) -> None:
    if merged["expected"] is None:
        print(f"{split}: which tasks were assigned is not known from these files")
    elif merged["missing"]:
        print(f"{split}: {missing_text(tuple(merged['missing']))} of {merged['expected']}")
    report = merged["report"]
    if report is None:
        would = merged["would_merge"]
        print(f"{split}: would merge {would['groups']} groups into {would['out']}")
        return
    reward = "-" if report["reward_mean"] is None else f"{report['reward_mean']:.3f}"
    what = f"{report['trajectories']} trajectories in {report['groups']} groups, reward {reward}"
    print(f"{split}: {'already merged' if report['already_done'] else 'merged'}: {what}: {report['out']}")
    for note in report["damaged"]:
        print(f"{split}: dropped, damaged: {note}")


def work(spec_file: Path) -> int:
    """The worker: merge as the spec says, write the report as its result; gives the exit code."""
    signal.signal(signal.SIGTERM, signals.end)  # unwinds, so that no half-written file stays behind
    try:
        spec = json.loads(spec_file.read_text())
        report = aggregate(
            [_part(record) for record in spec["parts"]],
            Path(spec["out"]),
            metadata=spec["metadata"],
            expected=spec["expected"],
            keep=spec.get("keep"),
            allow_partial=spec.get("allow_partial", False),
            on_progress=_progress_file(Path(spec["progress"])),
        )
        files.write_atomic(Path(spec["result"]), json.dumps(asdict(report)).encode())
        return 0
    except FsbarrierError as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, StoreError) else EXIT_INTERNAL
    except OSError as error:
        print(f"{error.filename or spec_file}: {error.strerror or error}", file=sys.stderr)
        return StoreError.exit_code


def _part(record: dict[str, Any]) -> Part:
    tasks = record["tasks"]
    return Part(Path(record["path"]), record["valid_bytes"], None if tasks is None else frozenset(tasks))


def _progress_file(path: Path) -> Callable[[Progress], None]:
    """Writes how far the merge is, a few times a second at most."""
    due = 0.0

    def show(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() < due and progress.bytes < progress.bytes_total:
            return
        due = time.monotonic() + PROGRESS_S
        fields = {
            "done": progress.trajectories,
            "total": progress.trajectories_total,
            "unit": "trajectories",
            "reward_mean": None,
            "tokens_per_s": None,
            "note": f"{progress.bytes / 1e6:.0f} of {progress.bytes_total / 1e6:.0f} MB",
        }
        files.write_atomic(path, json.dumps(fields).encode())

    return show


def command_line(words: Sequence[str]) -> int:
    """`python -m fsbarrier.aggregate`, either way; gives the exit code."""
    if words and words[0] == "--spec":
        return work(Path(words[1]))
    from fsbarrier import cli

    return cli.main(["aggregate", *words])


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
