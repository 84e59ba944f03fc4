"""The sockets on which fsbarrier listens, and which connections they accept. Only this module opens such sockets.

Anybody can connect to a port: other users of this machine, and anyone on the network if it is not loopback. Each connection costs a
descriptor, and a daemon without descriptors cannot write a heartbeat. So connections of other users of this machine are closed before a
byte is read. Only a few connections without the key are kept, each for a short time, and the oldest is closed first. All connections
together leave enough descriptors to the rest of the process.

For the rendezvous of an update, the leader listens on each of its addresses, on one free port. Every other node tries each address and
reports which ones answered. The program of the update inherits the sockets and keeps the one with the chosen address, so nobody else can
listen on the port in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import resource
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fsbarrier.network.this_host import owner_of_peer
from fsbarrier.store.trusted_folder import user_name

#: the most connections to one socket that have not sent the key, and how long each may take to send it
MOST_WITHOUT_KEY, KEY_S = 64, 5.0
#: the listen backlog, which is also how many connections asyncio accepts before it handles the first of them
AT_ONCE = 32
#: descriptors that all connections together leave to the rest of the process
RESERVED = 256

_lock, _connections = threading.Lock(), 0
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
    beyond_loopback = not all(ipaddress.ip_address(address).is_loopback for address in addresses)
    listening: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for address in ("", *addresses) if beyond_loopback else addresses:
            try:
                listener = opened.enter_context(_listen_on(address, port))
            except OSError:
                # This host may have lost the address since its addresses were listed.
                if beyond_loopback and listening:
                    continue
                raise
            listening.append(listener)
            port = port_of(listener)
        opened.pop_all()
    return listening[1:] + listening[:1] if beyond_loopback else listening


def take(listening: Sequence[socket.socket], address: str) -> socket.socket:
    """The one of `listen`'s sockets that listens on `address`, or else the last; closes the others."""
    chosen = next((listener for listener in listening if listener.getsockname()[0] == address), listening[-1])
    for listener in listening:
        if listener is not chosen:
            listener.close()
    return chosen


def _listen_on(address: str, port: int) -> socket.socket:
    # `reuse_port` is safe, because the kernel lets only sockets of the same user share a port.
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
    reached = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S):
            reached.append(address)
    return reached


def on_loopback(port: int = 0) -> socket.socket:
    """A socket that listens on a port of loopback (0: a free one). Raises OSError."""
    return listen(LOOPBACK, port)[0]


def on_path(path: Path) -> socket.socket:
    """A Unix socket that listens at `path`, which must be in a folder that only this user can enter. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    return listening


def stranger(peer: object, here: object) -> str:
    """The name of the user who connected, if it is another user of this machine; "" for this user, or from another machine.

    `peer` and `here`: the two ends, as `getpeername` and `getsockname` give them.
    """
    match peer, here:
        case (str(host), int(port), *_), (str(own), int(own_port), *_):
            owner = owner_of_peer((host, port), (own, own_port))
            if owner == os.geteuid():
                return ""
            if owner is not None:
                return user_name(owner)
            return "an unknown user" if _is_loopback(own) else ""
    # Its peer has gone.
    return "an unknown user"


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def same_key(given: str | bytes, key: str) -> bool:
    """Compare keys in constant time, so that the duration does not reveal how much of a guess is right."""
    return hmac.compare_digest(
        given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given, key.encode()
    )


@contextlib.contextmanager
def counted() -> Iterator[bool]:
    """Whether this process may have another connection for the duration of the context."""
    global _connections
    with _lock:
        # A connection through a gateway has two ends.
        admitted = 2 * (_connections + 1) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED
        _connections += admitted
    try:
        yield admitted
    finally:
        with _lock:
            _connections -= admitted


class HttpGate:
    """Reads the head of each connection's first request, and admits the connection if the head contains the key."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._waiting: list[asyncio.StreamWriter] = []

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """Read and return the head; None if the connection must be closed. Answers a wrong key with 401."""
        if stranger(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
            return None
        self._waiting.append(writer)
        if len(self._waiting) > MOST_WITHOUT_KEY:
            self._waiting.pop(0).transport.abort()
        try:
            async with asyncio.timeout(KEY_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            return None
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(writer)
        credentials = [value for name, value in map(_header, head.split(b"\r\n")) if name == b"authorization"]
        if len(credentials) == 1 and same_key(credentials[0], f"Bearer {self._key}"):
            return head
        refusal = b'{"error": {"message": "wrong API key", "code": 401}}'
        writer.write(
            b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(refusal), refusal)
        )
        with contextlib.suppress(OSError):
            await writer.drain()
        return None


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()
