"""This host as other hosts see it: its name, boot and user, and the addresses that they can probably reach. Sends no packets."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, MutableMapping, Set
from pathlib import Path

#: interfaces of containers and virtual machines, which other hosts cannot reach
BRIDGES = re.compile("docker|br-|veth|virbr|cni|flannel|cali|podman|lxc|lxd|kube|vmnet|cilium")
#: kinds of addresses, the most likely reachable first; "default": address of the default route
KINDS = ("default", "other", "bridge", "link-local", "loopback")
#: addresses reserved for documentation, which are always reached through the default route
NOWHERE = ("192.0.2.1", "2001:db8::1")
#: the request for an interface's IPv4 address, see netdevice(7)
SIOCGIFADDR = 0x8915
IPV6_TABLE = Path("/proc/net/if_inet6")


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """A unique id of this host's current boot; the host name if the kernel provides none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return host_name()


def user_at_host() -> str:
    """USER@HOST, for records that are read elsewhere."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container a user may have no name.
        user = f"uid{os.getuid()}"
    return f"{user}@{host_name()}"


def candidate_addresses() -> list[str]:
    """The addresses that other hosts should try, the most likely reachable first; loopback only if there is no other. Never raises."""
    routed = {own_address(nowhere, 9) for nowhere in NOWHERE} - {""}
    names = dict.fromkeys(sorted(routed), "") | {host: name for name, host in interface_addresses()}
    kinds = {host: kind_of(host, name, routed) for host, name in names.items()}
    # An IPv6 link-local address is only valid together with its interface, and that only on this host.
    named = [host for host, kind in kinds.items() if not (kind == "link-local" and ":" in host)]
    named.sort(key=lambda host: (KINDS.index(kinds[host]), ":" in host))
    return [host for host in named if kinds[host] != "loopback"] or named


def kind_of(host: str, interface: str = "", routed: Set[str] = frozenset()) -> str:
    """How likely other hosts can reach this address: one of KINDS."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if BRIDGES.match(interface):
        return "bridge"
    return "default" if host in routed else "other"


def own_address(peer: str, port: int) -> str:
    """The local address used for connections to `peer`; "" if there is no route."""
    # Connecting a datagram socket only asks the routing table.
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return ""


def interface_addresses() -> list[tuple[str, str]]:
    """(interface, address) of every address of this host's interfaces. Never raises."""
    return ipv4_addresses() + ipv6_addresses()


def ipv4_addresses() -> list[tuple[str, str]]:
    addresses = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            # An interface without an IPv4 address answers with an error.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(control, SIOCGIFADDR, request)
                addresses.append((name, socket.inet_ntoa(answer[20:24])))
    return addresses


#: the kernel's tables of TCP sockets in this network namespace, and the code of the listening state
TCP_TABLES, LISTENS = ("/proc/net/tcp", "/proc/net/tcp6"), "0A"


def owner_of_peer(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """The user id of the process of this machine that connected from the address `peer` to `here`; None if there is none.

    `peer` alone says nothing, because sockets of several users may have the same local address.
    """
    ends = [{f"{host}:{end[1]:04X}" for host in _in_tables(end[0])} for end in (peer, here)]
    return next(
        (
            uid
            for _, uid, *ends_of_socket in _tcp_rows()
            if ends_of_socket[0] in ends[0] and ends_of_socket[1] in ends[1]
        ),
        None,
    )


def owners_of_port(port: int) -> set[int]:
    """The user ids of the listeners that a connection to 127.0.0.1 on this port may reach; empty if this host's tables show none."""
    ends = {
        f"{host}:{port:04X}"
        for local in ("127.0.0.1", str(ipaddress.IPv4Address(0)), "::")
        for host in _in_tables(local)
    }
    return {uid for state, uid, local, _ in _tcp_rows() if state == LISTENS and local in ends}


def _tcp_rows() -> Iterator[tuple[str, int, str, str]]:
    """(state, user id, local end, remote end) of each TCP socket."""
    for table in TCP_TABLES:
        with contextlib.suppress(OSError, ValueError), Path(table).open() as rows:
            next(rows, None)
            for row in rows:
                words = row.split()
                if len(words) > 7:
                    yield words[3], int(words[7]), words[1], words[2]


def _in_tables(host: str) -> set[str]:
    """The forms of an address in the tables. An IPv6 socket that is connected to an IPv4 address is in the IPv6 table."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else address
    both = [address, mapped] if mapped is not None else [address]
    whole = {form.packed for form in both} | {
        b"\0" * 10 + b"\xff\xff" + form.packed for form in both if form.version == 4
    }
    return {
        "".join(
            f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4)
        )
        for packed in whole
    }


def ipv6_addresses(table: Path = IPV6_TABLE) -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
        return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
    except (OSError, ValueError, IndexError):
        return []


# --- the interface of torch's process group -------------------------------------------------------------------------------


#: the interface variables of gloo and NCCL
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def name_interface(environ: MutableMapping[str, str]) -> None:
    """Set the unset variables to the interface that reaches the leader's address, if torchrun has set that address.

    By default gloo uses the address of the host's own name, which is 127.0.1.1 on Debian, so nodes would wait for each other until the
    timeout. NCCL guesses by interface name.
    """
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not address or not port:
        return
    interface = interface_of(own_address(address, int(port)))
    if interface:
        for name in VARIABLES:
            environ.setdefault(name, interface)


def interface_of(address: str) -> str:
    """The interface with `address`; "" if there is none."""
    wanted = address.partition("%")[0]
    return next((name for name, held in interface_addresses() if held == wanted), "")
