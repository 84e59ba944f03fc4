"""Remove a run that has ended: shows what that frees, and asks. Only what fsbarrier made is removed; your own files in the folder stay."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files
from fsbarrier.wording import printable

EXAMPLE = "fsbarrier rm runs/demo; fsbarrier rm --log-path runs/old --yes"
FLAGS = {
    "--yes": "do not ask",
    "--dry-run": "show what would be removed without removing anything",
    "--json": "print JSON; with --yes or --dry-run",
}
#: names that commands give to files in the run directory
MADE_BY_COMMANDS = re.compile(r"report\.html|quarantine|debug-\d{8}T\d+\.tar\.gz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS)


def main(args: argparse.Namespace) -> int:
    from fsbarrier.cli.commands.recover import refuse_if_live
    from fsbarrier.rundir.runrecord import load

    if args.yes and args.dry_run:
        raise UsageError("--yes: contradicts --dry-run; drop one of the two")
    if args.json and not (args.yes or args.dry_run):
        raise UsageError("--json: asks nothing, so give --yes or --dry-run with it")
    # If the user named a link to a run, the run is removed. The link stays, and leads nowhere.
    record = load(flags.find_log_path(args).resolve())
    log_path = record.log_path
    if not args.dry_run:
        refuse_if_live(log_path, record.settings.coordination.beat_s)
    made, kept = _sorted_out(record.paths)
    sizes = {path.name: _bytes_of(path) for path in made}
    told = {
        "log_path": str(log_path),
        "bytes": sum(sizes.values()),
        "removes": sizes,
        "stays": [path.name for path in kept],
    }
    if not args.json:
        for line in _as_text(log_path, sizes, kept):
            print(printable(line))
    if args.dry_run or not (args.yes or _agreed()):
        if args.json:
            print(json.dumps({**told, "removed": False}))
        else:
            print("nothing was removed")
        return 0
    _remove(record.paths, made, kept)
    print(
        json.dumps({**told, "removed": True}) if args.json else f"removed, {_size(sum(sizes.values()))} freed"
    )
    return 0


def _sorted_out(paths: RunPaths) -> tuple[list[Path], list[Path]]:
    """What fsbarrier made in a run directory, the record last, because an interrupted removal must find it; and everything else."""
    own = {
        *(paths.coordination, paths.checkpoints, paths.served_model, paths.first_policy, paths.demo),
        *(paths.logs, paths.trackers, paths.events, *map(paths.trajectories, SPLITS)),
    }
    there = sorted(path for path in paths.root.iterdir() if path != paths.record)
    made = [path for path in there if path in own or MADE_BY_COMMANDS.fullmatch(path.name)]
    return [*made, paths.record], [path for path in there if path not in made]


def _bytes_of(path: Path) -> int:
    """The space that a file or a folder takes on disk. A file with several names counts once."""
    seen = {(status.st_dev, status.st_ino): status.st_blocks * 512 for status in _files_below(path)}
    return sum(seen.values())


def _files_below(path: Path) -> Iterator[os.stat_result]:
    try:
        status = path.lstat()
        yield status
        if stat.S_ISDIR(status.st_mode):
            for name in os.listdir(path):
                yield from _files_below(path / name)
    # Another process has removed it meanwhile, or this user may not read it.
    except OSError:
        return


def _as_text(log_path: Path, sizes: dict[str, int], kept: list[Path]) -> Iterator[str]:
    yield f"{log_path}: {_size(sum(sizes.values()))}"
    yield from (f"  {_size(size):>9}  {name}" for name, size in sizes.items())
    if kept:
        yield f"  stays: {', '.join(path.name for path in kept)}"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm: asks before it removes anything, and there is nobody to ask; give --yes")
    print("remove these? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(paths: RunPaths, made: list[Path], kept: list[Path]) -> None:
    """Remove what fsbarrier `made`, and the folder too if nothing is `kept` in it. Raises StoreError."""
    try:
        for path in made:
            files.remove(path, paths.root)
        if not kept:
            paths.root.rmdir()
    except OSError as error:
        where = error.filename or paths.root
        raise StoreError(
            f"{where}: cannot be removed: {error.strerror or error}; mend that, and type this again"
        ) from None
