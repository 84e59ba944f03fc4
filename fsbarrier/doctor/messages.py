"""File-based messages between doctors, for use outside their group."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fsbarrier.protocol.facts import JsonObject
from fsbarrier.reading import RECORD_BYTES, read_bytes
from fsbarrier.retry import Backoff

#: fast at first, because most of these waits are part of a measurement
PAUSES = Backoff(0.0005, 0.02)

T = TypeVar("T")
Message = JsonObject


def wait_for(look: Callable[[], T | None], deadline: float, stop: threading.Event | None = None) -> T | None:
    """Poll `look` until it returns something other than None, and return that; None at the deadline (monotonic clock).

    `stop` ends the wait immediately.
    """
    stop = stop or threading.Event()
    for pause_s in PAUSES:
        if (found := look()) is not None:
            return found
        left_s = deadline - time.monotonic()
        if left_s <= 0 or stop.wait(min(pause_s, left_s)):
            break
    return None


def pack(message: Mapping[str, object]) -> bytes:
    """Encode a message: its digest, then JSON."""
    body = json.dumps(message).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unpack(data: bytes) -> Message | None:
    """Decode a message; None if it is incomplete or invalid."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    message = json.loads(body)
    return message if isinstance(message, dict) else None


def read(path: Path) -> Message | None:
    """Read the message at `path`; None if there is no complete message yet."""
    try:
        return unpack(read_bytes(path, RECORD_BYTES))
    except (OSError, ValueError):
        return None
