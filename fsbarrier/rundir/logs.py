"""Reads the ends of logs, safe for a terminal: of a failed program or a lost node, and, with the lines that follow, for the commands."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.rundir.names import ATTEMPT_FOLDER, NODE_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import reading
from fsbarrier.wording import printable

TAIL_BYTES = 64 * 1024
# how many of the last lines of a failed program's log are shown
SHOWN_LINES = 20
#: polling interval for new lines and new files while following
LOOK_S = 0.5
#: the most bytes of a log that are read at once, and the most that are shown of a line (its end)
MOST_BYTES, LINE_BYTES = 16 << 20, 64 << 10


def fit_for_terminal(line: str) -> str:
    """A log line without control characters. A progress bar is reduced to its last state."""
    last_state = line.rstrip("\r").rpartition("\r")[2]
    return printable(last_state)


def last_lines(path: Path, lines: int, begin: int = 0) -> list[str]:
    """The last lines of a log after its first `begin` bytes, from at most the last 64 KiB. Never raises."""
    try:
        with reading.open_stream(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            # If the log is shorter than it was, it has been truncated.
            begin = begin if begin <= size else 0
            cut = stream.seek(max(begin, size - TAIL_BYTES))
            rows = stream.read(TAIL_BYTES).decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        return [f"(cannot read {path}: {error.strerror})"]
    if cut > begin and len(rows) > 1:
        # The first line is incomplete.
        del rows[0]
    rows = [fit_for_terminal(row).rstrip() for row in rows]
    return [row for row in rows if row][-lines:] if lines > 0 else []


def log_folders(paths: RunPaths) -> dict[int, Path]:
    """Node rank -> the log folder of its newest start. A node that rejoined by itself keeps its first folder."""
    folders = dict[int, Path]()
    for number in sorted(ATTEMPT_FOLDER.parse_all(_folders(paths.logs))):
        of_nodes = _folders(paths.logs / ATTEMPT_FOLDER.build(number))
        folders |= {rank: paths.node_logs(number, rank) for rank in NODE_FOLDER.parse_all(of_nodes)}
    return dict(sorted(folders.items()))


def _folders(parent: Path) -> list[str]:
    """The names of the folders in a folder. Links are left out, since they could lead out of the run directory."""
    try:
        with os.scandir(parent) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def last_lines_of_node(paths: RunPaths, rank: int, incarnation: int, lines: int = 3) -> list[str]:
    """The last lines of a node's daemon and its newest program, each with its log's name. Never raises.

    A daemon that rejoined keeps the log folder of its first incarnation.
    """
    try:
        attempts = sorted(ATTEMPT_FOLDER.parse_all(path.name for path in paths.logs.iterdir()), reverse=True)
        folders = [paths.node_logs(attempt, rank) for attempt in attempts if attempt <= incarnation]
        folder = next(folder for folder in folders if folder.is_dir())
        reading.check_below(paths.root, folder)
        written = {path.stat().st_mtime_ns: path for path in folder.glob("*.log")}
    except (OSError, StopIteration):
        return []
    daemon = folder / "daemon.log"
    newest = [written[stamp] for stamp in sorted(written) if written[stamp] != daemon][-1:]
    return [f"{path.name}: {line}" for path in (*newest, daemon) for line in last_lines(path, lines)]


@dataclass(frozen=True, slots=True)
class Log:
    """A log file, and the prefix of each printed line."""

    label: str
    path: Path


def show(logs: Callable[[], Sequence[Log]], count: int, follows: Callable[[], bool]) -> None:
    """Print the last `count` lines of each log, then new lines and new logs as long as `follows`."""
    offsets: dict[Path, int] = {}
    pause, first = threading.Event(), True
    while True:
        # Ask before reading the logs: if a program ends in between, its last output is still read.
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
        # The beginning of this line was not read.
        del lines[0]
    return [_decoded(line) for line in lines], begin + len(data) - len(rest)


def _decoded(line: bytes) -> str:
    cut = f"({len(line) - LINE_BYTES} bytes) ... " if len(line) > LINE_BYTES else ""
    # A progress bar overwrites itself, so only the end of the line matters.
    return cut + fit_for_terminal(line[-LINE_BYTES:].decode("utf-8", errors="replace"))


def find_logs(
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
