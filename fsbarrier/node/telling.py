"""What a daemon tells about its events: one line each in plain words, and the evidence below the bad ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsbarrier.view.words import event_line

AGAIN = "again: "  # how the reason of a generation begins that tries a failed program once more


def told(line: Mapping[str, Any]) -> list[str]:
    """The lines for the console and the daemon's log; [] where an event is not worth any."""
    text = event_line(line)
    return [text, *(f"  | {detail}" for detail in _evidence(line))] if text else []


def _evidence(line: Mapping[str, Any]) -> Iterator[str]:
    match line["event"]:
        case "node_lost":
            for item in line["lost"]:
                if item.get("beat_age_s") is not None:
                    yield f"node {item['node_rank']}: last heartbeat seen {item['beat_age_s']:.1f} s ago"
                yield from (f"node {item['node_rank']}: {words}" for words in item.get("log", ()))
        case "work_failed":
            yield from line.get("log", ())
        case "generation_started" if line["reason"].startswith(AGAIN):
            yield line["reason"].removeprefix(AGAIN)
