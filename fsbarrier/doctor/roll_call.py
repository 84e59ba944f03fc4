"""The lobby in which doctors find each other and assign ranks.

`fsbarrier.join` needs every node's rank, and treats a second node with the same rank as a restart. Users start doctors by hand, in any
order, usually without ranks and sometimes with the same rank twice. The lobby resolves this before the doctors join a group.

Each doctor writes a record that lists the other doctors whose records it has read. A doctor that finds itself on another's list knows that
the other is alive, because a record left by a killed doctor cannot list later arrivals. This needs neither heartbeats nor exclusive create,
which the doctors have yet to test. All doctors reach the same result from the same records.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor.messages import pack, read, wait_for
from fsbarrier.errors import TooFewNodes, UsageError
from fsbarrier.host.identity import boot_id, host_name
from fsbarrier.retry import Backoff, retry

TELL_AFTER_S = 2.0
#: When a doctor rewrites its record: some mounts list new files only after a local change in the folder, others show new content only
#: seconds later, and never if it is replaced before.
RENEWALS = Backoff(0.5, 8.0, factor=2.0)
#: a doctor that gives up stays visible for this long, so that the others reach the same result instead of waiting for it
LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class Visitor:
    """A doctor's record in the lobby. `rank`: None if unknown; `met`: the tokens of the doctors whose records it has read."""

    token: str
    num_nodes: int
    rank: int | None
    met: tuple[str, ...] = ()
    host: str = field(default_factory=host_name)
    boot_id: str = field(default_factory=boot_id)


class Lobby:
    """One doctor's presence in the lobby; its record stays there until `leave`."""

    def __init__(self, folder: Path, num_nodes: int, rank: int | None) -> None:
        self.folder = folder
        self.me = Visitor(secrets.token_hex(8), num_nodes, rank)
        #: all doctors seen so far
        self._came = {self.me.token: self.me}
        self._written_at = 0.0
        self._renewals = iter(RENEWALS)
        self._renew_after_s = 0.0

    def gather(
        self, wait_s: float, say: Callable[[str], None], heed_signals: Callable[[], None]
    ) -> dict[int, Visitor]:
        """Wait until all doctors have arrived, and return rank -> visitor, the same on all nodes.

        Raises TooFewNodes past the deadline, UsageError if the nodes' flags contradict each other, OSError.
        """
        begin, announced = time.monotonic(), False

        def look() -> dict[str, Visitor] | None:
            nonlocal announced
            heed_signals()
            here = self._look()
            if not announced and time.monotonic() - begin > TELL_AFTER_S:
                announced = True
                say(f"waiting up to {wait_s:g} s for {self._missing(here)}")
            return here if len(here) == self.me.num_nodes else None

        here = wait_for(look, begin + wait_s)
        if here is None:
            raise TooFewNodes(
                f"doctor: {self._missing(self._look())} did not arrive within {wait_s:g} s. Check that `fsbarrier doctor` runs there with "
                f"the same --num-nodes, and that {self.folder.parent.parent} is the same shared directory on all nodes."
            )
        # Assign free ranks to the doctors without one, in order of their tokens.
        said = {visitor.rank for visitor in here.values()}
        free = (rank for rank in range(len(here)) if rank not in said)
        return {next(free) if v.rank is None else v.rank: v for _, v in sorted(here.items())}

    def leave(self) -> None:
        """Remove this doctor's record. Raises OSError."""
        (self.folder / self.me.token).unlink(missing_ok=True)

    def present(self) -> frozenset[str]:
        """The tokens of all doctors with a record. Raises OSError."""
        return frozenset(os.listdir(self.folder))

    def _look(self) -> dict[str, Visitor]:
        """The doctors present now: token -> record. Raises UsageError if their flags contradict each other, OSError."""
        if time.monotonic() - self._written_at > self._renew_after_s:
            self._renew_after_s = next(self._renewals)
            # The last doctor of an earlier visit may remove the empty folder between our two steps.
            retry(self._write, errnos={errno.ENOENT})
        found = [visitor_of(self.folder / name) for name in self.present() - {self.me.token}]
        others = {visitor.token: visitor for visitor in found if visitor is not None}
        if others.keys() != set(self.me.met):
            self.me = replace(self.me, met=tuple(others))
            self._write()
        here = {token: visitor for token, visitor in others.items() if self.me.token in visitor.met}
        here[self.me.token] = self.me
        self._came |= here
        if contradiction := self._contradiction(here):
            threading.Event().wait(LINGER_S)
            raise UsageError(contradiction)
        return here

    def _write(self) -> None:
        files.make_dirs(self.folder)
        files.write_atomic(self.folder / self.me.token, pack(asdict(self.me)))
        self._written_at = time.monotonic()

    def _contradiction(self, here: Mapping[str, Visitor]) -> str:
        num_nodes, by_rank = self.me.num_nodes, dict[int, Visitor]()
        for visitor in here.values():
            if visitor.num_nodes != num_nodes:
                return f"--num-nodes is {num_nodes} here but {visitor.num_nodes} on {visitor.host}; use the same value on all nodes"
            if visitor.rank is not None and (other := by_rank.setdefault(visitor.rank, visitor)) != visitor:
                return f"two doctors have rank {visitor.rank}, on {other.host} and {visitor.host}; give them different ranks"
        if len(here) > num_nodes:
            return f"--num-nodes {num_nodes}, but {len(here)} doctors are running: {_hosts(here)}"
        return ""

    def _missing(self, here: Mapping[str, Visitor]) -> str:
        """The missing nodes, as text. A doctor that has just given up counts as arrived, unless nobody else is missing."""
        num_nodes = self.me.num_nodes
        here = self._came if len(self._came) < num_nodes else here
        ranks = {visitor.rank for visitor in here.values()}
        if None in ranks:
            return f"{num_nodes - len(here)} of {num_nodes} nodes ({_hosts(here)} arrived)"
        absent = [str(rank) for rank in range(num_nodes) if rank not in ranks]
        return ("node " if len(absent) == 1 else "nodes ") + ", ".join(absent)


def visitor_of(path: Path) -> Visitor | None:
    """The record at `path`; None if it is missing or invalid."""
    message = read(path) or {}
    try:
        return Visitor(**{**message, "met": tuple(message["met"])})
    except (KeyError, TypeError):
        return None


def _hosts(here: Mapping[str, Visitor]) -> str:
    return ", ".join(sorted(visitor.host for visitor in here.values()))
