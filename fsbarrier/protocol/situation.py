"""What a rule of the state machine looks at: a node, what it sees, the time, and what follows from these. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsbarrier.protocol.facts import SEALED, Fact, Generation, Join, Member, Payload, Position
from fsbarrier.protocol.membership import Loss, live_joiners, losses
from fsbarrier.protocol.revisions import MASTER, contradiction, in_force
from fsbarrier.protocol.rows import Row
from fsbarrier.protocol.state import Node, Rules, View


@dataclass(eq=False)
class Situation:
    """A node at one moment. What follows from it is computed when a rule first asks, and only once.

    Ask for `generation`, `position` and what depends on them only where the node is in a generation.
    """

    node: Node
    view: View
    now: float
    rules: Rules

    def __post_init__(self) -> None:
        self.rules = self.rules.under(self.changed if self.node.generation is not None else self.to_be)

    @property
    def generation(self) -> Generation:
        assert self.node.generation is not None
        return self.node.generation

    @property
    def position(self) -> Position:
        assert self.node.position is not None
        return self.node.position

    @property
    def row(self) -> Row[object]:
        return self.rules.row(self.position, self.generation)

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last row of an iteration, in this generation."""
        return self.rules.span(self.generation.choices)

    @property
    def leads(self) -> bool:
        """Whether this node is its generation's leader."""
        return self.generation.leader == self.node.rank

    @property
    def newer_generation(self) -> Generation | None:
        """The newest generation if it is news to this node: newer than its own, or than its `baseline` while it joins."""
        known = self.node.generation.number if self.node.generation is not None else self.node.baseline
        newest = self.view.newest
        return newest if newest is not None and newest.number > known else None

    @property
    def others(self) -> Sequence[Member]:
        """The members of the newest generation beside this rank."""
        newest = self.view.newest
        return [m for m in newest.members if m.rank != self.node.rank] if newest is not None else []

    @property
    def seal(self) -> Fact | None:
        """The seal under the name of the leader's fact about this row, if one lies there: this generation was ended."""
        fact = self.view.leaders_fact
        return fact if fact is not None and fact.status == SEALED else None

    # --- settings that are not as the run began with them ---

    @property
    def changed(self) -> Payload:
        """As this node's generation says; before it is in one, as the newest."""
        generation = self.node.generation or self.view.newest
        return in_force({}, generation.revisions) if generation is not None else {}

    @cached_property
    def to_be(self) -> Payload:
        """With what node 0 asks for, if it is this node, or waits to be taken in and runs the same code."""
        newest, own = self.view.newest, self.view.joins.get(MASTER)
        if own is None or not own.stated:
            return self.changed
        comes = self.node.rank == MASTER or (MASTER in self.waiting and not self.differs(own))
        taken_in = newest is not None and newest.incarnation_of(MASTER) == own.incarnation
        return {**self.changed, **own.stated} if comes and not taken_in else self.changed

    def contradiction(self, join: Join, changed: Payload) -> str:
        """The first setting that a start names and the run, whose settings have `changed`, does not have; "" where there is none."""
        if not join.stated or join.rank == MASTER:
            return ""
        return contradiction(join.stated, {**self.rules.settings, **changed})

    # --- who lives ---

    @cached_property
    def gone(self) -> Sequence[Loss]:
        """The members of this node's generation that are lost, as far as it can know.

        Silence counts up to the last look at the heartbeats and not up to now: a member may have written one since that look.
        """
        node, view = self.node, self.view
        looked_at = self.now if view.ledger.looked_at is None else view.ledger.looked_at
        members = self.generation.members
        return losses(members, node.rank, view.joins, view.ledger, node.since, looked_at, self.rules.limits)

    @cached_property
    def living(self) -> Sequence[Member]:
        """The other members of this node's generation, and itself."""
        lost = {loss.member.rank for loss in self.gone}
        return [member for member in self.generation.members if member.rank not in lost]

    @cached_property
    def waiting(self) -> Mapping[int, Join]:
        """The starts that live and wait to be taken in, by rank, whatever code they run."""
        return live_joiners(self.view.joins, self.view.ledger, self.now, self.rules.limits)

    @cached_property
    def joiners(self) -> Mapping[int, Member]:
        """Those of them that run this node's code and ask for no other settings than the run's: nobody else becomes a member."""
        num_nodes = self.rules.under(self.to_be).num_nodes
        return {
            rank: Member(rank, join.incarnation, join.host)
            for rank, join in self.waiting.items()
            if rank < num_nodes and not self.differs(join) and not self.contradiction(join, self.to_be)
        }

    def differs(self, join: Join) -> bool:
        """Whether another start runs other code than this node."""
        own = self.view.joins.get(self.node.rank)
        return own is not None and own.digest != join.digest

    @cached_property
    def starting(self) -> Mapping[int, Member]:
        """The nodes that are about to form a generation: those who wait, and this one."""
        me = Member(self.node.rank, self.node.incarnation, self.node.host)
        return {**self.joiners, me.rank: me}

    @cached_property
    def missing(self) -> Sequence[int]:
        """The ranks that are not here yet."""
        return [rank for rank in range(self.rules.num_nodes) if rank not in self.starting]

    @property
    def enough(self) -> bool:
        """Whether as many nodes are here as a run may begin with."""
        return len(self.starting) >= self.rules.min_nodes

    # --- how long ---

    @property
    def waited_s(self) -> float:
        """Seconds since this node entered its stage or generation."""
        return self.now - self.node.since

    @property
    def overdue_s(self) -> float:
        """For how long nodes that are missing need not be waited for any more; below 0 while they must be."""
        last_call_s = self.rules.limits.last_call_s
        if last_call_s is not None and self.enough:
            return self.now - self.node.starting_since - last_call_s
        return self.waited_s - self.rules.limits.join_timeout_s

    @property
    def trouble_since(self) -> float:
        """When this node noticed the trouble that it answers with a new generation; now, if it notices only now."""
        return self.now if self.node.trouble_since is None else self.node.trouble_since
