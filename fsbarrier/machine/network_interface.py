"""Which network interface torch's process group uses, from the address at which this node reaches the leader.

Left to itself gloo takes the address that the host's own name resolves to, which on Debian is 127.0.1.1: nodes then wait for each
other until the time-out. NCCL guesses by name.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915  # the request for an interface's IPv4 address, see netdevice(7)


def name_interface(environ: MutableMapping[str, str]) -> None:
    """Set the variables that are not set, where torchrun has told the leader's address and an interface fits it."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not address or not port:
        return
    found = interface_of(own_address(address, int(port)))
    if found:
        for name in VARIABLES:
            environ.setdefault(name, found)


def own_address(peer: str, port: int) -> str:
    """The address of this node from which `peer` is reached; empty if it is not. Nothing is sent."""
    try:
        for family, kind, _, _, target in socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return ""


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; empty if none has."""
    for name, held in _ipv4() + _ipv6():
        if held == address.partition("%")[0]:
            return name
    return ""


def _ipv4() -> list[tuple[str, str]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(control, SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6(table: Path = Path("/proc/net/if_inet6")) -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return []
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
