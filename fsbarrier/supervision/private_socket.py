"""Sockets between a daemon and the programs that it keeps: each is a name in a folder on this node that nobody else may enter."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def listen(path: Path) -> socket.socket:
    """A socket at `path` to which programs connect; `accept` does not wait. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as name:
        listener.bind(name)
    listener.listen()
    listener.setblocking(False)
    return listener


def connect(path: Path) -> socket.socket:
    """The program's side. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    with _short(path) as name:
        connection.connect(name)
    return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name for `path`: a socket's has room for 107 bytes, and the folder of temporary files may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
