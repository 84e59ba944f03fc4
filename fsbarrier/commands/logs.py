"""`fsbarrier logs`: the last lines of the nodes' logs, or new ones as they come."""

from __future__ import annotations

import argparse
import os
import re
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.commands import flags
from fsbarrier.errors import UsageError
from fsbarrier.rundir.names import ATTEMPT_FOLDER, NODE_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import load

SUMMARY = "Show the last lines of the nodes' logs (each node's newest start), or follow them."
EXAMPLE = "fsbarrier logs --node 2 --file vllm -n 100"

LOOK_S = 0.5  # how often new lines and new files are looked for while following
BLOCK = 64 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_log_path(parser)
    parser.add_argument("--node", metavar="R", type=flags.whole_number, help="only this node's")
    parser.add_argument("--file", metavar="NAME", help="only this log: daemon, vllm, rollout, update, ...")
    parser.add_argument(
        "--attempt", metavar="A", type=flags.whole_number, help="of this start of the node, not the newest"
    )
    parser.add_argument(
        "-n", "--lines", metavar="N", type=flags.whole_number, default=20, help="lines of each (default 20)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")


@dataclass(frozen=True)
class Log:
    """One log file of one start of a node."""

    node: int
    attempt: int
    path: Path

    @property
    def label(self) -> str:
        return f"[node {self.node} {self.path.stem}]"


def main(args: argparse.Namespace) -> int:
    log_path = flags.find_log_path(args)
    load(log_path)
    logs = find(log_path, node=args.node, attempt=args.attempt, name=args.file)
    if not logs and not args.follow:
        asked = [f"--node {args.node}"] * (args.node is not None) + [f"--file {args.file}"] * (
            args.file is not None
        )
        asked += [f"--attempt {args.attempt}"] * (args.attempt is not None)
        raise UsageError(
            f"{' '.join(asked) or '--log-path ' + str(log_path)}: no such logs below {RunPaths(log_path).logs}"
        )
    offsets: dict[Path, int] = {}
    for log in logs:
        lines, offsets[log.path] = last_lines(log.path, args.lines)
        for line in lines:
            print(log.label, line)
    while args.follow:  # until Ctrl-C
        for log in find(log_path, node=args.node, attempt=args.attempt, name=args.file):
            lines, offsets[log.path] = new_lines(log.path, offsets.get(log.path, 0))
            for line in lines:
                print(log.label, line, flush=True)
        threading.Event().wait(LOOK_S)
    return 0


def find(log_path: Path, *, node: int | None, attempt: int | None, name: str | None) -> list[Log]:
    """The logs that are asked for, by node and name."""
    found: dict[tuple[int, str], Log] = {}
    for folder in RunPaths(log_path).logs.glob("*/*"):
        this_attempt = ATTEMPT_FOLDER.parse(folder.parent.name)
        this_node = NODE_FOLDER.parse(folder.name)
        if this_attempt is None or this_node is None:
            continue
        if (node is not None and this_node != node) or (attempt is not None and this_attempt != attempt):
            continue
        for path in folder.glob("*.log"):
            key = (this_node, path.stem)
            if name in (None, path.stem, path.name) and (
                key not in found or found[key].attempt < this_attempt
            ):
                found[key] = Log(this_node, this_attempt, path)
    newest = {
        log.node: max(other.attempt for other in found.values() if other.node == log.node)
        for log in found.values()
    }
    return [found[key] for key in sorted(found) if found[key].attempt == newest[key[0]]]


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole lines of a file, and the offset behind them. Reads from the end: logs grow large."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            begin, data = end, b""
            while begin > 0 and data.count(b"\n") <= count:
                begin = max(0, begin - BLOCK)
                stream.seek(begin)
                data = stream.read(end - begin)
    except OSError as error:
        return [f"(cannot be read: {error.strerror})"], 0
    whole, newline, rest = data.rpartition(b"\n")
    lines = whole.split(b"\n") if newline else []
    kept = deque(lines if begin == 0 else lines[1:], maxlen=count)
    return [_text(line) for line in kept], end - len(rest)


def new_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """The whole lines behind `offset`, and the new offset."""
    try:
        with path.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < offset:
                offset = 0  # somebody cut the log
            stream.seek(offset)
            data = stream.read()
    except OSError:
        return [], offset
    whole, newline, _ = data.rpartition(b"\n")
    return [_text(line) for line in whole.split(b"\n")] if newline else [], offset + len(whole) + len(newline)


def _text(line: bytes) -> str:
    """A line fit for a terminal; of a progress bar its last state."""
    last = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]", "", last)
