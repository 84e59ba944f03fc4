"""What nodes conclude: that another is dead (I7), and how a run begins and ends (I15), by the settings, the requests to stop and the
failed programs."""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.protocol.facts import Fact, Generation, StopRequest
from fsbarrier.protocol.state import Rules
from fsbarrier.protocol.succession import STARTS
from sim.history import History, row_of
from sim.world import World


def i7_no_false_death(history: History) -> Iterator[str]:
    """A live node is declared dead only after `dead_s` without a heartbeat that the other node could see.

    The newest heartbeats do not count, since the mount may still hide them.
    """
    # A look that was delayed may count up to `poll_gap_s` of silence too much.
    held = history.faults & {"slow", "pause"}
    least = history.dead_s - (history.poll_gap_s if held else 0.0) - 0.1
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
            if "no heartbeat" not in lost["why"] or (ended is not None and ended.time <= event.began):
                continue
            beats = history.beats.get((lost["node_rank"], incarnation), ())
            until = event.began - history.hidden_s
            seen = [time for time in beats if time <= until]
            silent = event.began - max(seen, default=history.starts[event.process][0])
            if silent < least:
                yield f"node {event.node.rank} took node {lost['node_rank']} for dead after {silent:.1f} s of silence"
            elif ended is None or ended.time > event.time:
                yield from _silent_without_a_reason(history, lost["node_rank"], incarnation, event.time)


def _silent_without_a_reason(history: History, rank: int, incarnation: int, time: float) -> Iterator[str]:
    """A heartbeat says that a process lives and has looked lately: so one that was neither stopped, nor hung in one operation, nor kept
    from looking is not silent, whether there is room on the disk or not, and however busy it is."""
    process = _process_of(rank, incarnation, history)
    kept = [(begin, end) for number, begin, end in history.silenced if number == process]
    # What an operation alone does to a node, or errors in one look after the other, shows in the faults.
    by_itself = history.faults & {"error", "lost", "garbled", "handles", "unreadable", "twin", "version"}
    since = time - 3 * history.dead_s
    if (
        process in history.starts
        and not by_itself
        and not any(begin < time and end > since for begin, end in kept)
    ):
        yield f"node {rank} was silent for so long that it was taken for dead, and nothing kept it from its heartbeats"


def _process_of(rank: int, incarnation: int, history: History) -> int:
    """The last process with this rank and incarnation; -1 if there is none."""
    for event in reversed(history.events):
        if event.node.rank == rank and event.node.incarnation == incarnation:
            return event.process
    return -1


def i15_only_for_a_reason(world: World) -> Iterator[str]:
    """A generation has as many members as the settings require, and a verdict has a recorded reason."""
    history, rules = world.history, world.rules
    for number, (write, record) in history.generations.items():
        yield from _dismissed_wrongly(history, rules, record, write.time)
        if record.verdict is None:
            yield from _too_small(history, rules, record)
            continue
        code = record.verdict.exit_code
        why = {0: _asked_to_stop, 2: _refused, 4: _failed_too_often, 5: _too_few}.get(code)
        if why is None or not why(history, rules, record, write.time):
            yield f"generation {number} ends the run with exit code {code}, without a reason: {record.verdict.reason}"


def _too_small(history: History, rules: Rules, record: Generation) -> Iterator[str]:
    """A session begins with as many nodes as its settings ask for, and goes on without one only if they allow that."""
    shrinks, elastic = rules.on_node_failure == "shrink", rules.limits.last_call_s is not None
    size = {**history.settings, **record.settings}["num_nodes"]
    begins = record.reason in STARTS
    least = rules.min_nodes if shrinks or (begins and elastic) else size if begins else 0
    if rules.lacks_role(record.ranks):
        yield f"generation {record.number} goes on, and {rules.lacks_role(record.ranks)}"
    if len(record.members) < least:
        yield f"generation {record.number} has {len(record.members)} members, at least {least} are asked for"
    if not begins and not shrinks:
        before = history.generations[record.number - 1][1]
        gone = [rank for rank in before.ranks if rank not in record.ranks]
        if gone:
            yield f"generation {record.number} goes on without nodes {gone}, which nobody asked for"


def _asked_to_stop(history: History, rules: Rules, record: Generation, time: float) -> bool:
    """Whether there was a request to stop at once; or at the next safe point, and nobody is beyond the row after it, or all wait for a
    lost node."""
    asked = [w.record for w in history.writes if isinstance(w.record, StopRequest) and w.time <= time]
    begun = any(
        place[:2] == (record.number - 1, record.start.iteration) and place[2] > history.span(record)[0] + 1
        for place in history.facts
    )
    at_once = any(request.now for request in asked) or _may_have_lost(history, record, time)
    return bool(asked) and (at_once or not begun)


def _may_have_lost(history: History, record: Generation, time: float) -> bool:
    """Whether a member of the generation before had ended, was started again, or was kept from its heartbeats."""
    for member in history.generations[record.number - 1][1].members:
        process = _process_of(member.rank, member.incarnation, history)
        again = history.joins.get((member.rank, member.incarnation + 1))
        ended = process in history.ended and history.ended[process].time < time
        silenced = any(number == process and begin <= time for number, begin, _ in history.silenced)
        if ended or silenced or (again and again.time <= time):
            return True
    return False


def _failures(history: History, time: float) -> Iterator[tuple[int, int, Fact]]:
    """The failures published up to `time`: generation, iteration, fact."""
    for write in history.writes:
        fact = write.record
        if isinstance(fact, Fact) and fact.status == "failed" and write.time <= time:
            number, iteration, _ = row_of(write.path)
            yield number, iteration, fact


def _refused(history: History, rules: Rules, record: Generation, time: float) -> bool:
    return any(
        number == record.number - 1 and fact.value.get("refused")
        for number, _, fact in _failures(history, time)
    )


def _failed_too_often(history: History, rules: Rules, record: Generation, time: float) -> bool:
    """Whether this iteration failed once more than the settings allow, or twice in the same way, the last time in the generation before."""
    failed: dict[int, set[str]] = {}
    for number, iteration, fact in _failures(history, time):
        if iteration == record.start.iteration:
            failed.setdefault(number, set()).add("" if fact.value.get("noticed") else fact.value["error"])
    last = failed.pop(record.number - 1, None)
    return last is not None and (
        len(failed) >= rules.retries or bool(last & set().union(*failed.values()) - {""})
    )


def _dismissed_wrongly(history: History, rules: Rules, record: Generation, time: float) -> Iterator[str]:
    """A node leaves because of its programs only if it failed as often as the run would have to, and in its own way."""
    if record.dismissed and not _failed_too_often(history, rules, record, time):
        yield f"generation {record.number} gives up nodes too early"
    if record.dismissed and rules.on_node_failure != "shrink":
        yield f"generation {record.number} goes on without nodes, which nobody asked for"
    for member in record.dismissed:
        own: set[tuple[int, str]] = set()
        others: set[tuple[int, str]] = set()
        for number, iteration, fact in _failures(history, time):
            if iteration == record.start.iteration and not fact.value.get("noticed"):
                (own if fact.rank == member.rank else others).add((number, fact.value["error"]))
        if record.number - 1 not in {number for number, _ in own}:
            yield f"node {member.rank} leaves in generation {record.number}, and did not fail before it"
        shared = {why for _, why in own} & {why for _, why in others}
        if shared and not any(other.rank != member.rank for other in record.dismissed):
            yield f"node {member.rank} leaves in generation {record.number} because of {shared}, as others failed"


def _too_few(history: History, rules: Rules, record: Generation, time: float) -> bool:
    """Whether members of the last generation are lost, and the settings do not let the run go on without them."""
    before = history.generations[record.number - 1][1]
    lost = len(record.members) < len(before.members)
    return lost and (rules.on_node_failure != "shrink" or bool(rules.lacks(record.ranks)))


def gave_up_for_a_reason(world: World) -> Iterator[str]:
    """A node ends because its filesystem fails only if that has lasted for `outage_s`, and lasts; one that has not joined, sooner."""
    history, struck = world.history, world.history.faults
    for process, ended in history.ended.items():
        if ended.code != 3 or ("cannot be read" in ended.why and struck & {"unreadable", "handles"}):
            continue
        # A start does not wait for a disk that is full. Single errors in the looks just before an outage lengthen it.
        least = 0.0 if "cannot join" in ended.why else 0.98 * world.draw.intervals.outage_s
        least -= 3.0 * bool(struck & {"error", "lost", "garbled", "handles"})
        own = [(begin, end) for rank, begin, end in history.outages if rank == ended.rank]
        # A record that could not be read is to a node as an outage.
        own += [(time, time) for time in world.processes[process].client.held_up]
        lasted = any(begin + least <= ended.time for begin, _ in own)
        if not lasted or not any(ended.time <= end + 3 * world.draw.beat_s for _, end in own):
            yield f"node {ended.rank} ended at {ended.time:.1f} s, with its filesystem's outages {own}: {ended.why}"
