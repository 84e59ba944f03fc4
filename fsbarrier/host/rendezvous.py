"""Finds an address of the leader that all nodes can reach, before torchrun needs it.

The leader listens on a free port, which torchrun takes over later. Every other node tries each of the leader's addresses on that port and
reports which ones answered. Nothing else listens beyond loopback, except torchrun itself.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

CONNECT_S = 3.0


def listen(*, loopback: bool) -> socket.socket:
    """Listen on a free port. `loopback`: only on this host. Raises OSError."""
    if loopback:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def listen_on(address: str, port: int) -> socket.socket:
    """Listen on this address ("": on all of them) and port. Raises OSError."""
    family = socket.getaddrinfo(address or "127.0.0.1", port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def reachable(addresses: Iterable[str], port: int) -> list[str]:
    """The addresses that accept a connection on `port` from this host."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S):
            found.append(address)
    return found
