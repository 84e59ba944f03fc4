"""How a group member's wait ends when what it waits for does not come, and whom it names then."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fsbarrier.errors import BarrierTimeout, StoreError
from fsbarrier.group.member_threads import MemberThreads


@dataclass(frozen=True, slots=True)
class Awaited:
    """A node that did not come: the seconds without news of it, and what is known of it, in words."""

    rank: int
    host: str
    silent_s: float
    known: str


class BoundedWait:
    """A wait that ends after `timeout_s`. Time in which this process was stopped itself does not count: before it gives up, it must
    look for what came meanwhile."""

    def __init__(self, threads: MemberThreads, timeout_s: float, what: str) -> None:
        """`what`: the call that waits, for messages."""
        self._threads, self._timeout_s, self._what = threads, timeout_s, what
        self._left_s = timeout_s
        #: seconds since the looking thread last finished a look
        self._unseen_s = 0.0

    def for_news(self) -> None:
        """Wait for news, or a beat's time. Raises what ended the membership, StoreError where looks do not end, BarrierTimeout."""
        threads, most_s = self._threads, self._threads.beat_s
        with threads.news:
            before, started = threads.snapshot, time.monotonic()
            if before.failure is not None:
                raise before.failure
            threads.news.wait(max(0.0, min(most_s, self._left_s)))
            elapsed = min(time.monotonic() - started, most_s)
            self._left_s -= elapsed
            after = threads.snapshot
        looked = after.looked_at > before.looked_at
        self._unseen_s = 0.0 if looked else self._unseen_s + elapsed
        if after.failure is not None:
            raise after.failure
        if self._unseen_s > max(threads.rules.limits.dead_s, 2 * most_s):
            raise self._unanswered()
        if self._left_s <= 0 and (looked or self._unseen_s > most_s):
            raise self._timed_out()

    def _unanswered(self) -> StoreError:
        here, root = self._threads.here, self._threads.root
        message = f"node {here.rank}: {self._what}: {root} has not answered for {self._unseen_s:.0f} s"
        return StoreError(message, here.rank, here.host, self._unseen_s)

    def _timed_out(self) -> BarrierTimeout:
        node, here = self._threads.snapshot.node, self._threads.here
        awaited = self._not_joined() if node.generation is None else self._not_arrived()
        awaited = awaited or [Awaited(here.rank, here.host, 0.0, f"{here.host}, this node")]
        names = ", ".join(f"node {one.rank} ({one.known})" for one in awaited)
        message = (
            f"node {node.rank}: {self._what}: not passed within {self._timeout_s:g} s; waiting for {names}"
        )
        return BarrierTimeout(message, awaited[0].rank, awaited[0].host, awaited[0].silent_s)

    def _not_arrived(self) -> list[Awaited]:
        """The members of the generation that did not come to this node's row."""
        return [
            Awaited(
                one.member.rank,
                one.member.host,
                one.silent_s,
                f"{one.member.host}, last heartbeat {one.silent_s:.1f} s ago",
            )
            for one in self._threads.snapshot.missing
        ]

    def _not_joined(self) -> list[Awaited]:
        """The nodes that keep this one from joining: those that were not seen, and those that are in a generation without it."""
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
