"""The input of the state machine's rules: a node, its view, the time, and everything that can be derived from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsbarrier.protocol.facts import SEALED, Fact, Generation, Join, Member, Payload, Position
from fsbarrier.protocol.membership import GONE, Loss, live_joiners, losses, occupied
from fsbarrier.protocol.rows import Row
from fsbarrier.protocol.state import Node, Rules, Stage, View
from fsbarrier.wording import counted, setting_text

#: The rank whose starts may change settings. docs/protocol.md, "Settings that change", says how all members come to have the same ones.
MASTER = 0


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
        # From here on the rules have the session's settings, not those that the run began with.
        self.rules = self.rules.under(self.settings)

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

    # --- the settings ---

    @cached_property
    def named(self) -> bool:
        """Whether the newest generation names this start."""
        newest = self.view.newest
        return newest is not None and newest.incarnation_of(self.node.rank) == self.node.incarnation

    @cached_property
    def others_at_work(self) -> bool:
        """Whether this node sees another member of the newest generation at work."""
        node, view, ledger = self.node, self.view, self.view.ledger
        seen = [member for member in self.others if ledger.moved(member) and ledger.state(member) not in GONE]
        since = node.watches_since(ledger)
        return len(losses(seen, node.rank, view.joins, ledger, since, self.rules.limits)) < len(seen)

    @cached_property
    def master_comes(self) -> bool:
        """Whether node 0 is this node, or waits beside it and runs the same code."""
        join = self.waiting.get(MASTER)
        return self.node.rank == MASTER or (join is not None and not self.differs(join))

    @cached_property
    def settings(self) -> Payload:
        """The settings that the starts of node 0 have changed, in this node's session or in the one that it joins.

        A session that is about to begin has the settings of the last one, overridden by those that node 0 asks for.
        """
        generation, master = self.node.generation or self.view.newest, self.view.joins.get(MASTER)
        current = generation.settings if generation is not None else {}
        if self.node.generation is not None or master is None or not master.stated:
            return current
        if self.named or self.others_at_work or not self.master_comes:
            return current
        began = self.rules.settings
        asked = {**current, **master.stated}
        return {name: value for name, value in asked.items() if began.get(name) != value}

    def objection(self, join: Join) -> str:
        """Why a start does not fit the session's settings, for people; "" if it fits."""
        if join.rank >= self.rules.num_nodes:
            return f"this run has {counted(self.rules.num_nodes, 'node')} and so no node {join.rank}"
        return contradiction(join.stated, {**self.rules.settings, **self.settings}) if join.stated else ""

    # --- who is alive ---

    @cached_property
    def occupied(self) -> bool:
        """Whether a member of the newest generation may still be alive, so that this generation goes on."""
        node, view = self.node, self.view
        since = node.watches_since(view.ledger)
        return occupied(view.newest, node.rank, view.joins, view.ledger, since, self.rules.limits)

    @property
    def members(self) -> Sequence[Member]:
        """The members of this node's generation, or while it joins, of the newest one."""
        generation = self.node.generation or self.view.newest
        return generation.members if generation is not None else ()

    @cached_property
    def gone(self) -> Sequence[Loss]:
        """The lost ones among `members`."""
        node, view = self.node, self.view
        since = node.watches_since(view.ledger)
        return losses(self.members, node.rank, view.joins, view.ledger, since, self.rules.limits)

    @cached_property
    def living(self) -> Sequence[Member]:
        """The `members` that are not lost. An older start of this rank, which this process has replaced, is lost."""
        lost, node = {loss.member.rank for loss in self.gone}, self.node
        replaced = Stage.JOINING is node.stage
        return [m for m in self.members if m.rank not in lost and not (replaced and m.rank == node.rank)]

    @cached_property
    def waiting(self) -> Mapping[int, Join]:
        """The live starts that wait to join, by rank, whatever code they run."""
        return live_joiners(self.view.joins, self.view.ledger, self.now, self.rules.limits)

    @cached_property
    def joiners(self) -> Mapping[int, Member]:
        """The starts that may become members: they wait, run the same code as this node, and fit the session's settings."""
        return {
            rank: Member(rank, join.incarnation, join.host)
            for rank, join in self.waiting.items()
            if not self.differs(join) and not self.objection(join)
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
        """Whether the nodes that are here may begin without the others."""
        return not self.rules.lacks(self.starting.keys())

    @property
    def halted(self) -> bool:
        """Whether the members wait until lost ones are back (`on_node_failure` is "wait"), or until enough nodes hold each role again.

        A joining node asks this too, since the members then wait for it.
        """
        policy = self.rules.on_node_failure
        if policy == "wait":
            return len(self.living) < len(self.members)
        return policy == "shrink" and bool(self.rules.lacks_role([member.rank for member in self.living]))

    @property
    def comeback(self) -> Sequence[Member]:
        """The members of the generation that ends the halt: the living ones and the joiners; none while these do not suffice."""
        available = {**self.joiners, **{member.rank: member for member in self.living}}
        if self.rules.on_node_failure == "wait":
            return (
                [available[rank] for rank in self.generation.ranks]
                if available.keys() >= {*self.generation.ranks}
                else []
            )
        return [] if self.rules.lacks(available.keys()) else [*available.values()]

    # --- the result of the row ---

    @cached_property
    def makers(self) -> frozenset[int]:
        """The members whose work makes this row's result (`Row.made_by`)."""
        return self.rules.makers(self.row, self.generation.ranks)

    @cached_property
    def unfinished(self) -> frozenset[int]:
        """The makers that are not done. A seal has the name of the leader's fact, but the leader is not done."""
        sealed = {self.generation.leader} if self.seal is not None else set()
        return self.makers - (self.view.arrived - sealed)

    @property
    def result_is_there(self) -> bool:
        """Whether all makers are done, so that nobody need do this row again."""
        return bool(self.makers) and not self.unfinished

    @property
    def result_is_coming(self) -> bool:
        """Whether the makers that are not done can still be done: none of them is lost or has failed, and none is the leader behind a seal.

        While this node's own work has a report, the row is not listed: the node first publishes its fact.
        """
        work, leader = self.view.work, self.generation.leader
        if work is not None:
            return bool(self.makers) and (work.ok or self.node.rank not in self.makers)
        stopped = {*self.view.failed, *(loss.member.rank for loss in self.gone)}
        stopped |= {leader} if self.seal is not None else set()
        return bool(self.unfinished) and self.unfinished.isdisjoint(stopped)

    @property
    def answers_a_loss(self) -> bool:
        """Whether members are lost, and this row's result does not come without them."""
        return bool(self.gone) and not self.result_is_coming

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
        """When this node noticed the loss that it answers with a new generation; now if it has just noticed it."""
        return self.now if self.node.trouble_since is None else self.node.trouble_since


def contradiction(stated: Payload, now: Payload) -> str:
    """The first setting that a command line contradicts, with both values, for people; "" if there is none."""
    for name, value in stated.items():
        if now.get(name) != value:
            return f"{name}={setting_text(value)} contradicts this run's settings ({setting_text(now.get(name))})"
    return ""


def last_place(situation: Situation, loss: Loss) -> Position | None:
    """The last known position of a member: its last heartbeat's, or this node's own if that is later.

    This node's own counts because it entered its row only after every member was done with the row before.
    """
    generation, position, beat = situation.node.generation, situation.node.position, loss.beat
    reported = Position(beat.iteration, beat.phase) if beat is not None and beat.iteration else None
    known = [reported] if reported is not None and situation.rules.has_row(reported) else []
    if generation is not None and position is not None and (known or position > generation.start):
        known.append(position)
    return max(known, default=None)


def lost_as_fields(situation: Situation, gone: Sequence[Loss]) -> list[dict[str, object]]:
    """Describe lost members for the journal."""
    return [_as_fields(situation, loss) for loss in gone]


def _as_fields(situation: Situation, loss: Loss) -> dict[str, object]:
    place = last_place(situation, loss)
    return {
        "node_rank": loss.member.rank,
        "host": loss.member.host,
        "incarnation": loss.member.incarnation,
        "why": _why(situation, loss),
        "iteration": place.iteration if place else None,
        "phase": place.phase if place else None,
        "phase_name": situation.rules.row_name(place) if place else "",
        "beat_age_s": round(loss.age_s, 3) if loss.age_s is not None else None,
    }


def lost_as_text(situation: Situation, gone: Sequence[Loss]) -> str:
    """Describe lost members for a generation's reason."""
    return "; ".join(
        f"node {loss.member.rank} ({loss.member.host}) is lost: {_why(situation, loss)}" for loss in gone
    )


def _why(situation: Situation, loss: Loss) -> str:
    place = last_place(situation, loss)
    if place is None:
        return loss.why
    name = situation.rules.row_name(place)
    return f"{loss.why}; last in iteration {place.iteration}, phase {place.phase} {name}"


def found_by_others(situation: Situation, newest: Generation) -> list[Loss]:
    """The members that a newer generation left out, if this node had not noticed a loss itself."""
    node, view = situation.node, situation.view
    if node.generation is None:
        return []
    known_to_journal = {*newest.dismissed, *node.told_lost}
    left_out = [
        m
        for m in node.generation.members
        if newest.incarnation_of(m.rank) != m.incarnation and m not in known_to_journal
    ]
    since = node.watches_since(view.ledger)
    known = losses(left_out, node.rank, view.joins, view.ledger, since, situation.rules.limits)
    noticed = {loss.member: loss for loss in known}
    return [noticed.get(member) or _loss_from_record(situation, member, newest) for member in left_out]


def _loss_from_record(situation: Situation, member: Member, newest: Generation) -> Loss:
    ledger = situation.view.ledger
    seen, why = ledger.last_news(member), f"found by node {newest.created_by}"
    return Loss(member, why, seen.beat if seen is not None else None, ledger.age(member, situation.now))


def last_news(situation: Situation, rank: int) -> str:
    """Describe the last news of a missing node, for people."""
    seen, join = situation.view.ledger.seen.get(rank), situation.view.joins.get(rank)
    if seen is None or join is None:
        return "never seen"
    beat, place = seen.beat, Position(seen.beat.iteration, seen.beat.phase)
    rules = situation.rules
    doing = f"in {rules.row_name(place)}" if beat.iteration and rules.has_row(place) else beat.state
    return f"{join.host}, {doing}, last heartbeat {situation.now - seen.since:.0f} s ago"
