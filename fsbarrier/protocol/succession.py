"""The generation records that nodes propose: who takes part, from where the run goes on, what is adopted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsbarrier.program import SLICES, Program
from fsbarrier.protocol.facts import Generation, Join, Member, Payload, Position, Verdict
from fsbarrier.protocol.state import Node, Recovered, Rules, View


def next_number(view: View, at_least: int = 0) -> int:
    """The number of the next generation: after the newest, and after those whose records nobody can read."""
    return max(view.newest.number if view.newest else 0, view.void, at_least) + 1


def successor(
    node: Node,
    view: View,
    rules: Rules,
    members: Sequence[Member],
    reason: str,
    *,
    verdict: Verdict | None = None,
    attempt: int = 0,
) -> Generation:
    """The generation after the one `node` is in, going on in the same iteration from where the row under way says."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    start = Position(
        position.iteration, max(rules.span(generation.choices)[0], rules.program.resume_index(position.phase))
    )
    return Generation(
        number=next_number(view, generation.number),
        members=tuple(sorted(members, key=lambda m: m.rank)),
        leader=min((m.rank for m in members), default=node.rank),
        start=start,
        reason=reason,
        decisions=kept_decisions(node.decisions, start, rules.program),
        until=generation.until,
        choices=generation.choices,
        attempt=attempt,
        created_by=node.rank,
        verdict=verdict,
    )


def another_try(node: Node, view: View, rules: Rules) -> Generation:
    """The same members once more after a member's program failed; the end of the run where that has been tried often enough."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    rank, fact = min(view.failed.items())
    row, attempt = rules.program.rows[position.phase], failed_tries(generation, position) + 1
    host = next((m.host for m in generation.members if m.rank == rank), "")
    where = f"node {rank} ({host}), iteration {position.iteration}, phase {row.index} {row.name}"
    cause = f"{where}: {fact.value.get('error', 'failed')}"
    if attempt <= rules.retries:
        return successor(node, view, rules, generation.members, f"again: {cause}", attempt=attempt)
    log = "".join(f"\n  | {line}" for line in fact.value.get("log", ()))
    verdict = Verdict(4, f"{cause}; given up after {attempt} attempt{'s' if attempt > 1 else ''}{log}")
    return successor(node, view, rules, generation.members, "program failed", verdict=verdict)


def behind_the_seal(node: Node, view: View, rules: Rules) -> Generation:
    """The same members, after one that joined ended their generation with a seal where the leader's fact would be."""
    assert node.generation is not None and node.position is not None and view.leaders_fact is not None
    attempt = failed_tries(node.generation, node.position)
    why = f"node {view.leaders_fact.rank} ended the one before"
    return successor(node, view, rules, node.generation.members, why, attempt=attempt)


def first_of_session(
    node: Node, view: View, rules: Rules, live: Mapping[int, Member], found: Recovered
) -> Generation:
    """The generation that nodes which have just started form, going on where the run was left (`found`)."""
    number = next_number(view, node.baseline)
    asked = view.joins.get(min(live))
    choices = asked.choices if asked else {}
    start = opening(found, rules.span(choices))
    return Generation(
        number=number,
        members=tuple(live[rank] for rank in sorted(live)),
        leader=min(live),
        start=start,
        reason="start" if number == 1 else "start again",
        decisions=kept_decisions(found.decisions, start, rules.program),
        until=asked.until if asked else None,
        choices=choices,
        created_by=node.rank,
    )


def leaders_word(view: View) -> Join | None:
    """What the lowest rank was started with, once it has started anew; None while only an earlier session's word is there."""
    rank = min(view.joins, default=None)
    if rank is None:
        return None
    before = view.newest.incarnation_of(rank) if view.newest else None
    return view.joins[rank] if before is None or view.joins[rank].incarnation > before else None


def all_done(start: Position, until: int | None) -> bool:
    """Whether a session that begins at `start` has nothing left to do up to iteration `until`."""
    return until is not None and start.iteration > until


def opening(found: Recovered, span: tuple[int, int]) -> Position:
    """Where a session that runs the rows of `span` begins: where the run was left, if the one before ran the same rows.

    Else what has been merged and what has been published tell which iteration's rollouts, or update, are due.
    """
    if found.generation == 0:
        return Position(1, span[0])
    if span == found.span:
        return found.position
    merged = found.decisions.get("train_aggregate", {}).get("iteration", 0)
    published = found.decisions.get("weights_publish", {}).get("iteration", 0)
    update = SLICES["update"][0]
    if span[0] <= update <= span[1] and (merged > published or span[0] == update):
        return Position(published + 1, update)
    return Position(max(merged, published) + 1, span[0])


def with_decision(
    decisions: Mapping[str, Payload], name: str, iteration: int, value: Payload
) -> dict[str, Payload]:
    """`decisions` and one more. The one of an earlier iteration stays below it, for a generation that goes back behind this one."""
    old = decisions.get(name)
    if old is not None and old["iteration"] >= iteration:
        old = old.get("before")
    entry: dict[str, Any] = {"iteration": iteration, "value": value}
    if old is not None:
        entry["before"] = {"iteration": old["iteration"], "value": old["value"]}
    return {**decisions, name: entry}


def kept_decisions(decisions: Mapping[str, Payload], start: Position, program: Program) -> dict[str, Payload]:
    """The decisions that a generation starting at `start` adopts: those of earlier iterations, and of rows before its first."""
    kept = {}
    for row in program.rows:
        entry = decisions.get(row.name)
        while entry is not None and (entry["iteration"], row.index) >= (start.iteration, start.phase):
            entry = entry.get("before")
        if entry is not None:
            kept[row.name] = entry
    return kept


def failed_tries(generation: Generation, position: Position) -> int:
    """How often the iteration at `position` failed already; a generation counts those of the iteration it started in."""
    return generation.attempt if position.iteration == generation.start.iteration else 0
