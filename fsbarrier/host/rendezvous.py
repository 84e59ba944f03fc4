"""How the nodes find an address of the leader that really works, before torchrun needs it.

The leader listens on a free port, the one that torchrun will take over; every other node connects to each of the leader's addresses
on it and tells which answered. Only for those few moments, and in torchrun itself, does anything listen beyond loopback.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

CONNECT_S = 3.0


def listen(*, loopback: bool) -> socket.socket:
    """A socket that listens on a free port. `loopback`: reachable from this host only. Raises OSError."""
    if loopback:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def listen_on(address: str, port: int) -> socket.socket:
    """A socket that listens on this address of this host ("": on all of them), on this port. Raises OSError."""
    family = socket.getaddrinfo(address or "127.0.0.1", port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def reachable(addresses: Iterable[str], port: int) -> list[str]:
    """Those of the addresses that accept a connection on `port` from here."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S):
            found.append(address)
    return found
