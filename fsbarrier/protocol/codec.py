"""Encodes and decodes records.

A file has one header line and one line of JSON. The header has the kind, length and digest, so a torn, short or empty file is
recognised (invariant I8). Unknown fields are ignored; a different format version is refused. Pure.
"""

from __future__ import annotations

import hashlib
import json
from typing import TypeVar

import msgspec

from fsbarrier.protocol.facts import Beat, Fact, Generation, Join, R, Record, StopRequest

T = TypeVar("T")

MAGIC = "fsbarrier"
FORMAT = 2

_KINDS: dict[type[Record], str] = {
    Join: "join",
    Beat: "beat",
    Generation: "generation",
    Fact: "fact",
    StopRequest: "stop",
}
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder()


def ready(kind: type[T]) -> type[T]:
    """A decorator for dataclasses that several threads convert.

    msgspec examines a type at its first use. If two threads do that at once, one of them sees a half-built result, and the process dies of
    SIGSEGV. So the type is examined here, while its module is imported.
    """
    msgspec.json.Decoder(kind)
    return kind


# Several threads decode records.
for _kind in _KINDS:
    ready(_kind)


class CorruptRecord(Exception):
    """The bytes are not a whole record of the expected kind. The message says why.

    The reader tries again, since the file may be about to be replaced. It never treats such a record as absent.
    """


def encode(item: Record) -> bytes:
    """The bytes of a record's file."""
    body = _ENCODER.encode(msgspec.to_builtins(item)).encode() + b"\n"
    return _header(_KINDS[type(item)], body) + body


def _header(kind: str, body: bytes) -> bytes:
    return f"{MAGIC}/{FORMAT} {kind} {len(body)} {hashlib.sha256(body).hexdigest()[:32]}\n".encode()


def decode(data: bytes, cls: type[R]) -> R:
    """The record in `data`. Raises CorruptRecord for anything but a whole record of this kind."""
    header, _, body = data.partition(b"\n")
    if header + b"\n" != _header(_KINDS[cls], body):
        raise CorruptRecord(_fault_of_header(header, _KINDS[cls]))
    try:
        record = msgspec.convert(_DECODER.raw_decode(body.decode())[0], cls)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"not a record: {error}") from None
    if isinstance(record, Generation):
        _check_generation(record)
    return record


def _fault_of_header(header: bytes, expected: str) -> str:
    """Why the header does not match the body."""
    if not header:
        return "empty, or torn at its beginning"
    magic, kind, *_ = [*header.decode("ascii", "replace").split(" "), "", ""]
    name, _, number = magic.partition("/")
    if name == MAGIC and number.isdecimal() and int(number) != FORMAT:
        return f"record format {number[:9]}; this fsbarrier reads format {FORMAT}"
    if magic != f"{MAGIC}/{FORMAT}":
        return f"no record of fsbarrier: it begins with {magic[:40]!r}"
    if kind != expected:
        return f"a {kind} record where a {expected} was expected"
    return "torn: length or digest differs"


def _check_generation(generation: Generation) -> None:
    """Refuse a record that breaks what the state machine relies on without checking."""
    if len(set(generation.ranks)) != len(generation.ranks) or (
        generation.leader not in generation.ranks and generation.verdict is None
    ):
        raise CorruptRecord("not a record: its leader is no member, or a rank is there twice")
    if generation.number < 1 or generation.start.iteration < 1:
        raise CorruptRecord("not a record: it starts nowhere")
