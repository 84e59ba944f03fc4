"""A group member's wait with a timeout, whose errors name the missing nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fsbarrier.errors import BarrierTimeout, NodeError, StoreError
from fsbarrier.group.member import Snapshot
from fsbarrier.group.member_threads import MemberThreads

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Awaited:
    """A missing node: how long it has been silent, and what is known about it, for people."""

    rank: int
    host: str
    silent_s: float
    known: str


class BoundedWait:
    """A wait that ends after `timeout_s`. Of a time in which this process was stopped, at most one heartbeat counts. If that was the last
    one, there is one heartbeat more, once, to look for what came meanwhile: a process that is stopped repeatedly still gives up."""

    def __init__(self, threads: MemberThreads, timeout_s: float, what: str) -> None:
        """`what`: the waiting call, for messages."""
        self._threads, self._timeout_s, self._what = threads, timeout_s, what
        self._left_s, self._more_s = timeout_s, threads.beat_s
        #: seconds since the looking thread last finished a look without an error
        self._unseen_s = 0.0

    def until(self, found: Callable[[Snapshot], T | None]) -> T:
        """The first result of `found(snapshot)` that is not None.

        Raises what `found` raises; the error that ended the membership; StoreError if looks fail or hang for `dead_s`, or at the
        timeout; BarrierTimeout.
        """
        threads, error = self._threads, None
        with threads.news:
            while (value := found(threads.snapshot)) is None:
                if threads.snapshot.failure is not None:
                    raise threads.snapshot.failure
                if error is not None:
                    raise error
                error = self._wait()
        return value

    def _wait(self) -> NodeError | None:
        """Wait for news, at most as long as a heartbeat. The error if the wait is over, unless the last news is what it waited for."""
        threads, most_s = self._threads, min(self._threads.beat_s, self._left_s)
        looked_at, started = threads.snapshot.looked_at, time.monotonic()
        threads.news.wait(most_s)
        elapsed = time.monotonic() - started
        stopped = elapsed > most_s + threads.beat_s
        counted = most_s if stopped else elapsed
        self._left_s -= counted
        if stopped and self._left_s <= 0:
            self._left_s, self._more_s = self._more_s, 0.0
        self._unseen_s = 0.0 if threads.snapshot.looked_at > looked_at else self._unseen_s + counted
        if self._unseen_s > threads.rules.limits.dead_s:
            return self._directory_error()
        if self._left_s > 0:
            return None
        # In a long wait, looks are a heartbeat apart, so one heartbeat without a look proves nothing.
        unseen = self._unseen_s >= min(2 * threads.beat_s, self._timeout_s)
        return self._directory_error() if unseen else self._timeout_error()

    def _directory_error(self) -> StoreError:
        here, root, trouble = self._threads.here, self._threads.root, self._threads.snapshot.trouble
        failing = f"has failed for {self._unseen_s:.3g} s: {trouble}"
        silent = f"has not answered for {self._unseen_s:.3g} s while {self._threads.doing()}"
        message = f"node {here.rank}: {self._what}: {root} {failing if trouble else silent}"
        return StoreError(message, here.rank, here.host, self._unseen_s)

    def _timeout_error(self) -> BarrierTimeout:
        snapshot, here = self._threads.snapshot, self._threads.here
        awaited = self._not_joined() if snapshot.node.generation is None else self._not_arrived()
        awaited = awaited or [Awaited(here.rank, here.host, 0.0, f"{here.host}, this node")]
        names = ", ".join(f"node {one.rank} ({one.known})" for one in awaited)
        message = (
            f"node {here.rank}: {self._what}: not passed within {self._timeout_s:g} s; waiting for {names}"
        )
        return BarrierTimeout(message, awaited[0].rank, awaited[0].host, awaited[0].silent_s)

    def _not_arrived(self) -> list[Awaited]:
        """The members of the generation that have not reached this node's row."""
        snapshot, now, found = self._threads.snapshot, time.monotonic(), []
        node = snapshot.node
        for member in node.generation.members if node.generation is not None else ():
            if member.rank != self._threads.here.rank and member.rank not in snapshot.arrived:
                heard_s = snapshot.ledger.age(member, now)
                silent_s = now - node.since if heard_s is None else heard_s
                known = f"{member.host}, last heartbeat {silent_s:.1f} s ago"
                found.append(Awaited(member.rank, member.host, silent_s, known))
        return found

    def _not_joined(self) -> list[Awaited]:
        """The nodes that this one waits for to join: those that it has not seen, and those in a generation without it."""
        snapshot, rules = self._threads.snapshot, self._threads.rules
        now, found = time.monotonic(), []
        for rank in range(rules.num_nodes):
            join, seen = snapshot.joins.get(rank), snapshot.ledger.seen.get(rank)
            if rank == self._threads.here.rank or rank in snapshot.joiners:
                continue
            if join is None:
                found.append(Awaited(rank, "", self._timeout_s, "never seen"))
                continue
            silent_s = self._timeout_s if seen is None else now - seen.since
            known = f"last heartbeat {silent_s:.1f} s ago"
            if seen is not None and silent_s < rules.limits.dead_s and seen.beat.state == "running":
                known = "a member of a group that must call regroup() to let this one in"
            found.append(Awaited(rank, join.host, silent_s, f"{join.host}, {known}"))
        return found
