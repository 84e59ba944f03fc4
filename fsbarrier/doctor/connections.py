"""Tests the network between the nodes: each node listens on a free port and connects to all addresses of the others."""

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
    """A node's addresses and port, and the token it sends to clients. The token proves that a connection reached the right process."""

    addresses: tuple[str, ...]
    port: int
    word: str

    def answers_at(self, address: str) -> bool:
        """Whether this node answers at an address."""
        try:
            with socket.create_connection((address, self.port), CONNECT_S) as line:
                line.settimeout(CONNECT_S)
                return line.recv(len(self.word), socket.MSG_WAITALL) == self.word.encode()
        except OSError:
            return False


@contextlib.contextmanager
def opened(addresses: tuple[str, ...], word: str, *, loopback: bool) -> Iterator[Door]:
    """Listen for the duration of the `with` block. `loopback`: only on this host. Raises OSError."""
    listening = listen(loopback=loopback)

    def greet() -> None:
        while True:
            try:
                visitor, _ = listening.accept()
            except OSError:
                # The listening socket was closed.
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
    """For each other node the addresses at which it answers, in the node's order. Tries all in parallel."""
    tries = [(rank, address) for rank, door in doors.items() for address in door.addresses]
    with ThreadPoolExecutor(max(1, len(tries))) as pool:
        answers = list(pool.map(lambda item: doors[item[0]].answers_at(item[1]), tries))
    answered = [each for each, answer in zip(tries, answers, strict=True) if answer]
    return {rank: [address for at, address in answered if at == rank] for rank in doors}


def judge(findings: Findings) -> Check:
    """Whether all nodes reach each other."""
    cut = [
        f"node {rank} cannot connect to node {other} ({', '.join(findings[int(other)].about.addresses)})"
        for rank, node in findings.items()
        for other, addresses in node.reached.items()
        if not addresses
    ]
    if cut:
        advice = "multi-node updates need connections between all nodes; check the firewall"
        return Check("ports", WARNING, "\n".join(cut), advice)
    # For each node, the address at which the first other node reached it.
    used: dict[int, str] = {}
    for node in findings.values():
        for other, addresses in node.reached.items():
            used.setdefault(int(other), addresses[0])
    finding = ", ".join(f"node {rank} at {address}" for rank, address in sorted(used.items()))
    return Check("ports", OK, f"all nodes can connect to each other: {finding}")
