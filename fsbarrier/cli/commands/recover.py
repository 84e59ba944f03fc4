"""After a disaster: show the files each rank left, move unusable ones to quarantine/, and merge the valid ones on request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.commands.aggregate import file_json, file_lines, merged_lines
from fsbarrier.data import rank_files
from fsbarrier.data.rank_files import FoundFile
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.run import recovery
from fsbarrier.rundir import heartbeats
from fsbarrier.rundir.names import SPLITS
from fsbarrier.wording import printable, ranks

EXAMPLE = "fsbarrier recover --iteration 5 --dry-run"
WATCHED_BEATS = 2.5


FLAGS = {
    "--aggregate": "merge the valid files",
    "--allow-partial": "with --aggregate: merge even if tasks are missing, and record that in the result",
    "--dry-run": "show what would be done without changing anything",
    **flags.TRUST,
    "--json": "print JSON",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--iteration", metavar="N", type=int, required=True, help="the iteration to check")
    flags.add(parser, FLAGS)


def main(args: argparse.Namespace) -> int:
    record = flags.find_own_run(args)
    log_path = record.log_path
    if args.iteration < 1:
        raise UsageError(f"--iteration {args.iteration}: iterations are numbered from 1")
    if args.allow_partial and not args.aggregate:
        raise UsageError("--allow-partial: only valid with --aggregate")
    if not args.dry_run:
        refuse_if_live(log_path, record.settings.coordination.beat_s)
    files = recovery.inspect(log_path, args.iteration)
    aside = [item for item in files if item.state.in_the_way]
    outcome: JsonObject = {
        "log_path": str(log_path),
        "iteration": args.iteration,
        "dry_run": args.dry_run,
        "files": [file_json(item) for item in files],
        "would_quarantine" if args.dry_run else "quarantined": [str(item.path) for item in aside],
    }
    try:
        plan = [merge(log_path, split, files, args, dry_run=True) for split in SPLITS]
        refused = [split["refused"] for split in plan if "refused" in split]
        if refused and args.aggregate and not args.dry_run:
            # Fail before changing anything.
            raise UsageError(refused[0])
        has_something = files or any(split["gone"] for split in plan)
        # The next iteration may have begun without a file.
        if not has_something and args.iteration > max(recovery.iterations(log_path), default=0) + 1:
            raise UsageError(nothing_of(log_path, args.iteration))
        if not args.dry_run:
            outcome["quarantined_in"] = str(recovery.quarantine(log_path, aside) or "")
            plan = [merge(log_path, split, files, args, dry_run=False) for split in SPLITS]
        outcome["splits"] = plan
    except OSError as error:
        raise StoreError(f"{error.filename or log_path}: {error.strerror or error}") from None
    print(json.dumps(outcome, indent=2) if args.json else as_text(outcome, files))
    return 0


def refuse_if_live(log_path: Path, beat_s: float) -> None:
    """Raises UsageError if nodes of the run are alive, and names them."""
    live = heartbeats.live_nodes(log_path, WATCHED_BEATS * beat_s)
    if live:
        names = ", ".join(f"node {beat.rank} ({beat.host}, process {beat.pid})" for beat in live)
        raise UsageError(
            f"{log_path} is in use by {names}; stop them first (fsbarrier stop --now), or use --dry-run"
        )


def nothing_of(log_path: Path, iteration: int) -> str:
    """The error for an iteration of which the run has nothing."""
    known = recovery.iterations(log_path)
    has = f"it has files of iterations {ranks(known)}" if known else "it has none of any iteration"
    return f"--iteration {iteration}: {log_path} has no trajectories of it; {has}"


def merge(
    log_path: Path, split: str, files: list[FoundFile], args: argparse.Namespace, *, dry_run: bool
) -> JsonObject:
    """Merge one split if the user asked for it, or show what that would do (see `merge_ranks`). Raises StoreError, OSError."""
    gone = recovery.gone(log_path, split, args.iteration, files)
    outcome: JsonObject = {"split": split, "gone": [str(path) for path in gone]}
    usable = [item for item in files if item.split == split and not item.state.in_the_way]
    parts = [item for item in usable if item.node_rank is not None]
    if not parts:
        return outcome
    only_shows, partial = dry_run or not args.aggregate, args.allow_partial
    outcome |= rank_files.merge_ranks(
        log_path, split, args.iteration, parts, allow_partial=partial, dry_run=only_shows
    )
    if not only_shows and (report := outcome["report"]):
        outcome["restored"] = [str(path) for path in recovery.restore(Path(report["out"]), gone)]
    return outcome


def as_text(outcome: JsonObject, files: list[FoundFile]) -> str:
    lines = [f"iteration {outcome['iteration']} in {outcome['log_path']}"]
    lines += file_lines(files) if files else ["  no files"]
    if outcome.get("would_quarantine"):
        lines.append(f"would move {len(outcome['would_quarantine'])} file(s) to quarantine/")
    if outcome.get("quarantined_in"):
        lines.append(f"moved unusable files to {outcome['quarantined_in']}")
    for split in outcome["splits"]:
        lines += merged_lines(split["split"], split)
        if split["gone"] and not split.get("restored"):
            names = ", ".join(Path(path).name for path in split["gone"])
            lines.append(f"{names} is missing, but the run needs it: --aggregate recreates it")
    lines.append(
        "nothing was changed" if outcome["dry_run"] else "start the run with its normal command to continue"
    )
    return "\n".join(map(printable, lines))
