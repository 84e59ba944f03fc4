"""What doctors say to each other lies in files: a message as bytes, as read from a file, and the wait for one."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POLL_MIN_S, POLL_MAX_S = 0.0005, 0.02

Message = dict[str, Any]


class Waiter:
    """Looks for something again and again: quickly at first, then up to every 20 ms, until a deadline."""

    def __init__(self, deadline: float, stop: threading.Event | None = None) -> None:
        """`deadline` on the monotonic clock; `stop` ends the wait at once."""
        self.deadline, self.stop = deadline, stop or threading.Event()
        self._pause = POLL_MIN_S

    def again(self) -> bool:
        """Pause; False once there is no more time."""
        left = self.deadline - time.monotonic()
        if left <= 0 or self.stop.wait(min(self._pause, left)):
            return False
        self._pause = min(1.5 * self._pause, POLL_MAX_S)
        return True


def pack(message: Mapping[str, Any]) -> bytes:
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
        return unpack(path.read_bytes())
    except (OSError, ValueError):
        return None
