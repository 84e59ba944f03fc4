"""`fsbarrier logs`: shows the last lines of the nodes' logs, or follows them."""

from __future__ import annotations

import argparse
import os
import threading
from collections import deque
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

#: polling interval for new lines and new files while following
LOOK_S = 0.5
#: bytes per read, maximum bytes of one log in memory, maximum bytes of a line to show
BLOCK_BYTES, MOST_BYTES, LINE_BYTES = 1 << 20, 64 << 20, 64 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--node", metavar="R", type=flags.whole_number, help="only this node")
    parser.add_argument("--file", metavar="NAME", help="only this log: daemon, vllm, rollout, update, ...")
    parser.add_argument(
        "--attempt",
        metavar="A",
        type=flags.whole_number,
        help="logs of this start of the node (default: the latest)",
    )
    parser.add_argument(
        "-n",
        "--lines",
        metavar="N",
        type=flags.whole_number,
        default=20,
        help="number of lines per log (default 20)",
    )
    parser.add_argument(
        "--first-error",
        action="store_true",
        help="show only the earliest failure on any node, with its context",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines until Ctrl-C")


@dataclass(frozen=True, slots=True)
class Log:
    """One log file of one start of a node."""

    node: int
    attempt: int
    path: Path

    @property
    def label(self) -> str:
        return f"[node {self.node} {self.path.stem}]"


def main(args: argparse.Namespace) -> int:
    log_path = flags.find_run(args).log_path
    if args.first_error:
        return _first_error(log_path)
    logs = find(log_path, node=args.node, attempt=args.attempt, name=args.file)
    if not logs and not args.follow:
        filters = {"--node": args.node, "--file": args.file, "--attempt": args.attempt}
        typed = [f"{flag} {value}" for flag, value in filters.items() if value is not None]
        flag = " ".join(typed) or f"--log-path {log_path}"
        raise UsageError(f"{flag}: no matching logs in {RunPaths(log_path).logs}")
    offsets: dict[Path, int] = {}
    for log in logs:
        lines, offsets[log.path] = last_lines(log.path, args.lines)
        for line in lines:
            print(log.label, line)
    # Ends with Ctrl-C.
    while args.follow:
        for log in find(log_path, node=args.node, attempt=args.attempt, name=args.file):
            lines, offsets[log.path] = new_lines(log.path, offsets.get(log.path, 0))
            for line in lines:
                print(log.label, line, flush=True)
        threading.Event().wait(LOOK_S)
    return 0


def _first_error(log_path: Path) -> int:
    from fsbarrier.rundir.journal import read_events
    from fsbarrier.view.first_error import first_error

    lines = first_error(read_events(log_path), RunPaths(log_path).logs)
    print("\n".join(lines or ["no node, program or phase of this run has failed"]))
    return 0


def find(log_path: Path, *, node: int | None, attempt: int | None, name: str | None) -> list[Log]:
    """The matching logs of each node's latest matching start, sorted by node and name."""
    found = []
    for path in RunPaths(log_path).logs.glob("*/*/*.log"):
        # A link could lead out of the run directory to other files.
        if path.parent.is_symlink() or path.parent.parent.is_symlink():
            continue
        log_attempt = ATTEMPT_FOLDER.parse(path.parent.parent.name)
        log_node = NODE_FOLDER.parse(path.parent.name)
        if (
            log_attempt is not None
            and log_node is not None
            and node in (None, log_node)
            and attempt in (None, log_attempt)
            and name in (None, path.stem, path.name)
        ):
            found.append(Log(log_node, log_attempt, path))
    newest: dict[int, int] = {}
    for log in found:
        newest[log.node] = max(log.attempt, newest.get(log.node, 0))
    found = [log for log in found if log.attempt == newest[log.node]]
    return sorted(found, key=lambda log: (log.node, log.path.stem))


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` complete lines of a file, and the offset after them. Reads from the end, because logs grow large."""
    try:
        with reading.open_stream(path) as stream:
            begin = end = stream.seek(0, os.SEEK_END)
            blocks, newlines = deque[bytes](), 0
            while begin > max(0, end - MOST_BYTES) and newlines <= count:
                size = min(BLOCK_BYTES, begin)
                begin -= size
                stream.seek(begin)
                blocks.appendleft(stream.read(size))
                newlines += blocks[0].count(b"\n")
            data = b"".join(blocks)
    except OSError as error:
        return [f"(cannot read this log: {error.strerror})"], 0
    whole, newline, rest = data.rpartition(b"\n")
    lines = whole.split(b"\n") if newline else []
    kept = deque(lines if begin == 0 else lines[1:], maxlen=count)
    return [_decoded(line) for line in kept], end - len(rest)


def new_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """The complete lines after `offset`, and the new offset."""
    try:
        with reading.open_stream(path) as stream:
            if stream.seek(0, os.SEEK_END) < offset:
                # The log was truncated.
                offset = 0
            stream.seek(offset)
            data = stream.read(MOST_BYTES)
    except OSError:
        return [], offset
    if len(data) == MOST_BYTES and b"\n" not in data:
        # One line is longer than the read limit: show its beginning and skip the rest of what was read.
        data = data[:LINE_BYTES] + b"\n"
        return [_decoded(data[:-1])], offset + MOST_BYTES
    whole, newline, _ = data.rpartition(b"\n")
    return [_decoded(line) for line in whole.split(b"\n")] if newline else [], offset + len(whole) + len(
        newline
    )


def _decoded(line: bytes) -> str:
    if len(line) > LINE_BYTES:
        # A progress bar overwrites itself, so only the end of the line matters.
        return f"({len(line) - LINE_BYTES} bytes) ... {fit_for_terminal(line[-LINE_BYTES:].decode('utf-8', errors='replace'))}"
    return fit_for_terminal(line.decode("utf-8", errors="replace"))
