"""Tests reading files while other nodes replace them: reads must be complete and never go back to an older version."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import astuple
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor.findings import NOTE, OK, WARNING, Check, Findings, Reading
from fsbarrier.doctor.meeting import Meeting
from fsbarrier.doctor.messages import pack, unpack
from fsbarrier.reading import RECORD_BYTES, read_bytes

READING_S = 1.5
PAUSE_S = 0.002


def prepare(meeting: Meeting) -> None:
    """Create the file that the others will read. Raises OSError."""
    files.make_dirs(meeting.session / "readers")
    _write(meeting, 0)


def read_others(meeting: Meeting) -> Reading:
    """Replace this node's file repeatedly while reading the others' files."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(PAUSE_S):
            number += 1
            with contextlib.suppress(OSError):
                _write(meeting, number)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    others = [_path(meeting, rank) for rank in meeting.members if rank != meeting.rank]
    result, newest, end = Reading(), dict.fromkeys(others, 0), time.monotonic() + READING_S
    while time.monotonic() < end:
        for path in others:
            _read(path, newest, result)
    stop.set()
    writer.join()
    return result


def _path(meeting: Meeting, rank: int) -> Path:
    return meeting.session / "readers" / str(rank)


def _write(meeting: Meeting, number: int) -> None:
    # The length changes between versions, so that a mixture of two is detected.
    content = {"number": number, "filler": str(number % 10) * (4000 + number % 7)}
    files.write_atomic(_path(meeting, meeting.rank), pack(content))


def _read(path: Path, newest: dict[Path, int], result: Reading) -> None:
    result.reads += 1
    try:
        message = unpack(read_bytes(path, RECORD_BYTES))
    except OSError:
        result.missing += 1
        return
    if message is None:
        result.torn += 1
        return
    result.backwards += message["number"] < newest[path]
    newest[path] = max(newest[path], message["number"])


def judge(findings: Findings) -> Check:
    """Judge the reads of all nodes."""
    name, every = "replace under readers", [astuple(node.reading) for node in findings.values()]
    total = Reading(*map(sum, zip(*every, strict=True)))
    finding = (
        f"{total.reads} reads of files that other nodes replaced: {total.torn} torn, {total.missing} missing, "
        f"{total.backwards} stale (older than an earlier read)"
    )
    if total.torn or total.backwards:
        return Check(
            name, WARNING, finding, "safe, because records have digests and are read again, but slower"
        )
    return Check(name, NOTE if total.missing else OK, finding)
