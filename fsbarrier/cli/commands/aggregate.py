"""Merge the trajectory files that the ranks wrote in one iteration, finished or not, into one file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

from fsbarrier.cli.commands import flags
from fsbarrier.data import images, rank_files
from fsbarrier.data.merge import missing_text
from fsbarrier.data.rank_files import FoundFile
from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files
from fsbarrier.wording import printable

EXAMPLE = "fsbarrier aggregate --log-path runs/default --iteration 5 --dry-run"
FLAGS = {
    "--allow-partial": "merge even if tasks are missing, and record them in the result",
    "--dry-run": "list the files and show what would be merged",
    "--json": "print JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--iteration", type=int, required=True, metavar="N", help="the iteration to merge")
    parser.add_argument("--split", choices=SPLITS, help="merge only this split (default: both)")
    flags.add(parser, FLAGS)


def main(args: argparse.Namespace) -> int:
    """`fsbarrier aggregate`. Raises UsageError (nothing to merge, tasks missing), StoreError."""
    log_path, iteration = flags.find_log_path(args), args.iteration
    if iteration < 0:
        raise UsageError(f"--iteration {iteration}: must be 0 or more")
    if not log_path.is_dir():
        raise UsageError(f"--log-path {log_path}: no such directory")
    if runrecord.exists(log_path):
        files.set_shared_group(runrecord.load(log_path).settings.shared_group)
    chosen = [args.split] if args.split else list(SPLITS)
    by_split = {split: rank_files.find(log_path, split, iteration) for split in chosen}
    by_split = {split: items for split, items in by_split.items() if items}
    if not by_split:
        where = " or ".join(str(RunPaths(log_path).trajectories(split)) for split in chosen)
        raise UsageError(f"--iteration {iteration}: no rank wrote a file for this iteration in {where}")
    if not args.json:
        print("\n".join(file_lines(item for items in by_split.values() for item in items)))
    splits = {}
    for split, items in by_split.items():
        merged = rank_files.merge_ranks(
            log_path, split, iteration, items, allow_partial=args.allow_partial, dry_run=args.dry_run
        )
        if "refused" in merged:
            raise UsageError(merged["refused"])
        splits[split] = {"files": [file_json(item) for item in items], **merged}
        if not args.json:
            print("\n".join(merged_lines(split, merged)))
    if args.json:
        outcome = {"log_path": str(log_path), "iteration": iteration, "dry_run": args.dry_run}
        print(json.dumps({**outcome, "splits": splits}, indent=2))
    return 0


# --- what `aggregate` and `recover` show ----------------------------------------------------------------------------------


def file_json(item: FoundFile) -> JsonObject:
    return {
        "path": str(item.path),
        "split": item.split,
        "node_rank": item.node_rank,
        "state": item.state.value,
        "note": item.note,
        **item.counts(),
        "reward_mean": item.file.stats.reward_mean if item.file else None,
    }


def file_lines(items: Iterable[FoundFile]) -> Iterator[str]:
    """A line for each file."""
    for item in items:
        own = "image" if item.path.suffix in images.SUFFIXES.values() else "merged"
        who = own if item.node_rank is None else f"node {item.node_rank}"
        counts = item.counts()
        count = f"{counts['groups']:6} groups {counts['trajectories']:7} trajectories"
        notes = [item.note] if item.note else []
        notes += [f"torn bytes: {counts['torn_bytes']}"] if counts["torn_bytes"] else []
        note = f"  ({', '.join(notes)})" if notes else ""
        yield printable(f"  {item.split:5}  {who:8} {item.state.value:12} {count}  {item.path.name}{note}")


def merged_lines(split: str, outcome: JsonObject) -> Iterator[str]:
    """Describe what a merge did or would do, from its JSON."""
    expected, missing, report = outcome.get("expected"), outcome.get("missing"), outcome.get("report")
    if missing:
        yield f"{split}: {missing_text(missing)} of {expected}"
    elif "expected" in outcome and expected is None:
        yield f"{split}: these files do not record which tasks were assigned"
    if report:
        reward = "-" if report["reward_mean"] is None else f"{report['reward_mean']:.3f}"
        what = f"{report['trajectories']} trajectories in {report['groups']} groups, reward {reward}"
        verb = "already merged" if report["already_done"] else "merged"
        yield printable(f"{split}: {verb}: {what}: {report['out']}")
        for note in report["damaged"]:
            yield printable(f"{split}: dropped because damaged: {note}")
    elif "refused" in outcome:
        yield printable(f"{split}: would not merge: {outcome['refused']}")
    elif "would_merge" in outcome:
        would = outcome["would_merge"]
        yield printable(f"{split}: would merge {would['groups']} groups into {would['out']}")
