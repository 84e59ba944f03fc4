"""The sockets of an update's rendezvous: the leader listens on them, all nodes try them, and torchrun takes them over.

The leader listens on each of its addresses, on one free port. Every other node tries each address and reports which ones answered. The
program of the update inherits the sockets and keeps the one with the chosen address, so nobody else can listen on the port in between.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Sequence

CONNECT_S = 3.0
# The addresses to listen on if all nodes are on one host.
LOOPBACK = ("127.0.0.1",)
# Environment variable of a program that takes over the sockets: their descriptors, separated by commas.
LISTENING = "FSBARRIER_LISTENING"


def listen(addresses: Sequence[str], port: int = 0) -> list[socket.socket]:
    """Listen on each of these addresses of this host, all on one port (0: a free one).

    Unless all are loopback, the last socket listens on every address: a peer may know this host by one that it does not have (NAT).
    Raises OSError.
    """
    others = not all(ipaddress.ip_address(address).is_loopback for address in addresses)
    listening: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for address in ("", *addresses) if others else addresses:
            try:
                one = opened.enter_context(_listen_on(address, port))
            except OSError:
                # An address may have gone meanwhile.
                if others and listening:
                    continue
                raise
            listening.append(one)
            port = port_of(one)
        opened.pop_all()
    return listening[1:] + listening[:1] if others else listening


def take(listening: Sequence[socket.socket], address: str) -> socket.socket:
    """The one of `listen`'s sockets that listens on `address`, or else the last; closes the others."""
    chosen = next((one for one in listening if one.getsockname()[0] == address), listening[-1])
    for one in listening:
        if one is not chosen:
            one.close()
    return chosen


def _listen_on(address: str, port: int) -> socket.socket:
    # The kernel lets only sockets of the same user share a port.
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=True, backlog=socket.SOMAXCONN
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, reuse_port=True, backlog=socket.SOMAXCONN)


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def reachable(addresses: Iterable[str], port: int) -> list[str]:
    """The addresses that accept a connection on `port` from this host."""
    found = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S):
            found.append(address)
    return found
