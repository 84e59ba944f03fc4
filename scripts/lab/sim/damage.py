"""Damaged records, and foreign files. The headers are built here, not by the tested code."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from random import Random

from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import JsonObject, StopRequest
from sim.setup import CHANGED


def changed(data: bytes, change: Callable[[JsonObject], JsonObject]) -> bytes:
    """A record with changed fields and a matching header."""
    header, _, text = data.partition(b"\n")
    magic, kind, _, _ = header.split()
    body = json.dumps(change(json.loads(text)), separators=(",", ":")).encode() + b"\n"
    return b"%s %s %d %s\n%s" % (magic, kind, len(body), sha256(body).hexdigest()[:32].encode(), body)


def flip_a_bit(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _nowhere(body: JsonObject) -> JsonObject:
    return {**body, "start": {"iteration": 0, "phase": 0}, "rank": 2**80, "who": 7, "number": "one"}


def _led_by_nobody(body: JsonObject) -> JsonObject:
    return {**body, "leader": 99, "incarnation": None, "now": 1}


def _with_a_wrong_setting(body: JsonObject) -> JsonObject:
    wrong = {CHANGED: -1.0}
    return {**body, "stated": wrong, "settings": wrong}


Damage = Callable[[bytes, Random], bytes]
#: what the transcript says about the damage -> a function that makes the damaged bytes, which are no record any more
DAMAGES: dict[str, Damage] = {
    "a bit flips in {}": flip_a_bit,
    "{} is emptied": lambda data, rng: b"",
    "{} is cut off": lambda data, rng: data[: rng.randrange(1, len(data))],
    "{} is written in record format 3": lambda data, rng: data.replace(b"/2 ", b"/3 ", 1),
    "{} becomes another record": lambda data, rng: encode(StopRequest(True, "somebody")),
    "{} has values that cannot be": lambda data, rng: changed(data, _nowhere),
    "{} names a leader who is no member": lambda data, rng: changed(data, _led_by_nobody),
}
#: of a run's joins and generations: whole records, which no node can follow
WRONG_SETTINGS: dict[str, Damage] = {
    "{} has a setting that no start could choose": lambda data, rng: changed(data, _with_a_wrong_setting)
}
