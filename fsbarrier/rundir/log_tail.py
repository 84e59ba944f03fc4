"""The last log lines of a failed program or a lost node, safe for a terminal."""

from __future__ import annotations

import os
from pathlib import Path

from fsbarrier.rundir.names import ATTEMPT_FOLDER, NODE_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import reading
from fsbarrier.wording import printable

TAIL_BYTES = 64 * 1024
# how many of the last lines of a failed program's log are shown
SHOWN_LINES = 20


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
