"""The first failure of a run across its nodes, with what surrounds it: `fsbarrier logs --first-error`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsbarrier import reading
from fsbarrier.printable import printable
from fsbarrier.rundir.journal import Event
from fsbarrier.view.event_wording import event_line, log_lines

#: Events of all nodes that are shown: those within so many seconds of the failure, and at most so many on each side.
AROUND_S, AROUND = 10.0, 8
#: How many lines of the program's log are shown before the first line that looks like an error, and from that line on.
BEFORE, AFTER = 5, 30
#: How much of a log is searched, at its end.
SEARCHED_BYTES = 16 << 20
# Where a program's trouble begins. Python's traceback, an exception's last line, what CUDA, NCCL and the kernel print.
_ERROR = re.compile(
    r"^Traceback |\b\w*(?:Error|Exception)\b: |\bERROR\b|\bFATAL\b|out of memory|\bKilled\b|Segmentation fault"
)
_LOG_NAME = re.compile(r"^\(from (.+)\)$")
#: The header that stands before each start of a program in its log (supervision/supervisor.py).
_START = re.compile(r"^--- \S+ start ")


def first_error(events: Sequence[Event], logs: Path) -> list[str]:
    """The lines to show, [] if nothing has failed. `events`: by time; `logs`: the run's folder of logs."""
    failed = next((event for event in events if _is_failure(event)), None)
    if failed is None:
        return []
    shown = [event for event in events if abs(event.at - failed.at) <= AROUND_S and event_line(event)]
    # Every node reports the same loss. The first report is the failure itself, and is not repeated among what came before it.
    before = [event for event in shown if event.at <= failed.at and event is not failed][-AROUND:]
    after = [event for event in shown if event.at > failed.at][:AROUND]
    lines = ["the first failure:", *_indented(log_lines(failed))]
    if found := _in_the_log(failed, logs):
        lines += ["", *found]
    lines += ["", "around it, on all nodes:"]
    lines += _indented(f"node {event.node_rank}: {event_line(event)}" for event in (*before, failed, *after))
    return lines


def _is_failure(event: Event) -> bool:
    ended = event.name == "node_ended" and event.text("state") == "broken"
    return ended or event.name in ("work_failed", "node_lost")


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _in_the_log(failed: Event, logs: Path) -> list[str]:
    """Where the failed program's own log first speaks of an error, if the event names a log of this run."""
    name = next((match[1] for line in failed.lines("log") if (match := _LOG_NAME.match(line))), None)
    if name is None or logs.resolve() not in Path(name).resolve().parents:
        return []
    try:
        with reading.open_stream(Path(name)) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - SEARCHED_BYTES))
            lines = stream.read(SEARCHED_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"{name} cannot be read: {error.strerror}"]
    # Lines of an earlier start of the program are not about this failure.
    begin = max((number for number, line in enumerate(lines) if _START.match(line)), default=0)
    at = next((n for n, line in enumerate(lines) if n > begin and _ERROR.search(line)), None)
    if at is None:
        return []
    part = lines[max(begin, at - BEFORE) : at + AFTER]
    return [f"where {name} first speaks of an error:", *_indented([printable(line) for line in part])]
