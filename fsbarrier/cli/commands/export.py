"""Copy a policy out of a run as a Hugging Face model folder, verifying the SHA-256 of every file; or export trajectories as JSON
lines or Parquet.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.start import policy_export, preflight
from fsbarrier.data import tables
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.runrecord import load
from fsbarrier.wording import counted, printable

EXAMPLE = "fsbarrier export ./my-model --policy-version 6; fsbarrier export ./five.parquet --iteration 5"
# A user who names such a target expects a table in that format. It is not supported, and a folder of that name would be a surprise.
DATA_SUFFIXES = (
    *(".csv", ".tsv", ".json", ".txt", ".xlsx", ".arrow", ".feather"),
    *(".pt", ".safetensors", ".zip", ".gz"),
)


ONLY_POLICY, ONLY_TABLE = (
    ("--policy-version", "--critic", "--adapter", "--push"),
    ("--iteration", "--no-tokens"),
)
POLICY_FLAGS = {
    "--policy-version V": "policy version (default: the one the run serves now; 0: the initial model)",
    "--critic": "the critic that was saved with it (a token classifier with one label) instead of the policy",
    "--adapter": "the adapters (lora.rank) alone, in peft's format, instead of the policy with these merged",
    "--push REPO": "also upload the folder to the Hugging Face Hub (or $HF_ENDPOINT); a new repository is private",
    "--json": "print JSON",
}

TABLE_FLAGS = {
    "--iteration N*": "iteration to export; may be repeated (default: all on disk)",
    "--no-tokens": "omit token ids, masks and log-probabilities",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    what = "the folder (for a policy) or the .jsonl or .parquet file (for trajectories) to create"
    parser.add_argument("to", metavar="DIR|FILE", type=Path, help=what)
    flags.add(parser, POLICY_FLAGS)
    rows = parser.add_argument_group("trajectories, to a .jsonl or .parquet file")
    rows.add_argument("--split", choices=SPLITS, default="train", help="train (default) or test")
    flags.add(rows, TABLE_FLAGS)


def main(args: argparse.Namespace) -> int:
    log_path, target = flags.find_log_path(args), preflight.absolute(args.to)
    is_table, table = target.suffix in tables.SUFFIXES, f"a file that ends in {' or '.join(tables.SUFFIXES)}"
    for flag in ONLY_POLICY if is_table else ONLY_TABLE:
        if getattr(args, flag[2:].replace("-", "_")) not in (None, False):
            what = "a policy; name a folder" if is_table else f"trajectories; name {table}"
            raise UsageError(f"{flag}: only for exporting {what} as the target")
    if is_table:
        return export_table(args, log_path, target)
    if target.suffix in DATA_SUFFIXES:
        raise UsageError(
            f"{target}: unsupported format; to export trajectories, name {table}; to export a policy, name a folder"
        )
    record = load(log_path)
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target}: already exists; name a new folder")
    if args.critic and args.adapter:
        raise UsageError("--critic: contradicts --adapter; give one of the two")
    part = (
        policy_export.CRITIC
        if args.critic
        else policy_export.ADAPTERS
        if args.adapter
        else policy_export.POLICY
    )
    chosen = policy_export.find(record, args.policy_version, part=part)
    make_parents(target)
    try:
        policy_export.export(chosen, target)
    except OSError as error:
        raise StoreError(f"{error.filename or target}: {error.strerror or error}") from None
    title = f"{'critic of ' * args.critic}{'adapters of ' * args.adapter}policy version {chosen.version} of run {printable(record.run_id)}"
    pushed = printable(policy_export.push(target, args.push, title)) if args.push else None
    if args.json:
        result = {"policy_version": chosen.version, "folder": str(target), "from": str(chosen.model)}
        print(json.dumps({**result, "checked": bool(chosen.digests), "pushed": pushed}))
    else:
        print(f"exported {title} to {target}{f' and {pushed}' if pushed else ''}")
    return 0


def export_table(args: argparse.Namespace, log_path: Path, target: Path) -> int:
    """Write trajectories as a table. Raises UsageError, StoreError."""
    exported, aside = tables.sources(log_path, args.split, args.iteration)
    make_parents(target)
    count = tables.export(exported, target, tokens=not args.no_tokens)
    if args.json:
        sources = [str(path) for path in exported]
        print(json.dumps({"file": str(target), "trajectories": count, "from": sources, "aside": aside}))
    else:
        for note in aside:
            print(f"skipped: {printable(note)}")
        print(f"exported {count} trajectories from {counted(len(exported), 'file')} to {target}")
    return 0


def make_parents(target: Path) -> None:
    """Create the folder that the target goes into. Raises UsageError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: cannot create its folder: {error.strerror or error}") from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{target}: you have no write permission for {target.parent}")
