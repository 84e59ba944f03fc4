"""For which nodes a request to stop was made. Pure.

A request names the starts that its author saw. So an old request that a stale listing shows late ends no node of a later session, and
none depends on clocks or on the order in which a node sees things.
"""

from __future__ import annotations

from fsbarrier.protocol.facts import StopRequest


def concerns(request: StopRequest, rank: int, started_as: int) -> bool:
    """Whether a start of `rank` was there when the request was made. `started_as`: its first incarnation; it may rejoin as later ones."""
    return any(m.rank == rank and m.incarnation >= started_as for m in (*request.alive, *request.ended))


def missed_by(request: StopRequest, rank: int, started_as: int) -> bool:
    """Whether this is the first start of a rank that was not there when the others were asked to stop."""
    was_there = any(member.rank == rank for member in request.alive)
    ended_as = max((member.incarnation for member in request.ended if member.rank == rank), default=0)
    return not was_there and started_as == ended_as + 1
