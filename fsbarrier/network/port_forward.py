"""Makes a server on a Unix socket reachable at a port of 127.0.0.1, by copying bytes both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fsbarrier.errors import UsageError
from fsbarrier.network.listening import on_loopback

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
#: how soon it is noticed that the server has ended
LOOK_S = 0.5


def forward(socket_path: str, port: int, *, ready: Callable[[int], None], lives: Callable[[], bool]) -> None:
    """Forward connections to the socket until `lives` returns false or an exception ends this, such as that of a signal handler.

    `port`: 0: a free one; `ready` is told which. Raises UsageError if the port is taken.
    """
    asyncio.run(_forward(socket_path, port, ready, lives))


async def _forward(
    socket_path: str, port: int, ready: Callable[[int], None], lives: Callable[[], bool]
) -> None:
    async def connected(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_unix_connection(socket_path)
            await asyncio.gather(_copy(client, to_server), _copy(server, to_client))
        # One side is gone, so close the connection to the other.
        except OSError:
            to_client.close()

    try:
        listening = await asyncio.start_server(connected, sock=on_loopback(port))
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror or error}; name another port") from None
    async with listening:
        ready(listening.sockets[0].getsockname()[1])
        while lives():
            await asyncio.sleep(LOOK_S)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
    finally:
        target.close()
