"""Whom the sockets let in on which fsbarrier listens. Nothing else listens but this module and rendezvous.py, which opens them.

Anybody can connect to a port: another user of this machine, and whoever is on the network if it is not loopback. Each connection costs a
descriptor, and a daemon without descriptors writes no heartbeat. So connections of other users of this machine are closed before a byte of
them is read; there are few at a time that have not said the key, each for a short time, and the oldest goes first; and all together
leave descriptors to the rest of the process.
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

#: connections to one socket that have not said the key, and how long each has for that
MOST_WITHOUT_KEY, KEY_S = 64, 5.0
#: how many connections are accepted before the first of them is looked at
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
    """Who has connected, if that is another user of this machine; "" if it is this user, or comes from another machine.

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
    """Whether somebody has said the key. How long it takes does not tell how much of it was right."""
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
    """Reads the head of each connection's first request, and lets it in if that has the key."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._waiting: list[asyncio.StreamWriter] = []

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """The head, which has been read; None for a connection that must be closed. Answers a wrong key with 401."""
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
