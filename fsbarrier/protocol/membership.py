"""Failure detection: decides which nodes are alive from the heartbeats that this node sees and its own clock. Pure.

A node is declared dead only on evidence: a newer incarnation of its rank has joined, its last heartbeat says that it left or was killed, or
its counter has not moved for `dead_s` of *this* node's time. Only time in which this node wrote heartbeats itself counts (invariants I7 and
I10). Clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsbarrier.protocol.facts import Beat, Generation, Join, Member, Pulse

#: the state in the heartbeat of a node that waits to join
JOINING = "joining"
#: the state of a joining node that still does the work that makes it ready
PREPARING = "preparing"
#: the state of a live member that cannot write files, as on a full disk. It is for people; other nodes treat it like any member.
UNWRITABLE = "unwritable"
#: the state of a node that ended because nothing was left to do; it has passed the last row of the generation in its heartbeat
FINISHED = "finished"
#: the state in the last heartbeat of a killed daemon (processes/death_notice.py)
KILLED = "killed"
#: the states of a node that has ended
GONE = frozenset({"left", KILLED, FINISHED, "stopped", "broken"})
#: The states after which the peers need a new generation at once. In the other end states a node has published everything that its
#: peers wait for, and they have `dead_s` to find it.
DESERTED = frozenset({"left", KILLED})
#: the time between two heartbeats of a node
BEAT_S = 2.0
#: silence after which the journal calls a node suspected
SUSPECT_S = 6.0
#: silence after which a node counts as lost. The longest silence of a living node that was seen on NFS and sshfs is 4.4 s.
DEAD_S = 10.0
#: how long a node waits, for each living node of a lower rank, before it proposes a generation itself
STAGGER_S = 2 * BEAT_S
#: how long a start waits for missing nodes
JOIN_TIMEOUT_S = 1800.0
#: how long the others wait for a lost node without which they may not go on
REJOIN_TIMEOUT_S = 1800.0
#: how long a node retries while its filesystem fails; a run derives it from `dead_s` (CoordinationSettings.outage_s)
OUTAGE_S = 120.0


def death_notice(beat: Beat) -> Pulse:
    """The heartbeat to show if this daemon is killed; unchanged if it has already reported how it ended."""
    return beat.pulse if beat.state in GONE else replace(beat.pulse, counter=beat.counter + 1, state=KILLED)


@dataclass(frozen=True, slots=True)
class Seen:
    """The last news of one rank. `since`: the local time of the look that first showed this counter."""

    beat: Pulse
    since: float
    #: this node saw the counter advance, so the name is not a leftover of an earlier session
    moved: bool
    #: the last news of the incarnation that this node heard before
    before: Seen | None = None

    def later(self, pause: float, now: float) -> Seen:
        """The same news as if it had come `pause` seconds later, so that these do not count as silence."""
        before = self.before.later(pause, now) if self.before is not None else None
        return replace(self, since=min(self.since + pause, now), before=before)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The other nodes' heartbeats as this node has seen them.

    `heard_until`: silence counts up to this time, which is that of this node's own last heartbeat before the last look; None: it has
    written none.
    """

    seen: Mapping[int, Seen] = field(default_factory=dict)
    heard_until: float | None = None
    #: the total time so far that did not count as silence of any node
    missed_s: float = 0.0

    def observe(
        self, beats: Mapping[int, Pulse], now: float, beaten_at: float | None, poll_gap_s: float
    ) -> Ledger:
        """The ledger after a look at `now` that showed `beats`. `beaten_at`: when this node wrote its own last heartbeat before the look.

        A listing is only sure to be as new as this node's own last rename in that folder. And a node that cannot write its own heartbeat
        declares nobody dead. Example: the shared disk fails for a minute. The first node that can write again would declare all others
        dead. So silence counts up to `beaten_at`.

        At most `poll_gap_s` of a gap between two own heartbeats counts. Example: the file server hangs for 20 s, or this process is
        stopped. Afterwards every heartbeat is 20 s old, and with `dead_s` = 15 this node would declare all others dead.
        """
        seen, until, pause = {**self.seen}, self.heard_until, 0.0
        if beaten_at is not None and (until is None or beaten_at > until):
            pause = max(0.0, beaten_at - until - poll_gap_s) if until is not None else 0.0
            until = beaten_at
        if pause:
            seen = {rank: item.later(pause, now) for rank, item in seen.items()}
        for rank, beat in beats.items():
            old = seen.get(rank)
            if old is None or beat.incarnation > old.beat.incarnation:
                seen[rank] = Seen(beat, now, False, replace(old, before=None) if old is not None else None)
            elif beat.incarnation == old.beat.incarnation and beat.counter > old.beat.counter:
                seen[rank] = Seen(beat, now, True, old.before)
        return Ledger(seen, until, self.missed_s + pause)

    def news(self, member: Member) -> Seen | None:
        """The last heartbeat seen of this incarnation; None if there is none."""
        item = self.seen.get(member.rank)
        return item if item is not None and item.beat.incarnation == member.incarnation else None

    def last_news(self, member: Member) -> Seen | None:
        """Like `news`, but also finds it if a later incarnation of the rank was heard since."""
        item = self.seen.get(member.rank)
        if item is not None and item.beat.incarnation > member.incarnation:
            item = item.before
        return item if item is not None and item.beat.incarnation == member.incarnation else None

    def age(self, member: Member, now: float) -> float | None:
        """Seconds since `member`'s counter was seen to move, for people; None if it was never heard."""
        item = self.last_news(member)
        return None if item is None else max(0.0, now - item.since)

    def silence(self, member: Member, since: float) -> float:
        """Seconds without news of `member`, excluding time that this node could not observe; from `since` on if it was never heard."""
        item, until = self.last_news(member), self.heard_until
        return 0.0 if until is None else max(0.0, until - (since if item is None else item.since))

    def state(self, member: Member) -> str:
        """The state in its last heartbeat; "" if none was seen."""
        item = self.news(member)
        return item.beat.state if item is not None else ""

    def heard(self, member: Member, after: float) -> bool:
        """Whether `member`'s counter moved after local time `after`."""
        item = self.news(member)
        return item is not None and item.since > after

    def moved(self, member: Member) -> bool:
        """Whether this node has seen `member`'s counter move, so that it is alive, or was a moment ago."""
        item = self.news(member)
        return item is not None and item.moved


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
    beat: Pulse | None = None
    age_s: float | None = None


def losses(
    members: Iterable[Member],
    me: int,
    joins: Mapping[int, Join],
    ledger: Ledger,
    since: float,
    limits: Limits,
) -> Sequence[Loss]:
    """The lost members. `since`: the time from which the silence of a member that was never seen counts (`Node.watches_since`)."""
    others = [member for member in members if member.rank != me]
    judged = [_loss(member, joins.get(member.rank), ledger, since, limits) for member in others]
    return [loss for loss in judged if loss is not None]


def _loss(member: Member, join: Join | None, ledger: Ledger, since: float, limits: Limits) -> Loss | None:
    """The loss of a member, judged by the newest heartbeat and the newest start (`join`) of its rank; None if it is not lost."""
    newest, news = ledger.seen.get(member.rank), ledger.last_news(member)
    beat, state = (news.beat, news.beat.state) if news is not None else (None, "")
    silent_s = ledger.silence(member, since)
    # A newer start may show by its heartbeat first, while this mount's listing of joins/ is stale.
    started = join.incarnation if join is not None else 0
    if newest is not None and newest.beat.incarnation > started:
        started = newest.beat.incarnation
    if started > member.incarnation:
        why = f"restarted as incarnation {started}"
    elif state == KILLED:
        why = "its daemon was killed"
    elif state in DESERTED:
        why = "it was stopped by hand or ended in an error"
    elif silent_s >= limits.dead_s:
        why = f"{f'it {state}, and no' if state in GONE else 'no'} heartbeat for {silent_s:.1f} s"
    else:
        return None
    return Loss(member, why, beat, silent_s if news is not None else None)


def silent_members(
    members: Iterable[Member], me: int, ledger: Ledger, since: float, for_s: float
) -> dict[Member, float]:
    """The other members without news for at least `for_s` seconds, and how long they have been silent."""
    silent = {member: ledger.silence(member, since) for member in members if member.rank != me}
    return {member: silent_s for member, silent_s in silent.items() if silent_s >= for_s}


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
    limits: Limits,
) -> bool:
    """Whether a member of the newest generation may still be alive. Then the generation goes on, and admits joining nodes."""
    if newest is None or newest.verdict is not None:
        return False
    for member in newest.members:
        if member.rank == me:
            # The record names an older start of this rank, which this process has replaced.
            continue
        if losses((member,), me, joins, ledger, since, limits) or ledger.state(member) in GONE:
            continue
        return True
    return False
