"""`fsbarrier recover`: see what an iteration left, put aside what cannot be used, merge on request."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fsbarrier import aggregate, trajectories
from fsbarrier.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.maintenance import recovery
from fsbarrier.node import liveness
from fsbarrier.paths import SPLITS, RunPaths
from fsbarrier.start import runrecord

SUMMARY = "after a disaster: show what each rank left, keep what is valid, merge on request"
EXAMPLE = "fsbarrier recover --iteration 5 --dry-run"
WATCHED_BEATS = 2.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--iteration", type=int, required=True, help="the iteration to look at")
    parser.add_argument("--aggregate", action="store_true", help="merge what is valid")
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="merge although tasks are missing; recorded in the result",
    )
    parser.add_argument("--dry-run", action="store_true", help="show, change nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    log_path = flags.find_log_path(args)
    record = runrecord.load(log_path)
    if args.iteration < 1:
        raise UsageError(f"--iteration {args.iteration}: iterations count from 1")
    found = recovery.inspect(log_path, args.iteration)
    if not args.dry_run:
        refuse_if_live(log_path, record.settings["coordination"]["beat_s"])
    aside = recovery.useless(found)
    outcome: dict[str, object] = {
        "log_path": str(log_path),
        "iteration": args.iteration,
        "dry_run": args.dry_run,
    }
    outcome["files"] = [{**asdict(item), "path": str(item.path)} for item in found]
    if args.dry_run:
        outcome["would_quarantine"] = [str(item.path) for item in aside]
    else:
        outcome["quarantined_in"] = str(recovery.quarantine(log_path, aside) or "")
    if args.aggregate and not args.dry_run:
        outcome["merged"] = [
            merge(log_path, split, args) for split in SPLITS if any(f.split == split for f in found)
        ]
    print(json.dumps(outcome, indent=2) if args.json else as_text(outcome, found))
    return 0


def refuse_if_live(log_path: Path, beat_s: float) -> None:
    """Raises UsageError naming the nodes that hold the run."""
    live = liveness.live_nodes(log_path, WATCHED_BEATS * beat_s)
    if live:
        names = ", ".join(f"node {beat.rank} ({beat.host}, process {beat.pid})" for beat in live)
        raise UsageError(
            f"{log_path} is held by {names}; end them first (fsbarrier stop --now), or use --dry-run"
        )


def merge(log_path: Path, split: str, args: argparse.Namespace) -> dict[str, object]:
    """Merge the valid files of one split; the parts that a merged file is made of win over finished copies of them."""
    items = [
        f for f in recovery.inspect(log_path, args.iteration) if f.split == split and f.node_rank is not None
    ]
    parts = [f for f in items if f.usable and f.is_part] or [f for f in items if f.usable]
    expected = {task for f in parts for task in f.missing}
    expected |= {group.task_index for f in parts for group in trajectories.scan_shard(f.path).groups}
    report = aggregate.aggregate(
        [aggregate.Part(f.path, f.valid_bytes, None) for f in parts],
        RunPaths(log_path).merged(split, args.iteration),
        metadata={
            "run_id": runrecord.load(log_path).run_id,
            "split": split,
            "iteration": args.iteration,
            "recovered": True,
        },
        expected=expected,
        allow_partial=args.allow_partial,
    )
    return {"split": split, **asdict(report)}


def as_text(outcome: dict[str, object], found: list[recovery.Found]) -> str:
    lines = [f"iteration {outcome['iteration']} in {outcome['log_path']}"]
    for item in found:
        who = "merged" if item.node_rank is None else f"node {item.node_rank}"
        note = f"  ({item.note})" if item.note else ""
        lines.append(
            f"  {item.split:5}  {who:8} {item.state:10} {item.groups:6} groups {item.trajectories:7} trajectories  {item.path.name}{note}"
        )
    if not found:
        lines.append("  nothing is there")
    if outcome.get("would_quarantine"):
        lines.append(f"would move {len(outcome['would_quarantine'])} file(s) to quarantine/")  # type: ignore[arg-type]
    if outcome.get("quarantined_in"):
        lines.append(f"moved what cannot be used to {outcome['quarantined_in']}")
    for merged in outcome.get("merged", ()):  # type: ignore[attr-defined]
        lines.append(
            f"merged {merged['split']}: {merged['trajectories']} trajectories, {len(merged['missing'])} tasks missing"
        )
    if not outcome["dry_run"]:
        lines.append("the normal command goes on from here")
    return "\n".join(lines)
