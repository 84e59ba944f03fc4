"""How the nodes find an address of the leader that really works, before torchrun needs it.

The leader listens on a free port; every other node connects to each of the leader's addresses on it and tells which answered.
Only for those few moments, and in torchrun itself, does anything listen beyond loopback.
"""

from __future__ import annotations

import contextlib
import socket

from fsbarrier.program import ProbeAddresses

CONNECT_S = 3.0


def listen(*, loopback: bool) -> socket.socket:
    """A socket that listens on a free port. `loopback`: reachable from this host only. Raises OSError."""
    if loopback:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class Rendezvous:
    """The leader's listening socket; its port is the one torchrun will take over."""

    def __init__(self, *, loopback: bool) -> None:
        """Listen on a free port. `loopback`: reachable from this host only. Raises OSError."""
        self._socket = listen(loopback=loopback)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def probe(request: ProbeAddresses) -> tuple[str, ...]:
    """Those of the addresses that accept a connection on the port from here."""
    reached = []
    for address in request.addresses:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, request.port), timeout=CONNECT_S),
        ):
            reached.append(address)
    return tuple(reached)
