"""The invariant of deaths concluded from silence (I7)."""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.sim.history import History


def i7_no_false_death(history: History) -> Iterator[str]:
    """A live node is declared dead only after `dead_s` without a heartbeat that the other node could see.

    The newest heartbeats do not count, since the mount may still hide them.
    """
    # A look that was delayed may count up to `blind_s` of silence too much.
    held = history.faults & {"slow", "pause"}
    least = history.dead_s - (history.blind_s if held else 0.0) - 0.1
    for event in history.events:
        if event.event != "node_lost":
            continue
        generation = event.node.generation
        assert generation is not None
        for lost in event.fields["lost"]:
            incarnation = generation.incarnation_of(lost["node_rank"])
            # Another node has found this loss, and its own event is checked.
            found_by_another = lost["why"].startswith("found by")
            if found_by_another or incarnation is None:
                continue
            ended = history.ended.get(_process_of(lost["node_rank"], incarnation, history))
            if "was killed" in lost["why"] and (ended is None or ended.time > event.time):
                yield f"node {event.node.rank} took node {lost['node_rank']} for killed, and it lives"
            if ended is not None and ended.time <= event.began:
                continue
            if "no heartbeat" not in lost["why"]:
                continue
            beats = history.beats.get((lost["node_rank"], incarnation), ())
            until = event.began - history.hidden_s
            shown_from, shown_until = history.old_views.get(event.node.host, (0.0, 0.0))
            if shown_from <= event.time <= shown_until + history.blind_s:
                until = min(until, shown_from - history.hidden_s)
            seen = [time for time in beats if time <= until]
            silent = event.began - max(seen, default=history.starts[event.process][0])
            if silent < least:
                yield f"node {event.node.rank} took node {lost['node_rank']} for dead after {silent:.1f} s of silence"


def _process_of(rank: int, incarnation: int, history: History) -> int:
    """The last process with this rank and incarnation; -1 if there is none."""
    for event in reversed(history.events):
        if event.node.rank == rank and event.node.incarnation == incarnation:
            return event.process
    return -1
