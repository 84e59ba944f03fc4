"""What a reader sees of files that other nodes replace under it: whole ones, and never an older one than before?"""

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
    """Make the file that the others will read. Raises OSError."""
    files.make_dirs(meeting.session / "readers")
    _write(meeting, 0)


def read_others(meeting: Meeting) -> Reading:
    """Replace one's own file again and again while reading the others'."""
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
    # Its length changes from one to the next, so that a mixture of two is found out.
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
    """What all readers saw together."""
    name, every = "replace under readers", [astuple(node.reading) for node in findings.values()]
    total = Reading(*map(sum, zip(*every, strict=True)))
    finding = (
        f"{total.reads} reads of files that others replaced: {total.torn} torn, {total.missing} missing, "
        f"{total.backwards} older than before"
    )
    if total.torn or total.backwards:
        return Check(name, WARNING, finding, "records carry digests and are read again: slower")
    return Check(name, NOTE if total.missing else OK, finding)
