"""A frozen engine of this node (`engines.NAME`): a model that is served beside the policy, on its own servers, behind one address.

    frozen = FrozenEngine(replicas, LOOPBACK)
    frozen.ensure(folder, devices, cancel=event)     # all its servers answer now
    frozen.address                                   # for the rollout program

Its servers listen on private sockets like the policy's. A gateway in this process connects a TCP port with the least loaded of them, so
that any OpenAI client can reach it; both check the key. A request that finds no server waits until one is back. The first request that
meets a dead server makes the gateway start it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fsbarrier.engine.engine import EngineInfo, Release
from fsbarrier.engine.openai_http import UNIX
from fsbarrier.engine.replicas import Replicas
from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.network.listening import AT_ONCE, LOOPBACK, HttpGate, counted, listen, port_of
from fsbarrier.protocol.facts import Payload
from fsbarrier.specs import EngineAddress
from fsbarrier.store.retry import Backoff

# How often a waiting request looks for a server.
PAUSES = Backoff(0.1, 1.0)
BLOCK_BYTES = 1 << 16
# A server that dies more often than this between two rollouts is not started again.
MOST_DEATHS = 3
STOP_S = 5.0


class FrozenEngine:
    """The servers of one frozen model on this node, and their gateway. Thread-safe."""

    def __init__(self, replicas: Replicas, addresses: Sequence[str]) -> None:
        """`addresses`: this host's addresses on which the gateway listens. Raises OSError."""
        self.name, self.replicas = replicas.frozen, replicas
        self._folder, self._threads = Path(), 0
        self._listening = listen(addresses)
        #: whether other nodes can reach it
        self.offered = tuple(addresses) != LOOPBACK
        self.port = port_of(self._listening[0])
        # Why a dead server cannot be started again; "" if all are alive or can be.
        self.failure = ""
        # The deaths of each server, by its number.
        self._deaths, self._closing = Counter[int](), threading.Event()
        # Each restart after a death on this node, as a line for the journal; and how many of them the journal has.
        self._restarts: list[Payload] = []
        self._told = 0
        # The sockets of the servers, and the number of open connections to each.
        self._sockets: tuple[str, ...] = ()
        self._open = Counter[str]()
        self._reviving: asyncio.Task[None] | None = None
        self._gateway = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._gateway.start()

    @property
    def address(self) -> EngineAddress:
        """The address for programs on this node."""
        return address("127.0.0.1", self.offer, self.name, self.replicas.settings.start_timeout_s)

    @property
    def offer(self) -> dict[str, object]:
        """The port and key that this node's join record gives to the other nodes."""
        return {"port": self.port, "key": self.replicas.api_key}

    @property
    def status(self) -> Payload:
        """The state of each server, the number of restarts, and the reason of the last one; `fsbarrier status` shows them."""
        states, restarts = [engine.state for engine in self.replicas.engines], self._restarts
        return {
            "states": states,
            "restarts": len(restarts),
            **({"why": restarts[-1]["why"]} if restarts else {}),
        }

    def news(self) -> list[Payload]:
        """The restarts since the last call, as lines for the journal."""
        new = self._restarts[self._told :]
        self._told += len(new)
        return new

    def ensure(
        self, folder: Path, devices: Sequence[int] | None, *, threads: int, cancel: threading.Event
    ) -> list[EngineInfo]:
        """Make all servers serve the model in `folder`, on the accelerators `devices` of this node. Raises ProgramFailed, UsageError."""
        self.failure, self._deaths = "", Counter()
        self._folder, self._threads = folder, threads
        self.replicas.use(devices)
        return self._bring(cancel)

    def release(self, *, cancel: threading.Event) -> Release:
        """Free the accelerators' memory for the trainer. Raises ProgramFailed."""
        return self.replicas.release(cancel=cancel)

    def stop(self) -> None:
        """Returns when all its servers are gone."""
        self._closing.set()
        self.replicas.stop()
        self._gateway.join(STOP_S)

    def _bring(self, cancel: threading.Event) -> list[EngineInfo]:
        try:
            infos = self.replicas.ensure(self._folder, 0, threads=self._threads, cancel=cancel)
        except ProgramFailed as error:
            raise ProgramFailed(f"engines.{self.name}: {error}") from None
        self._sockets = tuple(info.url.removeprefix(UNIX) for info in infos)
        return infos

    # --- the gateway, in its own thread ---

    async def _serve(self) -> None:
        connect = partial(self._connect, HttpGate(self.replicas.api_key))
        servers = [
            await asyncio.start_server(connect, sock=sock, backlog=AT_ONCE) for sock in self._listening
        ]
        await asyncio.to_thread(self._closing.wait)
        for server in servers:
            server.close()

    async def _connect(
        self, gate: HttpGate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect a client with a server, until either ends the connection."""
        with contextlib.closing(writer), counted() as admitted:
            head = await gate.admit(reader, writer) if admitted else None
            if head is None:
                return
            for pause_s in PAUSES:
                for path in sorted(self._sockets, key=lambda path: self._open[path]):
                    with contextlib.suppress(OSError):
                        server = await asyncio.open_unix_connection(path)
                        self._open[path] += 1
                        try:
                            server[1].write(head)
                            await _between((reader, writer), server)
                        finally:
                            self._open[path] -= 1
                        return
                self._revive()
                if self.failure or reader.at_eof():
                    return
                await asyncio.sleep(pause_s)

    def _revive(self) -> None:
        """Start dead servers again, in a thread, if nothing does that yet."""
        ended = {
            number: engine.how_it_ended()
            for number, engine in enumerate(self.replicas.engines)
            if engine.ended
        }
        if not ended or self._closing.is_set() or (self._reviving and not self._reviving.done()):
            return
        self._deaths.update(ended.keys())
        for number, how in ended.items():
            if (deaths := self._deaths[number]) > MOST_DEATHS:
                self.failure = f"engines.{self.name}: engine {number} died {deaths} times: {how}"
                return

        async def bring() -> None:
            try:
                await asyncio.to_thread(self._bring, self._closing)
            except FsbarrierError as error:
                self.failure = str(error)
                return
            for how in ended.values():
                why, *log = how.splitlines()
                self._restarts.append(
                    {"event": "engine_restarted", "engine": self.name, "why": why, "log": log}
                )

        self._reviving = asyncio.create_task(bring())


def address(host: str, offer: Mapping[str, object], name: str, patience_s: float) -> EngineAddress:
    """The address for programs of the engine `name` that the node at `host` offers."""
    host = f"[{host}]" if ":" in host else host
    return EngineAddress(f"http://{host}:{offer['port']}/v1", str(offer["key"]), name, patience_s)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _between(client: Streams, server: Streams) -> None:
    """Copy bytes in both directions. When one side closes, the other is closed too, so that no client takes a cut-off answer for a whole
    one."""
    one_way = [asyncio.create_task(_pass_on(a[0], b[1])) for a, b in ((client, server), (server, client))]
    try:
        await asyncio.wait(one_way, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in one_way:
            task.cancel()
        server[1].close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
