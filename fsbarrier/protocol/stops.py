"""Which nodes a request to stop, or a verdict, concerns. Pure.

Both list the starts that their author saw. So an old one that a stale listing shows late ends no node of a later session, and neither
clocks nor the order of reads matter.

`started_as` is a process's first incarnation; it may rejoin as later ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsbarrier.protocol.facts import Generation, Member, StopRequest


def concerns(request: StopRequest, rank: int, started_as: int) -> bool:
    """Whether this start of `rank` was there when the request was made."""
    return _was_there((*request.alive, *request.ended), rank, started_as)


def ends(generation: Generation, rank: int, started_as: int) -> bool:
    """Whether a generation's verdict ends this start of `rank`, which waits to join."""
    verdict = generation.verdict
    return verdict is not None and _was_there((*generation.members, *verdict.waiting), rank, started_as)


def _was_there(starts: Iterable[Member], rank: int, started_as: int) -> bool:
    return any(start.rank == rank and start.incarnation >= started_as for start in starts)


def missed_by(request: StopRequest, rank: int, started_as: int) -> bool:
    """Whether this is the first start of a rank that was absent when the others were asked to stop."""
    was_there = any(member.rank == rank for member in request.alive)
    ended_as = max((member.incarnation for member in request.ended if member.rank == rank), default=0)
    return not was_there and started_as == ended_as + 1
