"""Whether the nodes reach each other: each listens on a free port for a moment, and each connects to all addresses of the others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from fsbarrier.machine.rendezvous import listen, port_of

CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Door:
    """Where a node can be reached, and the word that it says to whoever comes: a stranger may have the same port elsewhere."""

    addresses: tuple[str, ...]
    port: int
    word: str

    def answers_at(self, address: str) -> bool:
        """Whether it is this door that opens at an address."""
        try:
            with socket.create_connection((address, self.port), CONNECT_S) as line:
                line.settimeout(CONNECT_S)
                return line.recv(len(self.word), socket.MSG_WAITALL) == self.word.encode()
        except OSError:
            return False


class Doorkeeper:
    """Opens this node's door for as long as the `with` block lasts."""

    def __init__(self, addresses: tuple[str, ...], word: str, *, loopback: bool) -> None:
        """`loopback`: reachable from this host only. Raises OSError."""
        self._socket = listen(loopback=loopback)
        self.door = Door(addresses, port_of(self._socket), word)
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def _open(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                # The socket was closed.
                return
            with contextlib.suppress(OSError), visitor:
                visitor.settimeout(CONNECT_S)
                visitor.sendall(self.door.word.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def reached(doors: Mapping[int, Door]) -> dict[int, list[str]]:
    """For each other node the addresses at which it answers from here, in their order; all are tried at once."""
    tries = [(rank, address) for rank, door in doors.items() for address in door.addresses]
    with ThreadPoolExecutor(max(1, len(tries))) as pool:
        answers = list(pool.map(lambda item: doors[item[0]].answers_at(item[1]), tries))
    found: dict[int, list[str]] = {rank: [] for rank in doors}
    for (rank, address), answered in zip(tries, answers, strict=True):
        if answered:
            found[rank].append(address)
    return found
