"""The event journal: one JSONL file for each incarnation, with all transitions, decisions and timings. For people and scripts.

`Journal` writes one, `JournalReader` reads one as it grows, and an `Event` is a checked line.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from fsbarrier.protocol.facts import Payload
from fsbarrier.rundir.names import JOURNAL
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.store import files, reading
from fsbarrier.wording import without_passwords

#: the bytes that a reader reads at a time, and the longest line that it does not skip
BLOCK_BYTES = 1024 * 1024
LINE_BYTES = reading.LINE_BYTES
#: Lines longer than USUAL_BYTES may take UNUSUAL_BYTES together, since an event takes many times its line's length in memory.
USUAL_BYTES, UNUSUAL_BYTES = 8 << 10, 16 << 20

#: frequent events; only their times matter, and in a long run only the newest ones
FREQUENT = frozenset({"phase_started", "phase_finished", "work_finished", "iteration_finished", "decision"})
#: the events that a daemon writes itself, with fields that other code relies on; a program's result may contain none of them
OWN = FREQUENT | {
    "code_changed",
    "generation_proposed",
    "generation_sealed",
    "generation_started",
    "left_generation",
    "node_ended",
    "node_joined",
    "node_lost",
    "node_recovered",
    "node_suspected",
    "tracker_failed",
    "work_failed",
}
_decode = json.JSONDecoder().decode
#: the beginning of the name of a rare event in a line
_RARE = re.compile(rb'"event": ?"(?!(?:%s)")' % "|".join(sorted(FREQUENT)).encode())

#: the required fields of an event, beside its times and its name
_PLACE = itemgetter("node_rank", "generation", "iteration", "phase")
_MOST = 2**53

#: an event's unchecked fields by name
Fields = Mapping[str, object]

#: the longest texts and the longest other values of a decision that are written in full
MOST_TEXT, MOST_LIST = 400, 100
#: values of a decision that are left out because they are empty, and the names of values that `phase_finished` has already
EMPTY: tuple[object, ...] = (None, "", [], {}, ())
TIMES = frozenset({"engine_s", "start_s", "load_s", "save_s"})


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a journal.

    `at`: seconds since 1970 by the writer's wall clock, only for display. `mono_s`: the time by its monotonic clock; only times of the same
    journal can be subtracted. `fields`: the whole line. A file may contain anything, so an event's own fields are read with `number`,
    `integer`, `text` and `lines`.
    """

    name: str
    at: float
    mono_s: float
    node_rank: int
    generation: int
    iteration: int
    phase: int
    phase_name: str
    fields: Fields = field(default_factory=dict)

    @property
    def row(self) -> tuple[int, int, int]:
        """The writer's position: generation, iteration, phase."""
        return self.generation, self.iteration, self.phase

    @property
    def waits(self) -> bool:
        """Whether the writer entered a row in which it has no work."""
        return self.name == "phase_started" and self.fields.get("waits") is True

    def number(self, name: str) -> float | None:
        return number(self.fields, name)

    def integer(self, name: str) -> int | None:
        return integer(self.fields, name)

    def text(self, name: str) -> str:
        return text(self.fields, name)

    def lines(self, name: str) -> tuple[str, ...]:
        return lines(self.fields, name)


def parse(value: object) -> Event | None:
    """The event in a JSON value; None if it is not an event."""
    if not isinstance(value, dict):
        return None
    name, at, mono_s = value.get("event"), _seconds_since_1970(value.get("time")), number(value, "mono_s")
    if not isinstance(name, str) or at is None or mono_s is None:
        return None
    try:
        place = rank, generation, iteration, phase = _PLACE(value)
    except KeyError:
        return None
    for part in place:
        # Inlined from `integer`, since a report does this a million times.
        if type(part) is not int or not 0 <= part < _MOST:
            return None
    phase_name = text(value, "phase_name")
    return Event(name, at, mono_s, rank, generation, iteration, phase, phase_name, value)


def number(fields: Fields, name: str) -> float | None:
    """The field as a finite number, else None."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def integer(fields: Fields, name: str) -> int | None:
    """The field as an integer of reasonable size, else None."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST else None


def text(fields: Fields, name: str) -> str:
    """The field as a text, else ""."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def lines(fields: Fields, name: str) -> tuple[str, ...]:
    """The field as a list of texts, else ()."""
    value = fields.get(name)
    return tuple(map(str, value)) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node in a `node_lost` event. `log`: its last log lines."""

    node_rank: int | None
    host: str
    why: str
    beat_age_s: float | None
    log: tuple[str, ...]


def lost_nodes(event: Event) -> list[LostNode]:
    """The nodes in a `node_lost` event."""
    lost = event.fields.get("lost")
    return [
        LostNode(
            integer(node, "node_rank"),
            text(node, "host"),
            text(node, "why"),
            number(node, "beat_age_s"),
            lines(node, "log"),
        )
        for node in (lost if isinstance(lost, list) else ())
        if isinstance(node, Mapping)
    ]


def _seconds_since_1970(time: object) -> float | None:
    """An ISO 8601 time in seconds; a time without a zone counts as UTC."""
    if not isinstance(time, str):
        return None
    try:
        parsed = datetime.fromisoformat(time)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


# --- reading --------------------------------------------------------------------------------------------------------------


class JournalReader:
    """Reads one journal as it grows.

    `newest_bytes`: how much of the file's end is read completely at first; None: the whole file. Before that part only the rare events are
    read, and only if `with_past`.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None, *, with_past: bool = True) -> None:
        self.path = path
        #: why it cannot be read; "" if it can
        self.fault = ""
        self._newest_bytes, self._with_past = newest_bytes, with_past
        #: whether frequent events were left out
        self.shortened = False
        self._offset = 0
        self._unfinished = b""
        self._unusual = 0

    def read(self) -> Iterator[Event]:
        """The new events since the last call. Torn and foreign lines are skipped. Never raises."""
        try:
            with reading.open_stream(self.path, reading.JOURNAL_BYTES) as stream:
                if self._newest_bytes is not None:
                    yield from self._past(stream, os.fstat(stream.fileno()).st_size - self._newest_bytes)
                    self._newest_bytes = None
                stream.seek(self._offset)
                while lines := self._lines(stream, BLOCK_BYTES):
                    yield from filter(None, map(self._parse, lines.split(b"\n")))
        except reading.NotPlain as error:
            self.fault = f"{self.path} is not read: {error.strerror}"
        except OSError:
            return

    def _past(self, stream: BinaryIO, end: int) -> Iterator[Event]:
        """The rare events before byte `end`, if the caller wants them."""
        self.shortened = end > 0
        if end > 0 and not self._with_past:
            # Byte `end` may be in the middle of a line, which is skipped.
            self._offset, self._unfinished = end, b"-"
        while self._offset < end:
            block = self._lines(stream, min(BLOCK_BYTES, end - self._offset))
            for rare in _RARE.finditer(block):
                begin, after = block.rfind(b"\n", 0, rare.start()) + 1, block.find(b"\n", rare.end())
                event = self._parse(block[begin : after if after >= 0 else None])
                if event is not None:
                    yield event

    def _lines(self, stream: BinaryIO, most: int) -> bytes:
        """The next whole lines, without the last newline; empty at the end. An incomplete line waits for the next call. Raises OSError."""
        whole_lines = b""
        while not whole_lines and (block := stream.read(most)):
            self._offset += len(block)
            whole_lines, newline, rest = block.rpartition(b"\n")
            whole_lines, self._unfinished = (
                (self._unfinished + whole_lines, rest) if newline else (b"", self._unfinished + rest)
            )
            if len(self._unfinished) > LINE_BYTES:
                self._unfinished = b""
        return whole_lines

    def _parse(self, line: bytes) -> Event | None:
        if len(line) > USUAL_BYTES:
            self._unusual += len(line)
            if len(line) > LINE_BYTES or self._unusual > UNUSUAL_BYTES:
                self.fault = f"{self.path} has events that are too long, which are not shown"
                return None
        try:
            return parse(_decode(line.decode()))
        except (ValueError, RecursionError):
            return None


def journal_files(log_path: Path) -> list[Path]:
    """The journals of a run; none if their folder cannot be listed."""
    folder = RunPaths(log_path).events
    return [folder / name for name in sorted(LenientStore().names(folder)) if JOURNAL.parse(name) is not None]


def read_events(log_path: Path) -> list[Event]:
    """All events of a run in the order of their wall-clock times, for display."""
    events = [event for path in journal_files(log_path) for event in JournalReader(path).read()]
    return sorted(events, key=lambda event: event.at)


# --- writing --------------------------------------------------------------------------------------------------------------


class Journal:
    """Appends the events of one daemon, without flushing them to the disk. Only the last line may be torn.

    `incarnation`: the one in the file's name. A frequent event includes its incarnation only if it is a later one.
    """

    def __init__(self, path: Path, *, run_id: str, node_rank: int, incarnation: int) -> None:
        files.try_to_make_dirs(path.parent)
        self._fd = files.open_append(path)
        self._run_id, self._node_rank, self._incarnation = run_id, node_rank, incarnation
        # The end of the last whole line, and whether an incomplete line may follow it.
        self._end, self._torn = os.fstat(self._fd).st_size, False

    def write(self, name: str, mono_s: float, place: Payload, fields: Payload) -> Event:
        """Write an event and return it. `place` has incarnation, generation, iteration, phase and phase_name."""
        now = datetime.now(UTC)
        standard = {
            "time": f"{now:%Y-%m-%dT%H:%M:%S.%f}Z",
            "mono_s": round(mono_s, 4),
            "run_id": self._run_id,
            "node_rank": self._node_rank,
            **place,
            "event": name,
        }
        # The standard fields come last again, because `fields` may come from a user's program and must not replace them.
        line = {**standard, **{key: rounded(value) for key, value in fields.items()}, **standard}
        if name in FREQUENT and line["incarnation"] == self._incarnation:
            del line["incarnation"]
        text = without_passwords(json.dumps(line, separators=(",", ":"), default=str))
        self._append(text.encode() + b"\n")
        row = place["generation"], place["iteration"], place["phase"], place["phase_name"]
        return Event(name, now.timestamp(), mono_s, self._node_rank, *row, fields=line)

    def _append(self, line: bytes) -> None:
        """Append a line. A full disk may take only its beginning, which is removed before the next line is written. Raises OSError."""
        if self._torn:
            os.ftruncate(self._fd, self._end)
        self._torn = True
        files.write_all(self._fd, line)
        self._end, self._torn = self._end + len(line), False

    def close(self) -> None:
        os.close(self._fd)


def rounded(value: object) -> object:
    """The value with all floats rounded to six significant digits."""
    match value:
        case float() if math.isfinite(value):
            return float(f"{value:.6g}")
        case list() | tuple():
            return [rounded(item) for item in value]
        case dict():
            return {name: rounded(item) for name, item in value.items()}
        case _:
            return value


def summary(value: Payload, lines: Sequence[Payload]) -> dict[str, object]:
    """A decision for the journal. It leaves out empty values and values in the row's other `lines` or its `phase_finished`, and shows long
    lists and texts only by their size."""
    elsewhere = {(name, v) for line in lines for name, v in line.items() if isinstance(v, Hashable)}
    rest = {
        name: v
        for name, v in value.items()
        if v not in EMPTY and name not in TIMES and not (isinstance(v, Hashable) and (name, v) in elsewhere)
    }
    return {
        k: v
        if len(str(v)) <= (MOST_TEXT if isinstance(v, str) else MOST_LIST)
        else f"<{type(v).__name__} of {len(v)}>"
        for k, v in rest.items()
    }
