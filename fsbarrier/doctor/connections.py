"""Whether the nodes reach each other: each listens on a free port for a moment, and each connects to all addresses of the others."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from types import TracebackType

from fsbarrier.doctor.messages import Message
from fsbarrier.machine.rendezvous import listen

CONNECT_S = 2.0


class Door:
    """A listening socket that says a word to whoever comes, so that a stranger's port is not taken for it."""

    def __init__(self, word: str, *, loopback: bool) -> None:
        """`loopback`: reachable from this host only. Raises OSError."""
        self._socket = listen(loopback=loopback)
        self.port: int = self._socket.getsockname()[1]
        self._word = word.encode()
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def _open(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(OSError), visitor:
                visitor.settimeout(CONNECT_S)
                visitor.sendall(self._word)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def reached(others: Mapping[int, Message]) -> dict[int, list[str]]:
    """For each other node the addresses at which it answers from here; tried all at once."""
    result: dict[int, list[str]] = {rank: [] for rank in others}

    def knock(rank: int, address: str, port: int, word: str) -> None:
        with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_S) as line:
            line.settimeout(CONNECT_S)
            if line.recv(len(word), socket.MSG_WAITALL) == os.fsencode(word):
                result[rank].append(address)

    threads = [
        threading.Thread(target=knock, args=(rank, address, about["port"], about["word"]), daemon=True)
        for rank, about in others.items()
        for address in about["addresses"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result
