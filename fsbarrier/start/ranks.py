"""Which node this is, how many there are, and at which addresses the others may reach it. Sends nothing.

The rank comes from, in order: `--master`/`--worker`, NODE_RANK, RANK where nothing says that it counts
processes, SLURM_NODEID, JOB_COMPLETION_INDEX, SKYPILOT_NODE_RANK, DSTACK_NODE_RANK, OMPI_COMM_WORLD_RANK with one
task a node.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.errors import UsageError

Environ = Mapping[str, str]
MAX_NODES = 1_000_000


@dataclass(frozen=True)
class Choice:
    """A number and who said it: a flag or an environment variable."""

    value: int
    source: str


# --- rank ---------------------------------------------------------------------------------------------------


def node_rank(
    *, master: bool, worker: int | None, environ: Environ, num_nodes: int | None = None
) -> Choice | None:
    """This node's rank; None where nobody says. `num_nodes`, where known, is the limit and settles what RANK counts.

    Raises UsageError naming the flag or variable for a rank that cannot be.
    """
    choice = _from_flags(master, worker) or _from_environ(environ, num_nodes)
    if choice is None:
        return None
    if choice.value < 0:
        raise UsageError(f"{choice.source} {choice.value}: a node rank is 0 or more")
    if num_nodes is not None and choice.value >= num_nodes:
        nodes = f"{num_nodes} nodes, ranks 0 to {num_nodes - 1}" if num_nodes > 1 else "one node, rank 0"
        raise UsageError(f"{choice.source} {choice.value}: out of range, this run has {nodes}")
    return choice


def _from_flags(master: bool, worker: int | None) -> Choice | None:
    if master and worker is not None:
        raise UsageError(f"--master and --worker {worker}: a node is one or the other")
    if master:
        return Choice(0, "--master")
    return None if worker is None else Choice(worker, "--worker")


def _from_environ(environ: Environ, num_nodes: int | None) -> Choice | None:
    sources: tuple[tuple[str, Callable[[Environ, int | None], bool]], ...] = (
        ("NODE_RANK", _always),
        ("RANK", _rank_counts_nodes),
        ("SLURM_NODEID", _one_slurm_task_here),
        ("JOB_COMPLETION_INDEX", _always),
        ("SKYPILOT_NODE_RANK", _always),
        ("DSTACK_NODE_RANK", _always),
        ("OMPI_COMM_WORLD_RANK", _one_mpi_task_a_node),
    )
    for name, applies in sources:
        if environ.get(name, "").strip() and applies(environ, num_nodes):
            return Choice(_number(environ, name), name)
    return None


def _always(environ: Environ, num_nodes: int | None) -> bool:
    return True


def _rank_counts_nodes(environ: Environ, num_nodes: int | None) -> bool:
    """Whether RANK can be a node's: with several processes a node it counts processes (torch's meaning)."""
    if environ.get("LOCAL_RANK", "0").strip() not in ("", "0"):
        return False
    if environ.get("LOCAL_WORLD_SIZE", "1").strip() not in ("", "1"):
        return False
    world_size = environ.get("WORLD_SIZE", "").strip()
    if not world_size:
        return True
    rank = environ["RANK"].strip()
    if not world_size.isdecimal() or not rank.isdecimal() or int(rank) >= int(world_size):
        return False
    return num_nodes is None or int(world_size) == num_nodes


def _one_slurm_task_here(environ: Environ, num_nodes: int | None) -> bool:
    local = environ.get("SLURM_LOCALID", "0").strip()
    if local not in ("", "0"):
        raise UsageError(
            f"SLURM_LOCALID {local}: another task is on this node; start one a node (srun --ntasks-per-node=1)"
        )
    return True


def _one_mpi_task_a_node(environ: Environ, num_nodes: int | None) -> bool:
    return environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "").strip() == "1"


def _number(environ: Environ, name: str) -> int:
    text = environ[name].strip()
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r}: not a whole number") from None


# --- number of nodes ----------------------------------------------------------------------------------------

_COUNTS = {
    "--master": ("NNODES",),
    "NODE_RANK": ("NNODES", "NUM_NODES"),
    "RANK": ("WORLD_SIZE",),
    "SLURM_NODEID": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    "SKYPILOT_NODE_RANK": ("SKYPILOT_NUM_NODES",),
    "DSTACK_NODE_RANK": ("DSTACK_NODES_NUM",),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
}


def count_nodes(rank: Choice | None, environ: Environ) -> Choice | None:
    """How many nodes the launcher that named the rank started; None where it does not say. Raises UsageError."""
    for name in _COUNTS.get(rank.source, ()) if rank else ():
        if environ.get(name, "").strip():
            choice = Choice(_number(environ, name), name)
            if not 1 <= choice.value <= MAX_NODES:
                raise UsageError(f"{name} {choice.value}: must be from 1 to {MAX_NODES}")
            return choice
    return None


# --- addresses ----------------------------------------------------------------------------------------------

#: Interfaces of containers and virtual machines: other hosts cannot reach what is behind them.
_BRIDGES = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "cni",
    "flannel",
    "cali",
    "podman",
    "lxc",
    "lxd",
    "kube",
    "vmnet",
    "cilium",
)
_SIOCGIFADDR = 0x8915
_ORDER = ("default", "other", "bridge", "link-local", "loopback")


@dataclass(frozen=True)
class Address:
    """An address of this host. `kind`: one of _ORDER, "default" being the one of the default route."""

    host: str
    interface: str
    kind: str


def addresses() -> list[Address]:
    """All addresses of this host, IPv4 and IPv6, those that others most likely reach first. Never raises."""
    routed = {host for family in (socket.AF_INET, socket.AF_INET6) if (host := _default_source(family))}
    found = {host: interface for host, interface in (*_ipv4_addresses(), *_ipv6_addresses())}
    for host in (*sorted(routed), *_named_addresses()):
        found.setdefault(host, "")
    listed = [Address(host, interface, kind_of(host, interface, routed)) for host, interface in found.items()]
    return sorted(listed, key=lambda item: (_ORDER.index(item.kind), ":" in item.host))


def candidate_addresses() -> list[str]:
    """The addresses that other hosts may try, most promising first; loopback only where there is no other."""
    found = [item for item in addresses() if "%" not in item.host]  # a scope means nothing elsewhere
    return [item.host for item in found if item.kind != "loopback"] or [item.host for item in found]


def kind_of(host: str, interface: str = "", routed: set[str] | frozenset[str] = frozenset()) -> str:
    """How promising an address is for reaching this host from another one; see Address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if interface.startswith(_BRIDGES):
        return "bridge"
    return "default" if host in routed else "other"


def host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _default_source(family: socket.AddressFamily) -> str | None:
    """The address from which this host would speak to the internet; connecting a datagram socket sends nothing."""
    target = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return None


def _ipv4_addresses() -> list[tuple[str, str]]:
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((socket.inet_ntoa(answer[20:24]), name))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        fields = line.split()
        with contextlib.suppress(ValueError, IndexError):
            host = str(ipaddress.IPv6Address(int(fields[0], 16)))
            scoped = f"{host}%{fields[5]}" if ipaddress.IPv6Address(host).is_link_local else host
            found.append((scoped, fields[5]))
    return found


def _named_addresses() -> list[str]:
    """What this host's own name stands for; by the files and the resolver, so some may be missing or wrong."""
    with contextlib.suppress(OSError, UnicodeError):
        return [
            str(info[4][0])
            for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ]
    return []
