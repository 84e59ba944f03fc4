"""Where doctors that know nothing of each other meet: who has come, and which rank has each?

A group (`fsbarrier.join`) must be told every node's rank, and takes a second node of one rank for a restart of the first. Doctors are
started by hand, in any order, most often without ranks and now and then twice with the same: this much is found out by hand here,
before they join a group.

Each doctor writes a record that lists all the others whose records it has read. Whoever finds itself on another's list knows that the
other lives now: what a killed doctor left behind lists nobody who came later. So no heartbeat is needed, and nothing rests on an exclusive
create, which the doctors are only about to test: all who are here draw the same conclusions from the same records.
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
from fsbarrier.retry import retry

TELL_AFTER_S = 2.0
#: how often a doctor writes its record anew: some mounts list what is new in a folder only after a change of their own in it
RENEW_S = 0.5
#: a doctor that refuses to go on stays for so long, so that the others find out the same and do not wait for it
LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class Visitor:
    """A doctor's record in the lobby. `rank`: None where nobody said it; `met`: the tokens of those whose records it has read."""

    token: str
    num_nodes: int
    rank: int | None
    met: tuple[str, ...] = ()
    host: str = field(default_factory=host_name)
    boot_id: str = field(default_factory=boot_id)


class Lobby:
    """One doctor's presence in a folder where doctors meet; its record stays there until `leave`."""

    def __init__(self, folder: Path, num_nodes: int, rank: int | None) -> None:
        self.folder = folder
        self.me = Visitor(secrets.token_hex(8), num_nodes, rank)
        #: all who ever were here together with this doctor
        self._came = {self.me.token: self.me}
        self._written_at = 0.0

    def gather(
        self, wait_s: float, say: Callable[[str], None], heed_signals: Callable[[], None]
    ) -> dict[int, Visitor]:
        """Wait until all have come: rank -> visitor, the same for all of them.

        Raises TooFewNodes past the deadline, UsageError where the nodes contradict each other, OSError.
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
                f"doctor: {self._missing(self._look())} did not come within {wait_s:g} s; is `fsbarrier doctor` started there too, "
                f"with the same --num-nodes, and is {self.folder.parent.parent} the same shared directory on all nodes?"
            )
        # The free ranks go to those that said none, in the order of tokens.
        said = {visitor.rank for visitor in here.values()}
        free = (rank for rank in range(len(here)) if rank not in said)
        return {next(free) if v.rank is None else v.rank: v for _, v in sorted(here.items())}

    def leave(self) -> None:
        """Take this doctor's record away. Raises OSError."""
        (self.folder / self.me.token).unlink(missing_ok=True)

    def present(self) -> frozenset[str]:
        """The names of all records that are there: their doctors' tokens. Raises OSError."""
        return frozenset(os.listdir(self.folder))

    def _look(self) -> dict[str, Visitor]:
        """Those who are here now: token -> record. Raises UsageError where they contradict each other, OSError."""
        if time.monotonic() - self._written_at > RENEW_S:
            # Between its two steps the last doctor of an earlier visit may take the empty folder away.
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
                return f"--num-nodes {num_nodes} here, {visitor.num_nodes} on {visitor.host}: give all nodes the same"
            if visitor.rank is not None and (other := by_rank.setdefault(visitor.rank, visitor)) != visitor:
                return (
                    f"two doctors say that they are node {visitor.rank}: on {other.host} and {visitor.host}"
                )
        if len(here) > num_nodes:
            return f"--num-nodes {num_nodes}, but {len(here)} doctors are here: {_hosts(here)}"
        return ""

    def _missing(self, here: Mapping[str, Visitor]) -> str:
        """Who has not come, for people. A doctor that has just given up did come, unless nobody else is missing."""
        num_nodes = self.me.num_nodes
        here = self._came if len(self._came) < num_nodes else here
        ranks = {visitor.rank for visitor in here.values()}
        if None in ranks:
            return f"{num_nodes - len(here)} of {num_nodes} nodes ({_hosts(here)} came)"
        absent = [str(rank) for rank in range(num_nodes) if rank not in ranks]
        return ("node " if len(absent) == 1 else "nodes ") + ", ".join(absent)


def visitor_of(path: Path) -> Visitor | None:
    """The record at `path`; None for anything else."""
    message = read(path) or {}
    try:
        return Visitor(**{**message, "met": tuple(message["met"])})
    except (KeyError, TypeError):
        return None


def _hosts(here: Mapping[str, Visitor]) -> str:
    return ", ".join(sorted(visitor.host for visitor in here.values()))
