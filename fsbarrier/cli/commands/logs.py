"""`fsbarrier logs`: shows the last lines of the nodes' logs, or follows them."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.rundir.log_tail import fit_for_terminal
from fsbarrier.rundir.names import ATTEMPT_FOLDER, NODE_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import reading

SUMMARY = "Show the last lines of the nodes' logs (from each node's latest start), or follow them."
EXAMPLE = """fsbarrier logs --node 2 --file vllm -n 100
  fsbarrier logs --first-error"""
FLAGS = {
    "--node R": "only this node",
    "--file NAME": "only this log: daemon, vllm, rollout, update, ...",
    "--attempt A": "logs of this start of the node (default: the latest)",
    "-n --lines N": "number of lines per log (default 20)",
    "--first-error": "show only the earliest failure on any node, with its context",
    "-f --follow": "keep printing new lines until Ctrl-C",
}

#: polling interval for new lines and new files while following
LOOK_S = 0.5
#: at most so many bytes of a log are read at once; of a longer line the end is shown
MOST_BYTES, LINE_BYTES = 16 << 20, 64 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    flags.add(parser, FLAGS, lines=20)


@dataclass(frozen=True, slots=True)
class Log:
    """A log file, and what each of its lines begins with."""

    label: str
    path: Path


def main(args: argparse.Namespace) -> int:
    paths = flags.find_run(args).paths
    if args.first_error:
        return _first_error(paths)

    def logs() -> list[Log]:
        return find(paths, node=args.node, attempt=args.attempt, name=args.file)

    if not logs() and not args.follow:
        filters = {"--node": args.node, "--file": args.file, "--attempt": args.attempt}
        typed = [f"{flag} {value}" for flag, value in filters.items() if value is not None]
        flag = " ".join(typed) or f"--log-path {paths.root}"
        raise UsageError(f"{flag}: no matching logs in {paths.logs}")
    show(logs, args.lines, follows=lambda: bool(args.follow))
    return 0


def _first_error(paths: RunPaths) -> int:
    from fsbarrier.rundir.journal import read_events
    from fsbarrier.view.first_error import first_error

    lines = first_error(read_events(paths.root), paths.logs)
    print("\n".join(lines or ["no node, program or phase of this run has failed"]))
    return 0


def find(
    paths: RunPaths, *, node: int | None = None, attempt: int | None = None, name: str | None = None
) -> list[Log]:
    """The matching logs of each node's latest matching start, sorted by node and name."""
    matching: dict[int, dict[int, list[Path]]] = {}
    for path in sorted(paths.logs.glob("*/*/*.log")):
        # A link could lead out of the run directory to other files.
        if path.parent.is_symlink() or path.parent.parent.is_symlink():
            continue
        start, rank = ATTEMPT_FOLDER.parse(path.parent.parent.name), NODE_FOLDER.parse(path.parent.name)
        if start is None or rank is None or node not in (None, rank) or attempt not in (None, start):
            continue
        if name in (None, path.stem, path.name):
            matching.setdefault(rank, {}).setdefault(start, []).append(path)
    newest = {rank: starts[max(starts)] for rank, starts in sorted(matching.items())}
    return [Log(f"[node {rank} {path.stem}]", path) for rank, paths in newest.items() for path in paths]


def show(logs: Callable[[], Sequence[Log]], count: int, follows: Callable[[], bool]) -> None:
    """Print the last `count` lines of each log, then new lines and new logs as long as `follows`."""
    offsets: dict[Path, int] = {}
    pause, first = threading.Event(), True
    while True:
        # Asked before the logs are read, so that no output of what ends meanwhile is missed.
        goes_on = follows()
        for log in logs():
            lines, offsets[log.path] = read_lines(
                log.path, offsets.get(log.path, -MOST_BYTES if first else 0)
            )
            for line in lines[-count or len(lines) :] if first else lines:
                print(log.label, line, flush=True)
        if not goes_on:
            return
        first = False
        pause.wait(LOOK_S)


def read_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """The complete lines of a log after `offset`, and the offset after them. A negative one counts from the end."""
    try:
        with reading.open_stream(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            # If the log is shorter than it was, it has been truncated.
            begin = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
            stream.seek(begin)
            data = stream.read(MOST_BYTES)
    except OSError as error:
        return [f"(cannot read this log: {error.strerror})"] if offset < 0 else [], max(0, offset)
    whole, newline, rest = data.rpartition(b"\n")
    if not newline and len(data) == MOST_BYTES:
        # One line is longer than what is read: it is shown in pieces.
        whole, rest = data, b""
    lines = whole.split(b"\n") if whole or newline else []
    if offset < 0 and begin > 0 and newline:
        # Its beginning was not read.
        del lines[0]
    return [_decoded(line) for line in lines], begin + len(data) - len(rest)


def _decoded(line: bytes) -> str:
    cut = f"({len(line) - LINE_BYTES} bytes) ... " if len(line) > LINE_BYTES else ""
    # A progress bar overwrites itself, so only the end of the line matters.
    return cut + fit_for_terminal(line[-LINE_BYTES:].decode("utf-8", errors="replace"))
