"""What doctors write for each other besides what their group carries: a message as a file, and the wait for one."""

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

#: quick at first, since most of these waits are what the doctor measures
PAUSES = Backoff(0.0005, 0.02)

T = TypeVar("T")
Message = JsonObject


def wait_for(look: Callable[[], T | None], deadline: float, stop: threading.Event | None = None) -> T | None:
    """What `look` gives, which is called again and again while it gives None; None at the deadline (on the monotonic clock).

    `stop` ends the wait at once.
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
    """A message as a file: its digest, then JSON."""
    body = json.dumps(message).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unpack(data: bytes) -> Message | None:
    """The message in a file's bytes; None for anything but a whole one."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    message = json.loads(body)
    return message if isinstance(message, dict) else None


def read(path: Path) -> Message | None:
    """The message at `path`; None where there is no whole one now."""
    try:
        return unpack(read_bytes(path, RECORD_BYTES))
    except (OSError, ValueError):
        return None
