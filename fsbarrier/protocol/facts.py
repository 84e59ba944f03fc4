"""The records that nodes leave for each other, and how they are written and read back.

A record is one line of header and one line of JSON. The header carries kind, length and digest, so that a torn, short or empty
file is recognised (invariant I8). Unknown fields are ignored; a newer format version is refused. Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar

MAGIC = "fsbarrier"
FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024
SMALL_BYTES = 8 * 1024

Payload = Mapping[str, Any]


class CorruptRecord(Exception):
    """The bytes are not a whole record of the expected kind; whoever reads treats them as not there yet."""


@dataclass(frozen=True)
class Member:
    """One node of a generation: which start of which rank, and where it runs."""

    rank: int
    incarnation: int
    host: str = ""


@dataclass(frozen=True, order=True)
class Position:
    """Where in the run: iteration from 1, phase as its index in the program's rows."""

    iteration: int
    phase: int


@dataclass(frozen=True)
class Join:
    """A node's start: it exists, here is how to reach it. What it was asked for (the lowest rank's counts): `until`, the last
    iteration; `choices`, the settings that each start may choose anew."""

    rank: int
    incarnation: int
    host: str
    pid: int
    boot_id: str
    addresses: tuple[str, ...] = ()
    until: int | None = None
    version: str = ""
    digest: str = ""
    time: str = ""
    choices: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    """Sign of life. `counter` is all that liveness looks at; the rest is for people."""

    rank: int
    incarnation: int
    counter: int
    host: str
    pid: int
    state: str
    generation: int = 0
    iteration: int = 0
    phase: int = 0
    phase_name: str = ""
    progress: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """How a run ended for every node at once."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Generation:
    """Who takes part from now on, under whom, and from where the run goes on. Number N exists once, for ever.

    `decisions` are adopted by name from older generations: phase name -> {"iteration": i, "value": payload}.
    `attempt` counts the failed tries of `start.iteration`. A `verdict` ends the run.
    """

    number: int
    members: tuple[Member, ...]
    leader: int
    start: Position
    reason: str
    decisions: Mapping[str, Payload] = field(default_factory=dict)
    until: int | None = None
    choices: Payload = field(default_factory=dict)
    attempt: int = 0
    created_by: int = -1
    verdict: Verdict | None = None

    def incarnation_of(self, rank: int) -> int | None:
        """The incarnation that this generation knows `rank` by; None for a stranger."""
        return next((m.incarnation for m in self.members if m.rank == rank), None)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(m.rank for m in self.members)


@dataclass(frozen=True)
class Fact:
    """What one node says about one phase: done or failed, with what came of it."""

    rank: int
    incarnation: int
    status: str  # "done" | "failed"
    value: Payload = field(default_factory=dict)
    work_s: float = 0.0


@dataclass(frozen=True)
class StopRequest:
    """Somebody asked the run to end: at the next safe point, or `now`."""

    now: bool
    who: str
    time: str = ""


Record = Join | Beat | Generation | Fact | StopRequest
R = TypeVar("R", Join, Beat, Generation, Fact, StopRequest)
_KINDS: dict[str, type[Any]] = {
    "join": Join,
    "beat": Beat,
    "generation": Generation,
    "fact": Fact,
    "stop": StopRequest,
}


_NAMES = {cls: name for name, cls in _KINDS.items()}
_ENCODER = json.JSONEncoder(
    separators=(",", ":"), sort_keys=True, default=vars
)  # a nested record is its fields


def encode(record: Record) -> bytes:
    """The bytes of a record's file."""
    kind = _NAMES[type(record)]
    values = record.__dict__
    body = _ENCODER.encode({name: values[name] for name, _, _ in _FIELDS[type(record)]}).encode() + b"\n"
    digest = hashlib.sha256(body).hexdigest()[:32]
    return f"{MAGIC}/{FORMAT} {kind} {len(body)} {digest}\n".encode() + body


def decode(data: bytes, cls: type[R]) -> R:
    """The record in `data`. Raises CorruptRecord for anything but a whole record of this kind."""
    kind = _NAMES[cls]
    record: R = _decode_small(data, kind) if len(data) <= SMALL_BYTES else _decode(data, kind)
    return record


def _decode(data: bytes, expected: str) -> Any:
    try:
        header, body = _split(data)
        kind, length, digest = _parse_header(header)
        if kind != expected:
            raise CorruptRecord(f"a {kind} record where a {expected} was expected")
        if length != len(body) or hashlib.sha256(body).hexdigest()[:32] != digest:
            raise CorruptRecord("torn: length or digest differs")
        return _build(_KINDS[kind], json.loads(body.decode()))
    except CorruptRecord:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise CorruptRecord(f"not a record: {error}") from None


#: the same bytes are read again and again (heartbeats of slow nodes, facts by several readers); records are never changed
_decode_small = lru_cache(maxsize=1024)(_decode)


def _split(data: bytes) -> tuple[bytes, bytes]:
    if len(data) > MAX_BYTES:
        raise CorruptRecord("too long")
    header, newline, body = data.partition(b"\n")
    if not newline:
        raise CorruptRecord("no header")
    return header, body


def _parse_header(header: bytes) -> tuple[str, int, str]:
    fields = header.decode("ascii").split(" ")
    if len(fields) != 4:
        raise CorruptRecord("bad header")
    magic, kind, length, digest = fields
    if magic != f"{MAGIC}/{FORMAT}":
        raise CorruptRecord(f"format {magic!r}; this fsbarrier reads {MAGIC}/{FORMAT}")
    return kind, int(length), digest


# --- from JSON to records ---------------------------------------------------------------------------------------------------

Convert = Callable[[Any], Any]
_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_NONE = type(None)
_LIMIT = 2**62


def _plain(annotation: str) -> Convert:
    """A check that a value has the annotated plain type. JSON's numbers are taken as they are: no bool for an int."""
    base = annotation.removesuffix("| None").strip()
    allowed = (*_PLAIN.get(base, (dict,)), *((_NONE,) if annotation.endswith("| None") else ()))

    def check(value: Any) -> Any:
        if type(value) not in allowed:
            raise CorruptRecord(f"{base} expected, {type(value).__name__} found")
        if type(value) is int and not -_LIMIT < value < _LIMIT:
            raise CorruptRecord("number out of range")
        return value

    return check


def _decisions(value: Any) -> Any:
    for entry in _plain("Mapping")(value).values():
        if type(entry["iteration"]) is not int or not isinstance(entry["value"], dict):
            raise CorruptRecord("not a decision")
    return value


_text = _plain("str")
_NESTED: dict[tuple[str, str], Convert] = {
    ("Generation", "members"): lambda v: tuple(_build(Member, item) for item in v),
    ("Generation", "start"): lambda v: _build(Position, v),
    ("Generation", "verdict"): lambda v: None if v is None else _build(Verdict, v),
    ("Generation", "decisions"): _decisions,
    ("Join", "addresses"): lambda v: tuple(_text(item) for item in v),
}


#: of each field of a class: its name, how its value is checked, and whether a record must have it
_FIELDS: dict[type[Any], tuple[tuple[str, Convert, bool], ...]] = {
    cls: tuple(
        (
            f.name,
            _NESTED.get((cls.__name__, f.name)) or _plain(str(f.type)),
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(cls)
    )
    for cls in (*_KINDS.values(), Member, Position, Verdict)
}


def _build(cls: type[Any], body: Any) -> Any:
    if not isinstance(body, dict):
        raise CorruptRecord("not an object")
    values = {}
    for name, convert, needed in _FIELDS[cls]:
        if name in body:
            values[name] = convert(body[name])
        elif needed:
            raise CorruptRecord(f"{name} is missing")
    record = cls(**values)
    if cls is Generation:
        _check_generation(record)
    return record


def _check_generation(record: Generation) -> None:
    """What a node relies on without looking."""
    ranks = [member.rank for member in record.members]
    if len(set(ranks)) != len(ranks) or (record.leader not in ranks and record.verdict is None):
        raise CorruptRecord("its leader is no member, or a rank is there twice")
    if record.number < 1 or record.start.iteration < 1 or record.start.phase < 0:
        raise CorruptRecord("it starts nowhere")
