"""`fsbarrier debug`: a request in the shared directory that every daemon answers with a file, and the archive of the answers.

A request is a file beside the requests to stop, which the daemons list anyway. Its name contains its key, so nobody reads it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files, reading
from fsbarrier.host.identity import user_at_host
from fsbarrier.printable import without_passwords
from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import live_nodes, read_beats
from fsbarrier.rundir.names import ATTEMPT_FOLDER, DEBUG_ANSWER, DEBUG_REQUEST, JOURNAL, NODE_FOLDER, START
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

#: How long live nodes may take to answer. They list the requests every few seconds, and each part of an answer has a time limit.
ANSWER_S = 60.0
LOOK_S = 0.1
#: the size of the end of each log and journal, and of the beginning of an answer, in the archive
TAIL_BYTES, ANSWER_BYTES = 256 * 1024, 16 * 1024 * 1024


def request(paths: RunPaths) -> str:
    """Ask all nodes for an answer; returns the request's key, the next number. Raises OSError."""
    PosixStore().make_dir(paths.stops)
    number = 1 + sum(key.isdecimal() for key in DEBUG_REQUEST.parse_all(PosixStore().names(paths.stops)))
    while not request_as(paths, key := f"{number:06d}"):
        number += 1
    return key


def request_as(paths: RunPaths, key: str) -> bool:
    """Ask all nodes for an answer under `key`; False if that request exists already. Raises OSError."""
    asked = {"who": user_at_host(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    return files.create_exclusive(paths.debug_request(key), json.dumps(asked).encode(), never_torn=True)


def answered(paths: RunPaths, key: str) -> set[int]:
    """The ranks that have answered. Raises OSError."""
    found = DEBUG_ANSWER.parse_all(PosixStore().names(paths.debug))
    return {answer.rank for answer in found if answer.key == key}


def wait_for_answers(paths: RunPaths, key: str, ranks: Iterable[int], within_s: float = ANSWER_S) -> set[int]:
    """Wait until these nodes have answered; returns those that have not in time. Raises OSError."""
    awaited, pause, deadline = set(ranks), threading.Event(), time.monotonic() + within_s
    while (missing := awaited - answered(paths, key)) and time.monotonic() < deadline:
        pause.wait(LOOK_S)
    return missing


def collect(paths: RunPaths, key: str, watch_s: float, out: Path) -> list[Beat]:
    """Wait for the answers of all live nodes, and write the archive. A node whose heartbeat does not move for `watch_s` is not waited for.

    Returns the last heartbeats of the nodes that have neither answered nor ended. Raises OSError.
    """
    alive = live_nodes(paths.root, watch_s)
    wait_for_answers(paths, key, (beat.rank for beat in alive))
    there = answered(paths, key)
    silent = [b for b in read_beats(paths.root).values() if b.rank not in there and b.state not in GONE]
    lines = [f"node {rank} answered" for rank in sorted(there)]
    lines += [f"node {beat.rank} on {beat.host} (pid {beat.pid}) did not answer" for beat in silent]
    write_archive(paths, key, out, "".join(f"{line}\n" for line in lines))
    return silent


def write_archive(paths: RunPaths, key: str, out: Path, summary: str) -> None:
    """Put `summary`, the answers, the ends of the logs and journals, and the last heartbeats into `out`, which only this user may read.

    Only plain files with one name are included, no link is followed, and passwords in addresses are removed. Raises OSError.
    """
    temporary = files.temporary_beside(out)
    try:
        with os.fdopen(files.open_new(temporary), "wb") as stream:
            os.fchmod(stream.fileno(), 0o600)
            with tarfile.open(fileobj=stream, mode="w:gz") as archive:
                _add(archive, f"debug-{key}/nodes.txt", summary)
                for path in _files_for_archive(paths, key):
                    name = f"debug-{key}/{path.relative_to(paths.root)}"
                    _add(archive, name, _text_of(paths, path))
        files.rename(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = without_passwords(text).encode(errors="replace")
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(data))


def _files_for_archive(paths: RunPaths, key: str) -> Iterator[Path]:
    """The files for the archive; of each node the logs, journals and heartbeats of its newest start."""
    names = PosixStore().names
    for rank in sorted(answered(paths, key)):
        yield paths.debug_answer(key, rank)
    newest = dict[int, int]()
    for attempt in sorted(ATTEMPT_FOLDER.parse_all(names(paths.logs))):
        folder = paths.logs / ATTEMPT_FOLDER.build(attempt)
        newest |= dict.fromkeys(NODE_FOLDER.parse_all(names(folder)), attempt)
    for rank, attempt in sorted(newest.items()):
        folder = paths.node_logs(attempt, rank)
        yield from (folder / name for name in sorted(names(folder)) if name.endswith(".log"))
    for folder, kind in ((paths.events, JOURNAL), (paths.beats, START)):
        starts = {start.rank: start for start in sorted(kind.parse_all(names(folder)))}
        yield from (folder / kind.build(start.rank, start.incarnation) for start in starts.values())


def _text_of(paths: RunPaths, path: Path) -> str:
    """The end of a file (the beginning of an answer), or why it cannot be read."""
    try:
        with os.fdopen(reading.open_below(paths.root, path), "rb") as stream:
            if os.fstat(stream.fileno()).st_nlink > 1:
                return "(not collected: it has a second name, a hard link, and may be a file from outside the run)\n"
            if path.parent == paths.debug:
                return stream.read(ANSWER_BYTES).decode(errors="replace")
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(not collected: {error.strerror})\n"
