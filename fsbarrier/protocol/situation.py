"""The input of the state machine's rules: a node, its view, the time, and everything that can be derived from them. Pure."""

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
    """A node at one moment. Derived values are computed when a rule first asks for them.

    `generation`, `position` and everything that depends on them exist only while the node is RUNNING.
    """

    node: Node
    view: View
    now: float
    rules: Rules

    def __post_init__(self) -> None:
        self.rules = self.rules.under(self.changes if self.node.generation is not None else self.next_changes)

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
        """The newest generation, if it is newer than this node's own, or than its `baseline` while it joins."""
        known = self.node.generation.number if self.node.generation is not None else self.node.baseline
        newest = self.view.newest
        return newest if newest is not None and newest.number > known else None

    @property
    def others(self) -> Sequence[Member]:
        """The other members of the newest generation."""
        newest = self.view.newest
        return [m for m in newest.members if m.rank != self.node.rank] if newest is not None else []

    @property
    def seal(self) -> Fact | None:
        """The seal in place of the leader's fact about this row; None if this generation is not fenced."""
        fact = self.view.leaders_fact
        return fact if fact is not None and fact.status == SEALED else None

    # --- changed settings ---

    @property
    def changes(self) -> Payload:
        """The changes in this node's generation; while it joins, in the newest one."""
        generation = self.node.generation or self.view.newest
        return in_force({}, generation.revisions) if generation is not None else {}

    @cached_property
    def next_changes(self) -> Payload:
        """The changes after the next generation: those that node 0 asks for are added, if it is this node, or waits to join and runs the
        same code."""
        newest, own = self.view.newest, self.view.joins.get(MASTER)
        if own is None or not own.stated:
            return self.changes
        comes = self.node.rank == MASTER or (MASTER in self.waiting and not self.differs(own))
        taken_in = newest is not None and newest.incarnation_of(MASTER) == own.incarnation
        return {**self.changes, **own.stated} if comes and not taken_in else self.changes

    @cached_property
    def places(self) -> int:
        """The number of nodes after the next generation."""
        return self.rules.under(self.next_changes).num_nodes

    def contradiction(self, join: Join, changes: Payload) -> str:
        """The first setting in which a start contradicts the run after `changes`; "" if there is none."""
        if not join.stated or join.rank == MASTER:
            return ""
        return contradiction(join.stated, {**self.rules.settings, **changes})

    # --- who is alive ---

    @cached_property
    def gone(self) -> Sequence[Loss]:
        """The lost members of this node's generation."""
        node, view = self.node, self.view
        members, since = self.generation.members, node.watches_since(view.ledger)
        return losses(members, node.rank, view.joins, view.ledger, since, self.rules.limits)

    @cached_property
    def living(self) -> Sequence[Member]:
        """The members of this node's generation that are not lost."""
        lost = {loss.member.rank for loss in self.gone}
        return [member for member in self.generation.members if member.rank not in lost]

    @cached_property
    def waiting(self) -> Mapping[int, Join]:
        """The live starts that wait to join, by rank, whatever code they run."""
        return live_joiners(self.view.joins, self.view.ledger, self.now, self.rules.limits)

    @cached_property
    def joiners(self) -> Mapping[int, Member]:
        """The starts that may become members: they wait, run the same code as this node, and do not contradict the run's settings."""
        return {
            rank: Member(rank, join.incarnation, join.host)
            for rank, join in self.waiting.items()
            if rank < self.places
            and not self.differs(join)
            and not self.contradiction(join, self.next_changes)
        }

    def differs(self, join: Join) -> bool:
        """Whether another start runs different code from this node."""
        own = self.view.joins.get(self.node.rank)
        return own is not None and own.digest != join.digest

    @cached_property
    def starting(self) -> Mapping[int, Member]:
        """The nodes that can form the next generation: the joiners and this one."""
        me = Member(self.node.rank, self.node.incarnation, self.node.host)
        return {**self.joiners, me.rank: me}

    @cached_property
    def missing(self) -> Sequence[int]:
        """The ranks that have not come yet."""
        return [rank for rank in range(self.rules.num_nodes) if rank not in self.starting]

    @property
    def waits_for_nodes(self) -> bool:
        """Whether nodes are missing, and there is still time for them to come."""
        return bool(self.missing) and self.overdue_s < 0

    @property
    def enough(self) -> bool:
        """Whether at least `min_nodes` nodes are here."""
        return len(self.starting) >= self.rules.min_nodes

    # --- how long ---

    @property
    def waited_s(self) -> float:
        """Seconds since this node entered its stage or generation."""
        return self.now - self.node.since

    @property
    def overdue_s(self) -> float:
        """How long ago the wait for missing nodes ended; negative while it lasts."""
        last_call_s = self.rules.limits.last_call_s
        if last_call_s is not None and self.enough:
            return self.now - self.node.starting_since - last_call_s
        return self.waited_s - self.rules.limits.join_timeout_s

    @property
    def trouble_since(self) -> float:
        """When this node noticed the loss that it answers with a new generation; now, if it notices only now."""
        return self.now if self.node.trouble_since is None else self.node.trouble_since
