"""Changes of a run's settings between starts. Pure.

Only node 0 changes settings, by a start whose command line has other values than the run. The generation that admits this start
records the change, and every later generation copies it. So all members of a generation have the same settings, whatever their own
command lines say. See docs/protocol.md, "Settings that change".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsbarrier.protocol.facts import Generation, Join, Member, Payload, Position, Revision

#: the rank whose starts may change settings
MASTER = 0


def in_force(settings: Payload, revisions: Sequence[Revision]) -> Payload:
    """`settings` after all revisions, including those that take effect in a later iteration."""
    if not revisions:
        return settings
    changed = {**settings}
    for revision in revisions:
        changed |= revision.values
    return changed


def revised(
    before: Generation | None,
    number: int,
    start: Position,
    first_row: int,
    members: Sequence[Member],
    joins: Mapping[int, Join],
    settings: Payload,
) -> tuple[Revision, ...]:
    """The revisions of generation `number`, which begins at `start` with `members`.

    They are those of the generation `before`, and one more if it admits a start of node 0 that asks for a change. `first_row`: the
    first row of its iterations. `settings`: the values that the run began with.
    """
    known = before.revisions if before is not None else ()
    join = joins.get(MASTER)
    incarnation = next((member.incarnation for member in members if member.rank == MASTER), None)
    if join is None or join.incarnation != incarnation:
        return known
    if before is not None and before.incarnation_of(MASTER) == incarnation:
        return known
    now = in_force(settings, known)
    values = {name: value for name, value in join.stated.items() if now.get(name) != value}
    if not values:
        return known
    # An iteration that has begun ends with the settings that it began with.
    iteration = start.iteration + (start.phase > first_row)
    replaced = {name: now.get(name) for name in values}
    return (*known, Revision(number, iteration, values, replaced, join.by, join.time))


def contradiction(stated: Payload, now: Payload) -> str:
    """The first setting that a command line contradicts, with both values, for people; "" if there is none."""
    for name, value in stated.items():
        if now.get(name) != value:
            return f"{name}={shown(value)} contradicts this run's settings ({shown(now.get(name))})"
    return ""


def shown(value: object) -> str:
    """A setting's value as people would type it."""
    if isinstance(value, list | tuple):
        return ",".join(shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def revision_as_fields(revision: Revision) -> Payload:
    """A change for the journal."""
    return {
        "from_iteration": revision.iteration,
        "values": revision.values,
        "before": revision.before,
        "by": revision.by,
        "asked_at": revision.time,
    }
