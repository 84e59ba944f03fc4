"""Describes lost members for the journal and for a generation's reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fsbarrier.protocol.facts import Generation, Member, Position
from fsbarrier.protocol.membership import Loss, losses
from fsbarrier.protocol.situation import Situation


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
    if node.generation is None or node.trouble_since is not None:
        return []
    left_out = [
        m
        for m in node.generation.members
        if newest.incarnation_of(m.rank) != m.incarnation and m not in newest.dismissed
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
