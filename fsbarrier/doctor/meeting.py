"""Brings the doctors of several nodes together in the directory they examine, lets them talk, and tidies up after them.

In any order, each makes a record of its own in a lobby and counts in it. Who sees as many counting as were asked for and has the
lowest name leads: it makes a folder and names the members. Everything lies in one folder of the doctor's own, which goes with the
last one; who breaks off leaves its record, marked, so that the others notice, and they remove it. What a killed doctor left is
removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.doctor.messages import Message, Waiter, pack, read
from fsbarrier.errors import TooFewNodes, UsageError
from fsbarrier.machine.host import boot_id

FOLDER = ".fsbarrier-doctor"
BEAT_S = 0.2
SILENT_S = 35.0  # without a sign of life a node counts as gone
ANSWER_S = 40.0  # what one exchange may take, on a mount that shows things late
DEAD_S = 5.0  # a record that never moved for so long is a leftover
#: some mounts list late what they can open, others remember that a name was absent: each message has two names, one of which is
#: opened only when it was listed. The other is removed by who made it: it may be absent for all others
BLIND = ".blind"
BYE_S = 5.0
LINGER_S = 1.0
REMOVE_S = 12.0


def _remove_tree(folder: Path) -> None:
    """Remove a folder with what is in it; what others put there may be listed late."""
    waiter = Waiter(time.monotonic() + REMOVE_S)
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and waiter.again():
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Peer:
    """What one sees of another doctor: its record, and since when its counter has stood still."""

    record: Message
    since: float
    moved: bool = False


@dataclass
class Meeting:
    """One node's part. `rank`: None where nobody says it; `say` is told what is being waited for; `breaks_off` may end any wait."""

    path: Path
    num_nodes: int
    rank: int | None
    wait_s: float
    say: Callable[[str], None] = lambda line: None
    breaks_off: Callable[[], None] = lambda: None
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    members: dict[int, str] = field(default_factory=dict)
    leader: str = ""
    _peers: dict[str, Peer] = field(default_factory=dict)
    _before: frozenset[str] = frozenset()  # folders of other groups, when this one started
    _strays: frozenset[str] = frozenset()  # temporary files, likewise: no write takes as long as a doctor
    _ended: threading.Event = field(default_factory=threading.Event)
    _counter: int = 0
    _left: bool = False
    _blind: Path | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    @property
    def lobby(self) -> Path:
        return self.path / FOLDER / "lobby"

    @property
    def session(self) -> Path:
        return self.path / FOLDER / self.leader

    def host(self, rank: int) -> str:
        """Where a member is."""
        peer = self._peers.get(self.members[rank])
        return str(peer.record["host"]) if peer else socket.gethostname()

    def on_one_host(self) -> bool:
        """Whether all members run on this host."""
        others = [
            self._peers[token].record["boot_id"] for token in self.members.values() if token in self._peers
        ]
        return len(others) == self.num_nodes - 1 and set(others) <= {boot_id()}

    # --- coming together ----------------------------------------------------------------------------------------------

    def meet(self, folders: Collection[str]) -> int:
        """Wait for the others and give this node's rank; `folders` are made for all to use.

        Raises TooFewNodes past the deadline, UsageError where the nodes contradict each other, OSError.
        """
        files.make_dirs(self.lobby)
        self._before = frozenset(os.listdir(self.path / FOLDER)) - {"lobby"}
        self._strays = frozenset(name for name in os.listdir(self.lobby) if name.startswith("."))
        self._beat_once()
        self._thread = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._thread.start()
        begin = time.monotonic()
        waiter, told = Waiter(begin + self.wait_s), False
        while True:
            self.breaks_off()
            self._look()
            here = self._here()
            if self._agreed(here, folders):
                return next(rank for rank, token in self.members.items() if token == self.token)
            if not told and time.monotonic() - begin > 2.0:
                told = True
                self.say(f"waiting up to {self.wait_s:g} s for {self._missing(here)}")
            if not waiter.again():
                raise TooFewNodes(
                    f"doctor: {self._missing(here)} did not come within {self.wait_s:g} s; is `fsbarrier doctor` started there too, "
                    f"with the same --num-nodes, and is {self.path} the same shared directory on all nodes?"
                )

    def _here(self) -> dict[str, Message]:
        """Who is in the lobby, alive and without a group: token -> record."""
        recent = time.monotonic() - SILENT_S
        free = {
            token: peer.record
            for token, peer in self._peers.items()
            if peer.moved and peer.since > recent and not peer.record["members"] and not peer.record["left"]
        }
        return {**free, self.token: self._record()}

    def _agreed(self, here: Mapping[str, Message], folders: Collection[str]) -> bool:
        if self._named():
            self._beat_once()
            return True
        try:
            self._contradictions(here)
        except UsageError:
            self._ended.wait(
                LINGER_S
            )  # so that the others see it too, and need not wait for one that has gone
            raise
        if len(here) < self.num_nodes or min(here) != self.token:
            return False
        free = iter(sorted(set(range(self.num_nodes)) - {record["rank"] for record in here.values()}))
        members = {}
        for token in sorted(here):
            rank = here[token]["rank"]
            members[next(free) if rank is None else rank] = token
        self.leader = self.token
        for folder in ("talk", *folders):
            files.make_dirs(self.session / folder)
        self.members = dict(sorted(members.items()))
        self._beat_once()
        return True

    def _named(self) -> bool:
        """Whether a group names this doctor; then it is its group."""
        for peer in self._peers.values():
            if not self.members and self.token in peer.record["members"].values():
                self.leader = peer.record["leader"]
                self.members = {int(rank): name for rank, name in peer.record["members"].items()}
        return bool(self.members)

    def _contradictions(self, here: Mapping[str, Message]) -> None:
        ranks: dict[int, str] = {}
        for token in sorted(here):
            record = here[token]
            if record["num_nodes"] != self.num_nodes:
                raise UsageError(
                    f"--num-nodes {self.num_nodes} here, {record['num_nodes']} on {record['host']}: give all nodes the same"
                )
            if record["rank"] in ranks:
                both = f"on {ranks[record['rank']]} and {record['host']}"
                raise UsageError(f"two doctors say that they are node {record['rank']}: {both}")
            if record["rank"] is not None:
                ranks[record["rank"]] = record["host"]
        if len(here) > self.num_nodes:
            hosts = ", ".join(sorted(record["host"] for record in here.values()))
            raise UsageError(f"--num-nodes {self.num_nodes}, but {len(here)} doctors are here: {hosts}")

    def _missing(self, here: Mapping[str, Message]) -> str:
        ranks = {record["rank"] for record in here.values()}
        if None in ranks:
            hosts = ", ".join(sorted(str(record["host"]) for record in here.values()))
            return f"{self.num_nodes - len(here)} of {self.num_nodes} nodes ({hosts} came)"
        absent = sorted(set(range(self.num_nodes)) - ranks)
        if not absent:
            return "the others to agree"
        return ("node " if len(absent) == 1 else "nodes ") + ", ".join(map(str, absent))

    # --- talking ------------------------------------------------------------------------------------------------------

    def exchange(self, name: str, message: Mapping[str, Any], *, last: bool = False) -> dict[int, Message]:
        """Say something, and hear what every node says under the same name. Raises TooFewNodes naming who fell silent."""
        me = next(rank for rank, token in self.members.items() if token == self.token)
        before, self._blind = self._blind, None if last else self._said(name, me).with_suffix(BLIND)
        self._put(name, me, message)
        heard: dict[int, Message] = {me: dict(message)}
        waiter = Waiter(time.monotonic() + ANSWER_S)
        while True:
            listed = self._listed()
            for rank in self.members.keys() - heard.keys():
                path = self._said(name, rank)
                found = read(path) if path.name in listed else None
                found = read(path.with_suffix(BLIND)) if found is None else found
                if found is not None:
                    heard[rank] = found
            if len(heard) == len(self.members):
                if before is not None:  # all have heard what was said before this
                    before.unlink(missing_ok=True)
                return dict(sorted(heard.items()))
            self.heed(name, self.members.keys() - heard.keys())
            if not waiter.again():
                rank = min(self.members.keys() - heard.keys())
                raise TooFewNodes(
                    f"doctor: node {rank} ({self.host(rank)}) has not said within {ANSWER_S:g} s: {name}"
                )

    def heed(self, awaited: str, ranks: Collection[int]) -> None:
        """See whether one of these has gone who should still say what is `awaited`. Raises TooFewNodes naming it."""
        self.breaks_off()
        self._look()
        for rank in sorted(ranks):
            if self._has_left(self.members[rank]):
                raise TooFewNodes(f"doctor: node {rank} ({self.host(rank)}) left before it said: {awaited}")

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.session / "talk")
        except OSError:
            return []

    def _said(self, name: str, rank: int) -> Path:
        return self.session / "talk" / f"{name}.{rank}.json"

    def _put(self, name: str, rank: int, message: Mapping[str, Any]) -> None:
        path = self._said(name, rank)
        try:
            files.write_atomic(path, pack(message))
            if self._blind is not None:
                files.write_atomic(self._blind, pack(message))
        except FileNotFoundError:
            self._look()
            gone = [
                f"node {r} ({self.host(r)})" for r, token in self.members.items() if self._has_left(token)
            ]
            who = gone[0] if gone else "another node"
            raise TooFewNodes(f"doctor: {who} left before this one said: {name}") from None

    # --- signs of life ------------------------------------------------------------------------------------------------

    def _record(self) -> Message:
        members = {str(rank): token for rank, token in self.members.items()}
        about = {
            "host": socket.gethostname(),
            "rank": self.rank,
            "num_nodes": self.num_nodes,
            "boot_id": boot_id(),
        }
        state = {"counter": self._counter, "leader": self.leader, "members": members, "left": self._left}
        return {**about, **state}

    def _beat_once(self) -> None:
        with self._lock:
            self._counter += 1
            record = pack(self._record())
            try:
                files.write_atomic(self.lobby / self.token, record)
            except FileNotFoundError:  # the last doctor of another group has just tidied up
                files.make_dirs(self.lobby)
                files.write_atomic(self.lobby / self.token, record)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._beat_once()

    def _look(self) -> None:
        now = time.monotonic()
        names = [name for name in os.listdir(self.lobby) if not name.startswith(".")]
        for token in {*names, *self.members.values()} - {self.token}:
            record = read(self.lobby / token)
            if record is None:
                continue
            old = self._peers.get(token)
            if old is None:
                self._peers[token] = Peer(record, now)
            elif old.record["counter"] != record["counter"]:
                self._peers[token] = Peer(record, now, moved=True)

    def _has_left(self, token: str) -> bool:
        peer = self._peers.get(token)
        return peer is not None and (peer.record["left"] or time.monotonic() - peer.since > SILENT_S)

    # --- going --------------------------------------------------------------------------------------------------------

    def close(self, *, done: bool) -> None:
        """Leave nothing behind. `done`: all went well, so the leader lets the others read what it said. Never raises."""
        with contextlib.suppress(OSError, TooFewNodes):
            if done and self.members:
                me = next(rank for rank, token in self.members.items() if token == self.token)
                self._put("bye", me, {})
                if self.leader == self.token:
                    self._await_byes()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._left = not done
        with contextlib.suppress(OSError):
            self._look()
            if self._left and self._named():
                self._beat_once()
        others = set(self.members.values()) - {self.token}
        last = self._left and all(self._has_left(token) for token in others)
        dead = {token for token in self._peers if self._is_dead(token)} | (others if last else set())
        alone = done or last or not self.members
        records, session = (
            dead | ({self.token} if alone else set()),
            self.leader if last or self._leads else "",
        )
        self._remove(records, session)
        waiter = Waiter(time.monotonic() + LINGER_S)  # who has just left may still be writing
        while last and (self.path / FOLDER).exists() and waiter.again():
            self._remove(records, session)

    @property
    def _leads(self) -> bool:
        return self.leader == self.token and not self._left

    def _remove(self, records: set[str], session: str) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self.lobby):  # with what an interrupted write of theirs left
                if name.lstrip(".").partition(".")[0] in records or name in self._strays:
                    (self.lobby / name).unlink(missing_ok=True)
        orphans = self._before - self._peers.keys()
        for folder in {session, *records, *orphans} - {""}:
            _remove_tree(self.path / FOLDER / folder)
        for emptied in (self.lobby, self.path / FOLDER):
            with contextlib.suppress(OSError):  # another may have removed the one and not the other
                emptied.rmdir()

    def _is_dead(self, token: str) -> bool:
        """Whether it was seen to be no more than a file: of a doctor that was killed, or broke off."""
        peer = self._peers[token]
        left = peer.record["left"] and token not in self.members.values()
        return left or time.monotonic() - peer.since > (SILENT_S if peer.moved else DEAD_S)

    def _await_byes(self) -> None:
        waiter = Waiter(time.monotonic() + BYE_S)
        while not {self._said("bye", rank).name for rank in self.members} <= set(self._listed()):
            if not waiter.again():
                return
