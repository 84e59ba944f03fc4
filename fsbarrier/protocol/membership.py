"""Failure detection: who is alive, by the age of heartbeat counters on this node's own clock. Pure.

A node is declared dead only on evidence: a newer incarnation of its rank has joined, it has said that it left, or its counter has not
moved for `dead_s` of *this* node's time, not counting time in which this node could not look (invariants I7 and I10). Clocks of two
hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from fsbarrier.protocol.facts import Beat, Generation, Join, Member
from fsbarrier.protocol.timing import DEAD_S, JOIN_TIMEOUT_S, REJOIN_TIMEOUT_S, STAGGER_S, SUSPECT_S

#: the heartbeat's state of a node that waits to join
JOINING = "joining"
#: the state of a node that ended because nothing was left to do. With a generation's number: it has passed that one's last row
FINISHED = "finished"
#: the states of a node that has ended
GONE = frozenset({"left", FINISHED, "stopped", "broken"})
#: The one after which the peers need a new generation at once. In the other states a node has left everything that its peers wait
#: for on disk, and they have `dead_s` to find it.
DESERTED = frozenset({"left"})


@dataclass(frozen=True, slots=True)
class Seen:
    """The last news of one rank. `since`: the local time just before the read that first showed this counter."""

    beat: Beat
    since: float
    #: this node saw the counter advance, so the file is not a leftover of an earlier session
    moved: bool

    def at(self, since: float) -> Seen:
        """The same news with another time."""
        return Seen(self.beat, since, self.moved)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The other nodes' heartbeats as this node has seen them. `observe` explains the fields."""

    seen: Mapping[int, Seen] = field(default_factory=dict)
    #: the time of the last look
    looked_at: float | None = None
    #: before its last look this node could not look for longer than `blind_s`
    blind: bool = False
    #: rank -> until when its silence proves nothing, because its heartbeat file could not be read whole
    unsure: Mapping[int, float] = field(default_factory=dict)
    #: rank -> when this node last left that heartbeat to the watchers
    unwatched: Mapping[int, float] = field(default_factory=dict)
    #: all the time so far that did not count as anybody's silence
    missed_s: float = 0.0

    def observe(
        self,
        beats: Mapping[int, Beat],
        before: float,
        after: float,
        blind_s: float,
        unread: Set[int] = frozenset(),
        left_out: Set[int] = frozenset(),
        *,
        unheard: bool = False,
    ) -> Ledger:
        """The ledger after one look. `before` and `after`: the local time around the reads.

        Blindness. A gap between two looks of more than `blind_s` does not count as silence. Example: the file server hangs for 20 s.
        Afterwards every heartbeat is 20 s old, and with `dead_s` = 15 this node would declare all others dead. Of further gaps in
        a row `blind_s` each do count; otherwise, on a mount where every look takes 4 s, no death would ever be noticed.

        `unheard`: this node cannot write its own heartbeat, so the others' silence proves nothing. Example: the shared disk is full for
        a minute. The first node that can write again would declare all others dead.

        `unread`: ranks whose heartbeat file could not be read whole. Example: node 2's last heartbeat is 14.9 s old, and the read
        races with its replacement. The torn content may be a new heartbeat, so node 2 is not declared dead for another `blind_s`
        (`unsure`), and no longer, since the file of a dead node may stay torn.

        `left_out`: ranks whose heartbeats this node leaves to the watchers. Example: node 9 last read node 5's heartbeat an hour ago,
        and now becomes a watcher. Node 5's silence begins with the last look that left it out (`unwatched`), not an hour ago.
        """
        gap = after - before if self.looked_at is None else max(before - self.looked_at, after - before)
        blind = gap > blind_s
        seen, unwatched, pause = {**self.seen}, {**self.unwatched}, 0.0
        if blind or unheard:
            pause = gap - blind_s if self.blind and not unheard else gap
            seen = {rank: item.at(min(item.since + pause, after)) for rank, item in seen.items()}
            unwatched = {rank: min(last + pause, after) for rank, last in unwatched.items()}
        for rank, beat in beats.items():
            old = seen.get(rank)
            if unwatched and (last := unwatched.pop(rank, None)) is not None and old is not None:
                seen[rank] = old = old.at(max(old.since, last))
            if old is None or beat.incarnation > old.beat.incarnation:
                seen[rank] = Seen(beat, before, False)
            elif beat.incarnation == old.beat.incarnation and beat.counter > old.beat.counter:
                seen[rank] = Seen(beat, before, True)
        unsure = {rank: self.unsure.get(rank, after + blind_s) for rank in unread} if unread else {}
        if left_out:
            unwatched.update(dict.fromkeys(left_out, after))
        return Ledger(seen, after, blind, unsure, unwatched, self.missed_s + pause)

    def news(self, member: Member) -> Seen | None:
        """The last heartbeat seen of this incarnation; None if there is none, or if this node leaves it to the watchers."""
        item = self.seen.get(member.rank)
        if item is None or item.beat.incarnation != member.incarnation or member.rank in self.unwatched:
            return None
        return item

    def age(self, member: Member, now: float) -> float | None:
        """How long `member`'s counter has not moved; None without news of it."""
        item = self.news(member)
        return None if item is None else max(0.0, now - item.since)

    def state(self, member: Member) -> str:
        item = self.seen.get(member.rank)
        return item.beat.state if item is not None and item.beat.incarnation == member.incarnation else ""

    def heard(self, member: Member, after: float) -> bool:
        """Whether `member`'s counter moved after local time `after`."""
        item = self.seen.get(member.rank)
        return item is not None and item.beat.incarnation == member.incarnation and item.since > after

    def moved(self, member: Member) -> bool:
        item = self.seen.get(member.rank)
        return item is not None and item.beat.incarnation == member.incarnation and item.moved


@dataclass(frozen=True, slots=True)
class Limits:
    """The timeouts of failure detection, in seconds."""

    suspect_s: float = SUSPECT_S
    dead_s: float = DEAD_S
    stagger_s: float = STAGGER_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    rejoin_timeout_s: float = REJOIN_TIMEOUT_S
    #: how long `min_nodes` nodes wait for one more; None: they wait for all nodes, up to `join_timeout_s`
    last_call_s: float | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost member, the evidence, and its last heartbeat (None: never seen) with its age here."""

    member: Member
    why: str
    beat: Beat | None = None
    age_s: float | None = None


def losses(
    members: Iterable[Member],
    me: int,
    joins: Mapping[int, Join],
    ledger: Ledger,
    since: float,
    now: float,
    limits: Limits,
) -> Sequence[Loss]:
    """The lost members. `since`: from when the silence of a member never seen counts (`Node.watches_since`)."""
    found = []
    for member in members:
        if member.rank != me:
            loss = _loss(member, joins.get(member.rank), ledger, since, now, limits)
            if loss is not None:
                found.append(loss)
    return found


def _loss(
    member: Member, join: Join | None, ledger: Ledger, since: float, now: float, limits: Limits
) -> Loss | None:
    """Whether a member is lost, by the newest heartbeat and the newest start (`join`) of its rank."""
    newest, news = ledger.seen.get(member.rank), ledger.news(member)
    beat, state = (news.beat, news.beat.state) if news is not None else (None, "")
    age = max(0.0, now - _silent_since(member, news, ledger, since))
    # A newer start may show by its heartbeat first, while this mount's listing of joins/ is stale.
    started = join.incarnation if join is not None else 0
    if newest is not None and newest.beat.incarnation > started:
        started = newest.beat.incarnation
    if started > member.incarnation:
        why = f"restarted as incarnation {started}"
    elif state in DESERTED:
        why = "it was stopped by hand or ended in an error"
    elif age >= limits.dead_s and now >= ledger.unsure.get(member.rank, now):
        why = f"{f'it {state}, and no' if state in GONE else 'no'} heartbeat for {age:.1f} s"
    else:
        return None
    return Loss(member, why, beat, age)


def _silent_since(member: Member, news: Seen | None, ledger: Ledger, since: float) -> float:
    """When the silence of a member began. One never seen is silent `since` then, or since this node began to watch it."""
    return news.since if news is not None else max(since, ledger.unwatched.get(member.rank, since))


def silence(member: Member, ledger: Ledger, since: float, now: float) -> float:
    """How long there has been no news of `member`."""
    return max(0.0, now - _silent_since(member, ledger.news(member), ledger, since))


def silent_members(
    members: Iterable[Member], me: int, ledger: Ledger, since: float, now: float, for_s: float
) -> dict[Member, float]:
    """The other members without news for at least `for_s` seconds, and how long they have been silent."""
    ages = {member: silence(member, ledger, since, now) for member in members if member.rank != me}
    return {member: age for member, age in ages.items() if age >= for_s}


def left_to_others(
    generation: Generation | None, me: int, watchers: int, *, suspecting: bool = False
) -> frozenset[int]:
    """The members whose heartbeats node `me` need not read.

    The lowest `watchers` ranks of a generation read all heartbeats. Every other node reads that of one watcher, and those of all
    watchers while it suspects that one (`suspecting`). So the number of reads grows with the number of nodes and not with its square,
    and every death is still noticed. If all watchers die at once, the others form a generation without them, with new watchers.
    """
    if generation is None or len(generation.ranks) <= watchers:
        return frozenset()
    watching = sorted(generation.ranks)[:watchers]
    if me in watching:
        return frozenset()
    mine = watching if suspecting else (watching[me % watchers],)
    return frozenset(generation.ranks).difference(mine, (me,))


def live_joiners(joins: Mapping[int, Join], ledger: Ledger, now: float, limits: Limits) -> dict[int, Join]:
    """The newest start of each rank that is alive and waits to join: its counter has moved within `suspect_s`.

    A node that is still in an old generation does not count: it will notice that the others went on, and join as its next incarnation.
    """
    live = {}
    for rank, join in joins.items():
        item = ledger.seen.get(rank)
        if item is None or not item.moved or item.beat.incarnation != join.incarnation:
            continue
        if now - item.since < limits.suspect_s and item.beat.state == JOINING:
            live[rank] = join
    return live


def occupied(
    newest: Generation | None,
    me: int,
    joins: Mapping[int, Join],
    ledger: Ledger,
    since: float,
    now: float,
    limits: Limits,
) -> bool:
    """Whether a member of the newest generation may still be alive. Then the generation goes on, and admits joining nodes."""
    if newest is None or newest.verdict is not None:
        return False
    for member in newest.members:
        if member.rank == me:
            # The record names an older start of this rank, which this process has replaced.
            continue
        if losses((member,), me, joins, ledger, since, now, limits) or ledger.state(member) in GONE:
            continue
        return True
    return False
