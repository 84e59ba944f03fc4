"""The sockets of an update's rendezvous: the leader listens on them, all nodes try them, and torchrun takes them over.

The leader listens on each of its addresses, on one free port. Every other node tries each address and reports which ones answered. The
program of the update inherits the sockets and keeps the one with the chosen address, so nobody else can listen on the port in between.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Sequence

CONNECT_S = 3.0
# The addresses to listen on if all nodes are on one host.
LOOPBACK = ("127.0.0.1",)
# Environment variable of a program that takes over the sockets: their descriptors, separated by commas.
LISTENING = "FSBARRIER_LISTENING"


def listen(addresses: Sequence[str], port: int = 0) -> list[socket.socket]:
    """Listen on each of these addresses of this host, all on one port (0: a free one). Raises OSError if none of them is there."""
    listening: list[socket.socket] = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            # The kernel lets only sockets of the same user share a port.
            listener = socket.create_server(
                (address, port), family=family, reuse_port=True, backlog=socket.SOMAXCONN
            )
        except OSError:
            # An address may have gone meanwhile.
            if address == addresses[-1] and not listening:
                raise
            continue
        listening.append(listener)
        port = port_of(listener)
    return listening


def take(listening: Sequence[socket.socket], address: str) -> socket.socket:
    """The one of `listen`'s sockets that listens on `address`; closes the others."""
    chosen = next((listener for listener in listening if listener.getsockname()[0] == address), listening[0])
    for listener in listening:
        if listener is not chosen:
            listener.close()
    return chosen


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def reachable(addresses: Iterable[str], port: int) -> list[str]:
    """The addresses that accept a connection on `port` from this host."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S):
            found.append(address)
    return found
