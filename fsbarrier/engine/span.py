"""One engine over several nodes (`engine.nodes`): how its servers find each other, and end together.

The first node of a group is its head, whose server answers requests; the others run vLLM's headless part. Each node's join record contains
a port and a key. The others connect to the head's port and report which of its addresses they reached; the head replies where vLLM's
processes meet. The connections stay open: the head sends on them what it serves. A node whose server ends closes its connections, and the
others then end their servers. vLLM does not do that: its head reports itself healthy when another part has died, and a headless part
outlives its head.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec

from fsbarrier.context import Span
from fsbarrier.errors import ProgramFailed
from fsbarrier.network.listening import MOST_WITHOUT_KEY, listen, port_of, reachable, same_key, stranger
from fsbarrier.processes.supervisor import Child
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.store.foreign_json import NotJson, parse_object

# How often a wait checks whether it is called off, and a node whether another node's server has ended.
SLICE_S = 0.1
# How long a new connection may take to identify itself.
HELLO_S = 3.0
LONGEST_BYTES = 1 << 16
# A host that has vanished does not close its connections.
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where vLLM's processes of all nodes meet. All use the same `seed`. `place`: this node's index; `own_address`: this node's address."""

    nodes: int
    place: int
    address: str
    port: int
    own_address: str
    seed: int


class Link:
    """A connection between two nodes. Each line is a JSON object."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.ended, self._received = connection, False, b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: JsonObject) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> JsonObject | None:
        """Receive the next object; None: nothing has come within `timeout_s`, or the connection has ended."""
        if b"\n" not in self._received and select.select([self.connection], [], [], timeout_s)[0]:
            data = b""
            with contextlib.suppress(OSError):
                data = self.connection.recv(4096)
            self._received += data
            self.ended = not data or len(self._received) > LONGEST_BYTES
        line, complete, rest = self._received.partition(b"\n")
        if not complete:
            return None
        self._received = rest
        try:
            received = parse_object(line)
        except NotJson:
            self.ended = True
        return None if self.ended else received

    def close(self) -> None:
        self.connection.close()


class HeadListener:
    """The head's listener, to which the other nodes of its engine connect."""

    def __init__(self, listening: Sequence[socket.socket]) -> None:
        self._listening, self._key = listening, secrets.token_urlsafe(24)

    @property
    def offer(self) -> JsonObject:
        """The port and key that this node's join record gives to the others."""
        return {"port": port_of(self._listening[0]), "key": self._key}

    def gather(
        self, span: Span, deadline: float, called_off: Callable[[], bool]
    ) -> tuple[list[Link], Meeting]:
        """Wait until all other nodes have connected, and tell them where vLLM's processes meet. Raises ProgramFailed."""
        arrived: dict[int, tuple[Link, list[str]]] = {}
        unidentified: list[tuple[Link, float]] = []
        for _ in _until(deadline, called_off):
            if len(arrived) == len(span.nodes) - 1:
                break
            waiting = [*self._listening, *(link.connection for link, _ in unidentified)]
            for listener in set(select.select(waiting, [], [], SLICE_S)[0]) & {*self._listening}:
                unidentified += self._accept(listener)
            # If too many have not identified themselves, the oldest are closed and must connect again.
            unidentified, crowded = unidentified[-MOST_WITHOUT_KEY:], unidentified[:-MOST_WITHOUT_KEY]
            for link, _ in crowded:
                link.close()
            for connected in [*unidentified]:
                if (identified := self._hello(*connected, span)) is not None:
                    unidentified.remove(connected)
                    arrived |= identified
            for link, _ in arrived.values():
                link.receive(0)
            # Forget nodes whose connection has ended in the meantime. They connect again.
            arrived = {place: known for place, known in arrived.items() if not known[0].ended}
        for link, _ in unidentified:
            link.close()
        if len(arrived) < len(span.nodes) - 1:
            missing = [
                str(rank) for place, (rank, _) in enumerate(span.nodes) if place and place not in arrived
            ]
            raise ProgramFailed(
                f"engine.nodes={len(span.nodes)}: node {', '.join(missing)} did not come in time (engine.start_timeout_s)"
            )
        address = next(
            (a for a in span.addresses if all(a in reached for _, reached in arrived.values())), None
        )
        if address is None:
            tried = "; ".join(
                f"node {span.nodes[n][0]} reached {r or 'none'}" for n, (_, r) in arrived.items()
            )
            raise ProgramFailed(
                f"no address of node {span.nodes[0][0]} is reached by all of its engine: {tried}"
            )
        # Only find a free port here. vLLM opens it itself a moment later.
        listeners = listen((address,))
        port = port_of(listeners[0])
        for listener in listeners:
            listener.close()
        meeting = Meeting(len(span.nodes), 0, address, port, address, secrets.randbits(31))
        for link, _ in arrived.values():
            link.send(asdict(meeting))
        return [link for link, _ in arrived.values()], meeting

    def _accept(self, listening: socket.socket) -> list[tuple[Link, float]]:
        """A new connection with its deadline to identify itself; [] if another user of this machine made it."""
        # The client may have gone already, or this process may lack descriptors for now.
        with contextlib.suppress(OSError):
            connection = listening.accept()[0]
            if not stranger(connection.getpeername(), connection.getsockname()):
                return [(Link(connection), time.monotonic() + HELLO_S)]
            connection.close()
        return []

    def _hello(self, link: Link, until: float, span: Span) -> dict[int, tuple[Link, list[str]]] | None:
        """The place of a node of this engine, with the addresses it reached; {} if it is no such node; None: nothing has come yet."""
        match link.receive(0):
            case {"key": str(key), "nodes": nodes, "place": int(place), "reached": [*reached]} if (
                same_key(key, self._key)
                and nodes == [list(n) for n in span.nodes]
                and 0 < place < len(span.nodes)
            ):
                return {place: (link, [str(address) for address in reached])}
            case None if not link.ended and time.monotonic() < until:
                return None
        link.close()
        return {}


def meet(span: Span, deadline: float, called_off: Callable[[], bool]) -> tuple[Link, Meeting]:
    """Connect to the head, and wait until it says where vLLM's processes meet. Raises ProgramFailed."""
    head = f"node {span.nodes[0][0]}, the head of this node's engine"
    link: Link | None = None
    for _ in _until(deadline, called_off):
        if link is None or link.ended:
            reached = reachable(span.addresses, span.port)
            with contextlib.suppress(OSError, IndexError):
                link = Link(socket.create_connection((reached[0], span.port), timeout=HELLO_S))
                nodes = [list(node) for node in span.nodes]
                link.send({"key": span.key, "nodes": nodes, "place": span.place, "reached": reached})
        elif (reply := link.receive(SLICE_S)) is not None:
            own = str(link.connection.getsockname()[0])
            with contextlib.suppress(msgspec.ValidationError):
                return link, msgspec.convert({**reply, "place": span.place, "own_address": own}, Meeting)
            # Another program listens there.
            link.close()
            link = None
    raise ProgramFailed(f"{head}, did not answer at {', '.join(span.addresses)} port {span.port}")


def _until(deadline: float, called_off: Callable[[], bool]) -> Iterator[None]:
    """Yield until the deadline. Raises ProgramFailed once the start is called off."""
    while time.monotonic() < deadline:
        if called_off():
            raise ProgramFailed("the start of an engine over several nodes was called off")
        yield


class PeerLinks:
    """Watches the links to the other nodes of an engine, and ends this node's server when another node's has ended."""

    def __init__(self, child: Child, links: Sequence[Link]) -> None:
        self._child, self._links = child, links
        #: the last turn (`Span.turn`) for which the head reported that it serves
        self.serving: object = None
        #: whether another node's server ended before this one
        self.broken = False
        threading.Thread(target=self._watch, name="peer-links", daemon=True).start()

    def send_serving(self, turn: tuple[int, int, int]) -> None:
        for link in self._links:
            link.send({"serving": turn})

    def _watch(self) -> None:
        while self._child.poll() is None and not self.broken:
            for link in self._links:
                if (message := link.receive(SLICE_S)) is not None:
                    self.serving = message.get("serving")
                self.broken = self.broken or link.ended
        for link in self._links:
            link.close()
        # If the server hangs in the kernel, the next call that stops it reports that.
        with contextlib.suppress(ProgramFailed):
            self._child.stop(0.0)
