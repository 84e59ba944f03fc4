"""Who is alive, as one node can know it: heartbeat counters aged on this node's own clock. Pure.

Rules. A node is called dead on evidence only: a newer incarnation of its rank joined, it said that it left, or its counter
has not moved for `dead_s` of *this* node's time during which this node itself could see (invariants I7 and I10). No two hosts'
clocks are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from fsbarrier.protocol.facts import Beat, Generation, Join, Member
from fsbarrier.protocol.timing import DEAD_S, JOIN_TIMEOUT_S, OUTAGE_S, REJOIN_TIMEOUT_S, STAGGER_S, SUSPECT_S

#: the state of a node that waits to be taken in, under the incarnation that its heartbeat names
JOINING = "joining"
#: the state of a node that ended because nothing was left to do; under a generation's number, because it passed that one's last row
FINISHED = "finished"
#: states in which a node has gone for good
GONE = frozenset({"left", FINISHED, "stopped", "broken"})
#: the one of them after which the peers need a new generation at once. A node in another of these states has left on disk all
#: that its peers wait for: they have `dead_s` to find it
DESERTED = frozenset({"left"})


@dataclass(frozen=True, slots=True)
class Seen:
    """The last news of one rank: `since` is the local time just before the read that first showed this counter."""

    beat: Beat
    since: float
    #: this node saw the counter advance: a live process writes the file, which is no leftover of an earlier session
    moved: bool

    def at(self, since: float) -> Seen:
        """The same news, as if it had come at `since`."""
        return Seen(self.beat, since, self.moved)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What this node has seen of the others' heartbeats, and when it last looked. `observe` explains the fields."""

    seen: Mapping[int, Seen] = field(default_factory=dict)
    looked_at: float | None = None
    #: this node could not look for longer than `blind_s` before its last look
    blind: bool = False
    #: rank -> until when nobody may conclude a death from its silence, because its heartbeat could not be read whole
    unsure: Mapping[int, float] = field(default_factory=dict)
    #: rank -> when this node last left its heartbeat to the watchers
    unwatched: Mapping[int, float] = field(default_factory=dict)

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
        """Take in what one look showed. `before` and `after`: local time around the reads.

        Blindness. If this node could not look for longer than `blind_s`, that time counts as nobody's silence. Example: the file
        server hangs for 20 s. Afterwards every heartbeat is 20 s old, and with `dead_s` = 15 this node would declare all others
        dead. But of each further such gap in a row `blind_s` do count: on a mount where each look takes 4 s, a death would
        otherwise never be noticed.

        `unheard`: this node cannot write its own heartbeat now, so that the others' silence says nothing of them either. Example: the
        shared disk is full for a minute, and whoever can write first would declare all others dead.

        `unread`: the ranks whose heartbeat file is there but could not be read whole. Example: node 2's last whole heartbeat is 14.9 s
        old, and this look met the file in the moment of its replacement. The half that was read may be a new heartbeat, so that
        node 2 is not declared dead for another `blind_s` (`unsure`). It ends there, since a dead node's file may stay torn for ever.

        `left_out`: the ranks whose heartbeats this node leaves to the watchers. Example: node 9 last read node 5's an hour ago, and
        becomes a watcher now. Node 5's silence then begins with the last look that left it out (`unwatched`), not an hour ago.
        """
        gap = after - before if self.looked_at is None else max(before - self.looked_at, after - before)
        blind = gap > blind_s
        seen, unwatched = {**self.seen}, {**self.unwatched}
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
        return Ledger(seen, after, blind, unsure, unwatched)

    def news(self, member: Member) -> Seen | None:
        """The last heartbeat seen of this very incarnation; None if there was none, or if this node leaves it to the watchers."""
        item = self.seen.get(member.rank)
        if item is None or item.beat.incarnation != member.incarnation or member.rank in self.unwatched:
            return None
        return item

    def age(self, member: Member, now: float) -> float | None:
        """Seconds for which `member`'s counter has not moved; None where there is no news of it."""
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
    """The timings of failure detection, in seconds. `outage_s`: how long a node holds out while its own filesystem fails.

    `last_call_s`: how long nodes that are enough to begin wait for one more; None: for all of them, up to `join_timeout_s`.
    """

    suspect_s: float = SUSPECT_S
    dead_s: float = DEAD_S
    stagger_s: float = STAGGER_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    rejoin_timeout_s: float = REJOIN_TIMEOUT_S
    outage_s: float = OUTAGE_S
    last_call_s: float | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """One member that is gone, and how it is known; its last heartbeat (None: never seen) and how old that is here."""

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
    """The members that are gone. `since`: when this node began to watch this generation (a member never seen ages from there)."""
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
    """Whether and why a member is gone, after the newest heartbeat and the newest start (`join`) of its rank."""
    newest, news = ledger.seen.get(member.rank), ledger.news(member)
    beat, state = (news.beat, news.beat.state) if news is not None else (None, "")
    age = max(0.0, now - _heard_at(member, news, ledger, since))
    # A newer start may show by its heartbeat first, while this mount's listing of joins/ is still old.
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


def _heard_at(member: Member, news: Seen | None, ledger: Ledger, since: float) -> float:
    """When the silence of a member began. One never seen is silent since this node entered the generation, or began to look at it."""
    return news.since if news is not None else max(since, ledger.unwatched.get(member.rank, since))


def silence(member: Member, ledger: Ledger, since: float, now: float) -> float:
    """Seconds without news of `member`."""
    return max(0.0, now - _heard_at(member, ledger.news(member), ledger, since))


def silent_members(
    members: Iterable[Member], me: int, ledger: Ledger, since: float, now: float, for_s: float
) -> dict[Member, float]:
    """The other members of whom there was no news for `for_s` seconds or more, and for how many."""
    ages = {member: silence(member, ledger, since, now) for member in members if member.rank != me}
    return {member: age for member, age in ages.items() if age >= for_s}


def left_to_others(
    generation: Generation | None, me: int, watchers: int, *, suspecting: bool = False
) -> frozenset[int]:
    """The members whose heartbeats node `me` need not read.

    Only the first `watchers` of a generation, its leader among them, read all members' heartbeats; each of the others reads that of one
    watcher, and those of all of them while it suspects (`suspecting`) that one. So the number of reads grows with the nodes and not with
    their square, and a living node still notices each death. If all watchers die at once, the others form a generation without them,
    in which the lowest of those ranks watch.
    """
    if generation is None or len(generation.ranks) <= watchers:
        return frozenset()
    watching = sorted(generation.ranks)[:watchers]
    if me in watching:
        return frozenset()
    mine = watching if suspecting else (watching[me % watchers],)
    return frozenset(generation.ranks).difference(mine, (me,))


def live_joiners(joins: Mapping[int, Join], ledger: Ledger, now: float, limits: Limits) -> dict[int, Join]:
    """The newest start of each rank that lives and waits to be taken in: its counter moved, and not long ago.

    A node whose heartbeat says that it is in a generation does not count: it will find out that the others went on without it, and
    join as its next incarnation.
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
    """Whether a member of the newest generation may still be alive: then it leads, and admits whoever joins."""
    if newest is None or newest.verdict is not None:
        return False
    for member in newest.members:
        if member.rank == me:
            # The record means an older start of this rank, whose place this process has taken.
            continue
        if losses((member,), me, joins, ledger, since, now, limits) or ledger.state(member) in GONE:
            continue
        return True
    return False
