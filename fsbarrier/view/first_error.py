"""`fsbarrier logs --first-error`: the first failure of a run on any node, with its context."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsbarrier.processes import failure_reason
from fsbarrier.rundir.journal import Event
from fsbarrier.store import reading
from fsbarrier.view.event_wording import event_line, log_lines
from fsbarrier.wording import printable

#: Show events of all nodes within this many seconds of the failure, and at most this many before and after it.
AROUND_S, AROUND = 10.0, 8
#: Lines of the program's log to show: at most this many before the line with the reason, starting at its traceback, and some after it.
BEFORE, AFTER = 40, 5
#: How much of the end of a log is searched.
SEARCHED_BYTES = 16 << 20
_LOG_NAME = re.compile(r"^\(from (.+)\)$")
#: Header line that each start of a program writes to its log (processes/supervisor.py).
_START = re.compile(r"^--- \S+ start ")


def first_error(events: Sequence[Event], logs: Path) -> list[str]:
    """The lines to show; [] if nothing has failed. `events`: sorted by time; `logs`: the run's log folder."""
    failed = next((event for event in events if _is_failure(event)), None)
    if failed is None:
        return []
    shown = [event for event in events if abs(event.at - failed.at) <= AROUND_S and event_line(event)]
    # Several nodes report the same loss. Keep only the first report.
    before = [event for event in shown if event.at <= failed.at and event is not failed][-AROUND:]
    after = [event for event in shown if event.at > failed.at][:AROUND]
    lines = ["the first failure:", *_indented(log_lines(failed))]
    if tail := _in_the_log(failed, logs):
        lines += ["", *tail]
    lines += ["", "events around it, on all nodes:"]
    lines += _indented(f"node {event.node_rank}: {event_line(event)}" for event in (*before, failed, *after))
    return lines


def _is_failure(event: Event) -> bool:
    ended = event.name == "node_ended" and event.text("state") == "broken"
    return ended or event.name in ("work_failed", "node_lost")


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _in_the_log(failed: Event, logs: Path) -> list[str]:
    """The error in the failed program's log, if the event names a log of this run."""
    name = next((match[1] for line in failed.lines("log") if (match := _LOG_NAME.match(line))), None)
    if name is None or logs.resolve() not in Path(name).resolve().parents:
        return []
    try:
        with reading.open_stream(Path(name)) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - SEARCHED_BYTES))
            lines = stream.read(SEARCHED_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return [f"cannot read {name}: {error.strerror}"]
    # Skip earlier starts of the program.
    begin = max((number for number, line in enumerate(lines) if _START.match(line)), default=-1) + 1
    why = failure_reason.cause(lines[begin:])
    at = max(
        (number for number, line in enumerate(lines[begin:], begin) if why and why in line), default=None
    )
    if at is None:
        return []
    first = max(begin, at - BEFORE)
    traceback = [number for number in range(first, at) if failure_reason.TRACEBACK in lines[number]]
    part = lines[max(first, (traceback or [at])[-1] - 5) : at + AFTER]
    return [f"the error in {name}:", *_indented([printable(line) for line in part])]
