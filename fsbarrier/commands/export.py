"""`fsbarrier export DIR`: copies a policy version out of a run, as a Hugging Face model folder that other tools load.

`fsbarrier export FILE.jsonl` (or .parquet) writes its trajectories as a table instead (fsbarrier/data/tables.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fsbarrier import files
from fsbarrier.commands import flags
from fsbarrier.data import tables
from fsbarrier.errors import ProgramFailed, StoreError, UsageError
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord, load
from fsbarrier.start import preflight

SUMMARY = (
    "Copy a policy out of a run as a Hugging Face model folder, every file checked against its SHA-256; or its trajectories "
    "as JSON lines or parquet."
)
EXAMPLE = "fsbarrier export ./my-model --policy-version 6; fsbarrier export ./five.parquet --iteration 5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "to",
        metavar="DIR|FILE",
        type=Path,
        help="the folder (a policy) or the .jsonl or .parquet file to make",
    )
    parser.add_argument(
        "--policy-version",
        metavar="V",
        type=flags.whole_number,
        help="which (default: what the run serves now; 0: the start)",
    )
    rows = parser.add_argument_group("trajectories, to a .jsonl or .parquet file")
    rows.add_argument(
        "--iteration",
        metavar="N",
        type=flags.whole_number,
        action="append",
        help="which; may be given several times (default: all that are on disk)",
    )
    rows.add_argument("--split", choices=SPLITS, default="train", help="train (default) or test")
    rows.add_argument(
        "--file", metavar="F", type=Path, action="append", help="trajectory files to take, instead of a run's"
    )
    rows.add_argument(
        "--no-tokens", action="store_true", help="leave token ids, masks and log-probabilities out"
    )
    flags.add_log_path(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    log_path, target = flags.find_log_path(args), preflight.absolute(args.to)
    if target.suffix in tables.SUFFIXES:
        return export_table(args, log_path, target)
    for flag, given in (
        ("--iteration", args.iteration),
        ("--file", args.file),
        ("--no-tokens", args.no_tokens),
    ):
        if given:
            raise UsageError(
                f"{flag}: only for trajectories; name a file that ends in {' or '.join(tables.SUFFIXES)}"
            )
    record = load(log_path)
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target}: is there already; name a new folder")
    version, model, known = find(record, args.policy_version)
    try:
        copy(model, target, known)
    except OSError as error:
        raise StoreError(f"{error.filename or target}: {error.strerror or error}") from None
    if args.json:
        print(
            json.dumps(
                {"policy_version": version, "folder": str(target), "from": str(model), "checked": bool(known)}
            )
        )
    else:
        print(f"policy version {version} of run {record.run_id} is in {target}")
    return 0


def export_table(args: argparse.Namespace, log_path: Path, target: Path) -> int:
    """Write trajectories as a table. Raises UsageError, StoreError."""
    if args.policy_version is not None:
        raise UsageError("--policy-version: only for a policy; name a folder")
    aside: list[str] = []
    if args.file:
        found = [preflight.absolute(path) for path in args.file]
    else:
        found, aside = tables.sources(log_path, args.split, args.iteration)
    done = tables.export(found, target, tokens=not args.no_tokens)
    if args.json:
        sources = [str(path) for path in done.files]
        print(
            json.dumps(
                {"file": str(target), "trajectories": done.trajectories, "from": sources, "aside": aside}
            )
        )
    else:
        for note in aside:
            print(f"left aside: {note}")
        print(f"{done.trajectories} trajectories of {len(done.files)} files are in {target}")
    return 0


def find(record: RunRecord, wanted: int | None) -> tuple[int, Path, Mapping[str, str]]:
    """A policy version: its number, its Hugging Face folder, and its files' SHA-256 by name (none for the first policy).

    Raises UsageError where the run has no such version, ProgramFailed for a damaged one.
    """
    served = served_folder(record.log_path)
    there = checkpoints.versions(record.log_path)
    folders = [folder for version, folder in there if version == wanted] if wanted is not None else [served]
    complete = [
        folder for folder in folders if folder is not None and (folder / checkpoints.MANIFEST).is_file()
    ]
    # Of several attempts at one version the one that the run serves, else the newest.
    if complete:
        folder = served if served in complete else complete[-1]
        assert folder is not None
        manifest = checkpoints.verify(folder)
        digests = {name: digest.sha256 for name, digest in manifest.files.items()}
        known = {name.removeprefix("model/"): digests[name] for name in digests if name.startswith("model/")}
        return manifest.policy_version, folder / "model", known
    if not wanted and record.model is not None:
        return 0, Path(record.model), {}
    if wanted is None:
        raise UsageError(
            f"--log-path {record.log_path}: this run has no policy (program {record.settings.program})"
        )
    kept = ", ".join(str(version) for version in sorted({0, *(version for version, _ in there)}))
    raise UsageError(
        f"--policy-version {wanted}: not on disk; there are {kept} (checkpoint.keep says how many stay)"
    )


def served_folder(log_path: Path) -> Path | None:
    """The policy version that the run points at; the newest complete one where it holds a copy instead of a link."""
    served = RunPaths(log_path).served_model
    if served.is_symlink():
        target = Path(os.path.normpath(served.parent / os.readlink(served)))
        return (
            target.parent
            if target.name == "model" and target.parent.parent == RunPaths(log_path).checkpoints
            else None
        )
    complete = [
        folder for _, folder in checkpoints.versions(log_path) if (folder / checkpoints.MANIFEST).is_file()
    ]
    return complete[-1] if complete else None


def copy(model: Path, target: Path, known: Mapping[str, str]) -> None:
    """Copy a model folder; `target` appears in one step, when all of it is there and right. Raises OSError, ProgramFailed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = files.temporary_beside(target)
    try:
        shutil.copytree(model, staging)
        for name, digest in known.items():
            if files.sha256_file(staging / name) != digest:
                raise ProgramFailed(f"{model / name}: changed while it was copied; try again")
        files.fsync_dir(staging)
        os.rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
