"""Which network interface torch's process group uses, from the address at which this node reaches the leader.

Left to itself gloo takes the address that the host's own name resolves to, which on Debian is 127.0.1.1: nodes then wait for each
other until the time-out. NCCL guesses by name.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from fsbarrier.host.addresses import interface_addresses, own_address

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def name_interface(environ: MutableMapping[str, str]) -> None:
    """Set the variables that are not set, where torchrun has told the leader's address and an interface fits it."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not address or not port:
        return
    found = interface_of(own_address(address, int(port)))
    if found:
        for name in VARIABLES:
            environ.setdefault(name, found)


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; empty if none has."""
    wanted = address.partition("%")[0]
    return next((name for name, held in interface_addresses() if held == wanted), "")
