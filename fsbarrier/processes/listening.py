"""Decides which connections fsbarrier's listening sockets accept. Only this module and rendezvous.py open such sockets.

Anybody can connect to a port: other users of this machine, and anyone on the network if it is not loopback. Each connection costs a
descriptor, and a daemon without descriptors cannot write a heartbeat. So connections of other users of this machine are closed before a
byte is read. Only a few connections without the key are kept, each for a short time, and the oldest is closed first. All connections
together leave enough descriptors to the rest of the process.
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
from collections.abc import Iterator
from pathlib import Path

from fsbarrier.processes.addresses import owner_of_peer
from fsbarrier.processes.rendezvous import LOOPBACK, listen
from fsbarrier.store.trusted_folder import user_name

#: the most connections to one socket that have not sent the key, and how long each may take to send it
MOST_WITHOUT_KEY, KEY_S = 64, 5.0
#: the listen backlog, which is also how many connections asyncio accepts before it handles the first of them
AT_ONCE = 32
#: descriptors that all connections together leave to the rest of the process
RESERVED = 256

_lock, _connections = threading.Lock(), 0


def on_loopback() -> socket.socket:
    """A socket that listens on a free port of loopback. Raises OSError."""
    return listen(LOOPBACK)[0]


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


def same_key(said: str | bytes, key: str) -> bool:
    """Compare keys in constant time, so that the duration does not reveal how much of a guess is right."""
    return hmac.compare_digest(
        said.encode("utf-8", "surrogatepass") if isinstance(said, str) else said, key.encode()
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
        said = [value for name, value in map(_header, head.split(b"\r\n")) if name == b"authorization"]
        if len(said) == 1 and same_key(said[0], f"Bearer {self._key}"):
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
