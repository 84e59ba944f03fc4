"""`fsbarrier logs --first-error`: the first failure of a run on any node, with its context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsbarrier.rundir.journal import Event
from fsbarrier.view.event_wording import event_line, log_lines

#: Show events of all nodes within this many seconds of the failure, and at most this many before and after it.
AROUND_S, AROUND = 10.0, 8


def first_error(events: Sequence[Event]) -> list[str]:
    """The lines to show; [] if nothing has failed. `events`: sorted by time."""
    failed = next((event for event in events if _is_failure(event)), None)
    if failed is None:
        return []
    shown = [event for event in events if abs(event.at - failed.at) <= AROUND_S and event_line(event)]
    # Several nodes report the same loss. Keep only the first report.
    before = [event for event in shown if event.at <= failed.at and event is not failed][-AROUND:]
    after = [event for event in shown if event.at > failed.at][:AROUND]
    lines = ["the first failure:", *_indented(log_lines(failed))]
    lines += ["", "events around it, on all nodes:"]
    lines += _indented(f"node {event.node_rank}: {event_line(event)}" for event in (*before, failed, *after))
    return lines


def _is_failure(event: Event) -> bool:
    ended = event.name == "node_ended" and event.text("state") == "broken"
    return ended or event.name in ("work_failed", "node_lost")


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
