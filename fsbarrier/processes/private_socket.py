"""Unix sockets between a daemon and its long-lived programs, in a private folder of this node."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def listen(path: Path) -> socket.socket:
    """Listen at `path`; `accept` does not block. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as name:
        listener.bind(name)
    listener.listen()
    listener.setblocking(False)
    return listener


def connect(path: Path) -> socket.socket:
    """Connect to `path` (the program's side). Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    with _short(path) as name:
        connection.connect(name)
    return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short alias for `path`, because a socket path is limited to 107 bytes and the temporary folder may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
