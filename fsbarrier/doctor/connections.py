"""Whether the nodes reach each other: each listens on a free port for a moment, and each connects to all addresses of the others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsbarrier.doctor.findings import OK, WARNING, Check, Findings
from fsbarrier.host.rendezvous import listen, port_of

CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Door:
    """Where a node can be reached, and the word that it says to whoever comes: a stranger may have the same port elsewhere."""

    addresses: tuple[str, ...]
    port: int
    word: str

    def answers_at(self, address: str) -> bool:
        """Whether it is this door that opens at an address."""
        try:
            with socket.create_connection((address, self.port), CONNECT_S) as line:
                line.settimeout(CONNECT_S)
                return line.recv(len(self.word), socket.MSG_WAITALL) == self.word.encode()
        except OSError:
            return False


@contextlib.contextmanager
def opened(addresses: tuple[str, ...], word: str, *, loopback: bool) -> Iterator[Door]:
    """This node's door, for as long as the `with` block lasts. `loopback`: reachable from this host only. Raises OSError."""
    listening = listen(loopback=loopback)

    def greet() -> None:
        while True:
            try:
                visitor, _ = listening.accept()
            except OSError:
                # The door was closed.
                return
            with contextlib.suppress(OSError), visitor:
                visitor.settimeout(CONNECT_S)
                visitor.sendall(word.encode())

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    try:
        yield Door(addresses, port_of(listening), word)
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def reached(doors: Mapping[int, Door]) -> dict[int, list[str]]:
    """For each other node the addresses at which it answers from here, in their order; all are tried at once."""
    tries = [(rank, address) for rank, door in doors.items() for address in door.addresses]
    with ThreadPoolExecutor(max(1, len(tries))) as pool:
        answers = list(pool.map(lambda item: doors[item[0]].answers_at(item[1]), tries))
    answered = [each for each, answer in zip(tries, answers, strict=True) if answer]
    return {rank: [address for at, address in answered if at == rank] for rank in doors}


def judge(findings: Findings) -> Check:
    """Whether all nodes reach each other."""
    cut = [
        f"node {rank} does not reach node {other} ({', '.join(findings[int(other)].about.addresses)})"
        for rank, node in findings.items()
        for other, addresses in node.reached.items()
        if not addresses
    ]
    if cut:
        advice = "updates of several nodes need it: open the nodes' ports to each other"
        return Check("ports", WARNING, "\n".join(cut), advice)
    # For each node the address at which the first of the others reached it.
    used: dict[int, str] = {}
    for node in findings.values():
        for other, addresses in node.reached.items():
            used.setdefault(int(other), addresses[0])
    finding = ", ".join(f"node {rank} at {address}" for rank, address in sorted(used.items()))
    return Check("ports", OK, f"every node reaches every other: {finding}")
