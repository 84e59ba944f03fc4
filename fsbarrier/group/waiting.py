"""The end of a group member's wait, and whom it waited for."""

from __future__ import annotations

import time

from fsbarrier.errors import BarrierTimeout, StoreError
from fsbarrier.group.presence import Presence


class Patience:
    """A wait that ends. Time in which this process did not run itself does not count: it must first see what it missed."""

    def __init__(self, presence: Presence, timeout_s: float, what: str) -> None:
        self.presence, self.timeout_s, self.what = presence, timeout_s, what
        self.left, self.blind = timeout_s, 0.0

    def wait(self) -> None:
        """Wait for news. Raises what ended the membership, StoreError where nothing is seen any more, BarrierTimeout."""
        presence, most = self.presence, self.presence.beat_s
        with presence.changed:
            sight, started = presence.sight, time.monotonic()
            if sight.failure is not None:
                raise sight.failure
            presence.changed.wait(max(0.0, min(most, self.left)))
            elapsed = min(time.monotonic() - started, most)
            self.left -= elapsed
            looked = presence.sight.looked_at > sight.looked_at
        self.blind = 0.0 if looked else self.blind + elapsed
        if presence.sight.failure is not None:
            raise presence.sight.failure
        if self.blind > max(presence.rules.limits.dead_s, 2 * most):
            raise self._unanswered()
        if self.left <= 0 and (looked or self.blind > most):
            raise self._over()

    def _unanswered(self) -> StoreError:
        here = self.presence.here
        what = f"{self.presence.root} has not answered for {self.blind:.0f} s"
        return StoreError(f"node {here.rank}: {self.what}: {what}", here.rank, here.host, self.blind)

    def _over(self) -> BarrierTimeout:
        node = self.presence.sight.node
        who = self._absent() if node.generation is None else self._members()
        names = ", ".join(f"node {rank} ({said})" for rank, _, _, said in who)
        rank, host, age, _ = who[0]
        message = f"{self.what}: not passed within {self.timeout_s:g} s; waiting for {names}"
        return BarrierTimeout(f"node {node.rank}: {message}", rank, host, age)

    def _members(self) -> list[tuple[int, str, float, str]]:
        """(rank, host, seconds without news, in words) of each member that did not come."""
        sight, here = self.presence.sight, self.presence.here
        found = [
            (m.member.rank, m.member.host, m.age, f"{m.member.host}, last heartbeat {m.age:.1f} s ago")
            for m in sight.missing
        ]
        return found or [(here.rank, here.host, 0.0, f"{here.host}, this node")]

    def _absent(self) -> list[tuple[int, str, float, str]]:
        """The same of each node that did not join."""
        sight, rules, here = self.presence.sight, self.presence.rules, self.presence.here
        now, found = time.monotonic(), []
        for rank in range(rules.num_nodes):
            join, seen = sight.joins.get(rank), sight.ledger.seen.get(rank)
            if rank == here.rank or rank in sight.joiners:
                continue
            if join is None:
                found.append((rank, "", self.timeout_s, "never seen"))
                continue
            age = self.timeout_s if seen is None else now - seen.since
            member = seen is not None and age < rules.limits.dead_s and seen.beat.state == "running"
            state = "a member of a group that must call regroup() to let this one in"
            said = state if member else f"last heartbeat {age:.1f} s ago"
            found.append((rank, join.host, age, f"{join.host}, {said}"))
        return found or [(here.rank, here.host, 0.0, f"{here.host}, this node")]
