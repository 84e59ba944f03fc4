"""The event journal: one JSONL file an incarnation, every transition and decision, with timings. For people and scripts.

`Journal` writes one, `JournalReader` reads one as it grows, and `Event` is what a line is once it was checked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files, reading
from fsbarrier.printable import without_passwords
from fsbarrier.protocol.facts import Payload
from fsbarrier.rundir.names import JOURNAL
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore

#: Bytes of one journal that a reader takes at a time. It skips a longer line.
BLOCK_BYTES = reading.LINE_BYTES

#: An event's own fields, unchecked: values of any type, by name.
Fields = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a journal.

    `at` is in seconds since 1970 by the writer's wall clock, and only for display. `mono_s` is by the monotonic clock that
    `clock` names: times of one such clock can be subtracted from each other, times of two cannot. `fields` is the whole line;
    an event's own fields are read with `number`, `integer`, `text` and `lines`, since anything may stand in a file.
    """

    name: str
    at: float
    mono_s: float
    node_rank: int
    generation: int
    iteration: int
    phase: int
    phase_name: str
    clock: str = ""
    fields: Fields = field(default_factory=dict)

    @property
    def row(self) -> tuple[int, int, int]:
        """Where its writer was in the run: generation, iteration, phase."""
        return self.generation, self.iteration, self.phase

    def number(self, name: str) -> float | None:
        return number(self.fields, name)

    def integer(self, name: str) -> int | None:
        return integer(self.fields, name)

    def text(self, name: str) -> str:
        return text(self.fields, name)

    def lines(self, name: str) -> tuple[str, ...]:
        return lines(self.fields, name)


def parse(value: object, clock: str = "") -> Event | None:
    """The event in a journal's JSON value; None for anything that is no event."""
    if not isinstance(value, Mapping):
        return None
    name, at, mono_s = value.get("event"), _seconds_since_1970(value.get("time")), number(value, "mono_s")
    if not isinstance(name, str) or at is None or mono_s is None:
        return None
    whole = [integer(value, key) for key in ("node_rank", "generation", "iteration", "phase")]
    if any(one is None or one < 0 for one in whole):
        return None
    rank, generation, iteration, phase = (one or 0 for one in whole)
    phase_name = text(value, "phase_name")
    return Event(name, at, mono_s, rank, generation, iteration, phase, phase_name, clock, value)


def number(fields: Fields, name: str) -> float | None:
    """A finite number among the fields, else None."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def integer(fields: Fields, name: str) -> int | None:
    """A whole number of reasonable size among the fields, else None."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def text(fields: Fields, name: str) -> str:
    """A text among the fields, else an empty one."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def lines(fields: Fields, name: str) -> tuple[str, ...]:
    """A list among the fields as texts, else none."""
    value = fields.get(name)
    return tuple(map(str, value)) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class LostNode:
    """One of the nodes that a `node_lost` names. `log`: what it wrote last."""

    node_rank: int | None
    host: str
    why: str
    beat_age_s: float | None
    log: tuple[str, ...]


def lost_nodes(event: Event) -> list[LostNode]:
    """The nodes that a `node_lost` names."""
    named = event.fields.get("lost")
    return [
        LostNode(
            integer(one, "node_rank"),
            text(one, "host"),
            text(one, "why"),
            number(one, "beat_age_s"),
            lines(one, "log"),
        )
        for one in (named if isinstance(named, list) else ())
        if isinstance(one, Mapping)
    ]


def _seconds_since_1970(time: object) -> float | None:
    """Of an ISO 8601 time; one that names no zone is taken for UTC."""
    if not isinstance(time, str):
        return None
    try:
        parsed = datetime.fromisoformat(time)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


# --- reading --------------------------------------------------------------------------------------------------------------


class JournalReader:
    """Reads one journal as it grows. It alone decides how much of the file is read.

    `clock` names the monotonic clock of the journal's writer, for its events.
    """

    def __init__(self, path: Path, clock: str = "") -> None:
        self.path = path
        self.clock = clock
        #: why it is not read at all; "" where it is
        self.fault = ""
        self._offset = 0
        self._unfinished = b""

    def read(self) -> list[Event]:
        """The events that came since the last call. A torn or foreign line is passed over; nothing is raised."""
        events: list[Event] = []
        while True:
            try:
                with reading.open_stream(self.path, reading.JOURNAL_BYTES) as stream:
                    stream.seek(self._offset)
                    block = stream.read(BLOCK_BYTES)
            except reading.NotPlain as error:
                self.fault = f"{self.path} is not read: {error.strerror}"
                return events
            except OSError:
                return events
            self._offset += len(block)
            *lines, self._unfinished = (self._unfinished + block).split(b"\n")
            if len(self._unfinished) > BLOCK_BYTES:
                self._unfinished = b""
            events += [event for event in map(self._parse, lines) if event is not None]
            if len(block) < BLOCK_BYTES:
                return events

    def _parse(self, line: bytes) -> Event | None:
        try:
            return parse(json.loads(line), self.clock)
        except (ValueError, RecursionError):
            return None


def journal_files(log_path: Path) -> list[Path]:
    """The journals of a run; none where their folder cannot be listed."""
    folder = RunPaths(log_path).events
    return [folder / name for name in sorted(LenientStore().names(folder)) if JOURNAL.parse(name) is not None]


def read_events(log_path: Path) -> list[Event]:
    """All events of a run, in the order of their wall-clock times (for display: no decision rests on it)."""
    events = [event for path in journal_files(log_path) for event in JournalReader(path).read()]
    return sorted(events, key=lambda event: event.at)


# --- writing --------------------------------------------------------------------------------------------------------------


class Journal:
    """Appends events of one incarnation of one node. Each line is written at once and whole, but not flushed to disk."""

    def __init__(self, path: Path, *, run_id: str, node_rank: int) -> None:
        files.try_to_make_dirs(path.parent)
        self._fd = files.open_append(path)
        self._run_id, self._node_rank = run_id, node_rank

    def write(self, name: str, mono_s: float, place: Payload, fields: Payload) -> Event:
        """Record an event and give it back. `place` has generation, iteration, phase and phase_name."""
        now = datetime.now(UTC)
        line = {
            "time": now.isoformat(timespec="microseconds"),
            "mono_s": round(mono_s, 6),
            "run_id": self._run_id,
            "node_rank": self._node_rank,
            **place,
            "event": name,
            **fields,
        }
        told = without_passwords(json.dumps(line, separators=(",", ":"), default=str))
        os.write(self._fd, told.encode() + b"\n")
        row = place["generation"], place["iteration"], place["phase"], place["phase_name"]
        return Event(name, now.timestamp(), mono_s, self._node_rank, *row, fields=line)

    def close(self) -> None:
        os.close(self._fd)
