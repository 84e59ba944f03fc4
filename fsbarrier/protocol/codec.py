"""Encodes and decodes records.

A file has one header line and one line of JSON. The header has the kind, length and digest, so a torn, short or empty file is
recognised (invariant I8). Unknown fields are ignored; a different format version is refused. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from fsbarrier.protocol.facts import (
    Beat,
    Fact,
    FailedProgram,
    Generation,
    Join,
    JsonObject,
    Member,
    Position,
    R,
    Record,
    StopRequest,
    Verdict,
)

MAGIC = "fsbarrier"
FORMAT = 2
#: decoded records up to this size are cached
SMALL_BYTES = 8 * 1024


T = TypeVar("T")


class CorruptRecord(Exception):
    """The bytes are not a whole record of the expected kind.

    The reader tries again, since the file may be about to be replaced. It never treats such a record as absent.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.why)
        self.fault = fault


class Fault(NamedTuple):
    """Why a record cannot be read. `foreign`: it has a format version that this code does not know."""

    why: str
    foreign: bool = False


_KINDS: dict[str, type[Record]] = {
    "join": Join,
    "beat": Beat,
    "generation": Generation,
    "fact": Fact,
    "stop": StopRequest,
}

_NAMES = {cls: name for name, cls in _KINDS.items()}
_DECODER = json.JSONDecoder()


def _fields(item: object) -> dict[str, object]:
    """The fields of a record, or of one nested in it."""
    return {name: getattr(item, name) for name in _SHAPES[type(item)].types}


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields)


def encode(item: Record) -> bytes:
    """The bytes of a record's file."""
    body = _ENCODER.encode(_fields(item)).encode() + b"\n"
    return _header(_NAMES[type(item)], body) + body


def _header(kind: str, body: bytes) -> bytes:
    return f"{MAGIC}/{FORMAT} {kind} {len(body)} {hashlib.sha256(body).hexdigest()[:32]}\n".encode()


def decode(data: bytes, cls: type[R]) -> R:
    """The record in `data`. Raises CorruptRecord for anything but a whole record of this kind."""
    kind = _NAMES[cls]
    found = _decode_small(data, kind) if len(data) <= SMALL_BYTES else _decode(data, kind)
    if isinstance(found, cls):
        return found
    assert isinstance(found, Fault)
    raise CorruptRecord(found)


def _decode(data: bytes, expected: str) -> Record | Fault:
    """The record, or the fault."""
    header, _, body = data.partition(b"\n")
    if header + b"\n" != _header(expected, body):
        return _fault_of_header(header, expected)
    try:
        return _build(_KINDS[expected], _DECODER.raw_decode(body.decode())[0])
    except (_NotARecord, ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        return Fault(f"not a record: {error}")


def _fault_of_header(header: bytes, expected: str) -> Fault:
    """Why the header does not match the body."""
    if not header:
        return Fault("empty, or torn at its beginning")
    magic, kind, *_ = [*header.decode("ascii", "replace").split(" "), "", ""]
    name, _, number = magic.partition("/")
    if name == MAGIC and number.isdecimal() and int(number) != FORMAT:
        return Fault(f"record format {number[:9]}; this fsbarrier reads format {FORMAT}", foreign=True)
    if magic != f"{MAGIC}/{FORMAT}":
        return Fault(f"no record of fsbarrier: it begins with {magic[:40]!r}")
    if kind != expected:
        return Fault(f"a {kind} record where a {expected} was expected")
    return Fault("torn: length or digest differs")


# Nodes read the same bytes repeatedly (a slow node's heartbeat, a fact with several readers), and records are immutable.
_decode_small = lru_cache(maxsize=1024)(_decode)


# --- from JSON to records ---------------------------------------------------------------------------------------------------


class _NotARecord(Exception):
    """JSON that is not a record."""


Convert = Callable[[Any], object]
_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_NONE = type(None)
_LIMIT = 2**62


def _types(annotation: str) -> tuple[type, ...]:
    base = annotation.removesuffix("| None").strip()
    return (*_PLAIN.get(base, (dict,)), *((_NONE,) if annotation.endswith("| None") else ()))


def _decisions(value: JsonObject) -> JsonObject:
    for entry in value.values():
        if type(entry["iteration"]) is not int or not isinstance(entry["value"], dict):
            raise _NotARecord("not a decision")
    return value


def _members(value: list[object]) -> tuple[Member, ...]:
    return tuple(_build(Member, item) for item in value)


def _failures(value: list[object]) -> tuple[FailedProgram, ...]:
    return tuple(_build(FailedProgram, item) for item in value)


def _texts(value: list[object]) -> tuple[object, ...]:
    if not all(type(item) is str for item in value):
        raise _NotARecord("texts expected")
    return tuple(value)


#: nested fields: their types in JSON, and how to convert them
_NESTED: dict[tuple[type, str], tuple[tuple[type, ...], Convert]] = {
    (Generation, "members"): ((list,), _members),
    (StopRequest, "starts"): ((list,), _members),
    (Generation, "failures"): ((list,), _failures),
    (Generation, "dismissed"): ((list,), _members),
    (Generation, "start"): ((dict,), lambda v: _build(Position, v)),
    (Generation, "verdict"): ((dict, _NONE), lambda v: None if v is None else _build(Verdict, v)),
    (Generation, "decisions"): ((dict,), _decisions),
    (Join, "addresses"): ((list,), _texts),
}


class _Shape(NamedTuple):
    """The JSON types of a record's fields. A bool is not accepted as an int."""

    types: dict[str, tuple[type, ...]]
    needed: frozenset[str]
    converts: dict[str, Convert]


def _shape(cls: type[Any]) -> _Shape:
    columns = fields(cls)
    nested = {f.name: _NESTED[cls, f.name] for f in columns if (cls, f.name) in _NESTED}
    return _Shape(
        {f.name: nested[f.name][0] if f.name in nested else _types(str(f.type)) for f in columns},
        frozenset(f.name for f in columns if f.default is MISSING and f.default_factory is MISSING),
        {name: convert for name, (_, convert) in nested.items()},
    )


_SHAPES: dict[type, _Shape] = {
    cls: _shape(cls) for cls in (*_KINDS.values(), Member, Position, Verdict, FailedProgram)
}


def _build(cls: type[T], body: object) -> T:
    types, needed, converts = _SHAPES[cls]
    if not isinstance(body, dict) or not needed <= body.keys():
        raise _NotARecord("not an object, or a field is missing")
    if body.keys() != types.keys():
        body = {name: value for name, value in body.items() if name in types}
    for name, value in body.items():
        if type(value) not in types[name] or (type(value) is int and not -_LIMIT < value < _LIMIT):
            raise _NotARecord(f"{name} is no {types[name][0].__name__}, or out of range")
    for name, convert in converts.items():
        if name in body:
            body[name] = convert(body[name])
    built = cls(**body)
    if isinstance(built, Generation):
        _check_generation(built)
    return built


def _check_generation(found: Generation) -> None:
    """Refuse a record that breaks what the state machine relies on without checking."""
    ranks = [member.rank for member in found.members]
    if len(set(ranks)) != len(ranks) or (found.leader not in ranks and found.verdict is None):
        raise _NotARecord("its leader is no member, or a rank is there twice")
    if found.number < 1 or found.start.iteration < 1 or found.start.phase < 0:
        raise _NotARecord("it starts nowhere")
