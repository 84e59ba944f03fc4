"""What is said of members that are lost: who, why, where they were, and how old the last news is. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fsbarrier.protocol.facts import Beat, Generation, Member, Position
from fsbarrier.protocol.membership import Loss, losses
from fsbarrier.protocol.state import Node, Rules, View


def last_place(loss: Loss, node: Node) -> Position | None:
    """Where a member was: by its last heartbeat, or in `node`'s row, which it must have reached for `node` to be there."""
    generation, beat = node.generation, loss.beat
    known = [Position(beat.iteration, beat.phase)] if beat is not None and beat.iteration else []
    if generation is not None and node.position is not None and (known or node.position > generation.start):
        known.append(node.position)
    return max(known, default=None)


def lost_as_fields(gone: Sequence[Loss], node: Node, rules: Rules) -> list[dict[str, object]]:
    """Lost members as the journal tells them."""
    fields = []
    for loss in gone:
        place = last_place(loss, node)
        fields.append(
            {
                "node_rank": loss.member.rank,
                "host": loss.member.host,
                "incarnation": loss.member.incarnation,
                "why": _why(loss, place, rules),
                "iteration": place.iteration if place else None,
                "phase": place.phase if place else None,
                "phase_name": rules.program.rows[place.phase].name if place else "",
                "beat_age_s": round(loss.age_s, 3) if loss.age_s is not None else None,
            }
        )
    return fields


def lost_as_text(gone: Sequence[Loss], node: Node, rules: Rules) -> str:
    """The same as the reason of a generation."""
    names = [
        f"node {loss.member.rank} ({loss.member.host}) is lost: {_why(loss, last_place(loss, node), rules)}"
        for loss in gone
    ]
    return "; ".join(names)


def _why(loss: Loss, place: Position | None, rules: Rules) -> str:
    if place is None:
        return loss.why
    return f"{loss.why}; last in iteration {place.iteration}, phase {place.phase} {rules.program.rows[place.phase].name}"


def found_by_others(node: Node, newest: Generation, view: View, now: float, rules: Rules) -> list[Loss]:
    """The members whose loss this node had not noticed yet when a newer generation went on without them."""
    if node.generation is None or node.trouble_since is not None:
        return []
    gone = [m for m in node.generation.members if newest.incarnation_of(m.rank) != m.incarnation]
    known = losses(gone, node.rank, view.joins, view.ledger, node.since, now, rules.limits)
    noticed = {loss.member: loss for loss in known}
    return [noticed.get(m) or _heard_of(m, newest, view, now) for m in gone]


def _heard_of(member: Member, newest: Generation, view: View, now: float) -> Loss:
    seen, why = view.ledger.news(member), f"found by node {newest.created_by}"
    if seen is None:  # it was for others to watch: they know more
        return Loss(member, f"{why}, which says: {newest.reason}")
    return Loss(member, why, seen.beat, view.ledger.age(member, now))


def last_news(view: View, rank: int, now: float) -> str:
    """What is known of a node that does not come, for people."""
    seen, join = view.ledger.seen.get(rank), view.joins.get(rank)
    if seen is None or join is None:
        return "never seen"
    return f"{join.host}, {_phase_text(seen.beat)}, last heartbeat {now - seen.since:.0f} s ago"


def _phase_text(beat: Beat) -> str:
    return f"in {beat.phase_name}" if beat.phase_name else beat.state
