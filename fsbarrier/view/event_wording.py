"""The one-line text of each event, used by the daemon's log, the live view, the summary and the report. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from fsbarrier.protocol.session import shown
from fsbarrier.protocol.succession import RENEWED
from fsbarrier.protocol.wording import counted
from fsbarrier.rundir.journal import Event, lost_nodes
from fsbarrier.store.printable import printable
from fsbarrier.view.amounts import amount, clock_time, duration, one_line
from fsbarrier.view.phase_names import LONG

#: Phases shorter than this many seconds get no line when they finish.
WORTH_S = 1.0
#: Prefix of the reason of a generation that retries a failed program; the rest describes the failure.
AGAIN = "again: "


def event_text(event: Event) -> str | None:
    """An event as one line of text; None for events that are meant for scripts or that repeat other events."""
    wording = WORDING.get(event.name)
    text = wording(event) if wording is not None else None
    return one_line(text) if text else None


def event_line(event: Event) -> str | None:
    """The same with the time of day, for a plain log."""
    text = event_text(event)
    return f"{clock_time(event.at)}  {text}" if text else None


def log_lines(event: Event) -> list[str]:
    """The lines that a daemon logs about an event: its text, followed by evidence for failures. May be empty."""
    line = event_line(event)
    return [line, *(f"  | {printable(detail)}" for detail in _evidence(event))] if line else []


def _evidence(event: Event) -> Iterator[str]:
    match event.name:
        case "node_lost":
            for node in lost_nodes(event):
                if node.beat_age_s is not None:
                    yield f"node {node.node_rank}: last heartbeat seen {node.beat_age_s:.1f} s ago"
                yield from (f"node {node.node_rank}: {line}" for line in node.log)
        case "work_failed" | "engine_restarted":
            yield from event.lines("log")
        case "generation_started" if event.text("reason").startswith(AGAIN):
            yield event.text("reason").removeprefix(AGAIN)


_GENERATION_LINE = re.compile(r"\bgeneration \d+: nodes \d")


# --- the events -----------------------------------------------------------------------------------------------------------


def _joined(event: Event) -> str:
    pid = event.integer("pid")
    return f"node {event.node_rank} joined ({event.text('host') or '?'}{f', process {pid}' if pid else ''})"


def _generation(event: Event) -> str:
    members = event.fields.get("members")
    nodes = ", ".join(map(str, members)) if isinstance(members, list) else "?"
    leader, reason = event.integer("leader"), event.text("reason")
    if reason.startswith(RENEWED):
        return ""
    why = " (retry)" if reason.startswith(AGAIN) else f" ({reason})"
    # The lost node already has its own line.
    if reason in ("", "start") or " is lost: " in reason:
        why = ""
    settings = event.fields.get("settings")
    each = settings.items() if isinstance(settings, Mapping) else ()
    changed = "".join(f"; {name}={shown(value)}" for name, value in each)
    return f"generation {event.generation}: nodes {nodes}; leader {_or_unknown(leader)}{why}{changed}"


def says_generation(line: str) -> bool:
    """Whether a line of a node's output reports a new generation, in the wording of `_generation`."""
    return _GENERATION_LINE.search(line) is not None


def _sealed(event: Event) -> str:
    place = event.fields.get("goes_on_at")
    where = ""
    if isinstance(place, list) and len(place) == 2:
        where = f" at iteration {place[0]}, phase {place[1]}"
    number = _or_unknown(event.integer("number"))
    return f"generation {number} has ended; the run continues{where}"


def _left(event: Event) -> str:
    why = f" ({event.text('reason')})" if event.text("reason") else ""
    return f"node {event.node_rank} is not in generation {event.integer('newest')}{why}; it rejoins"


def _suspect(event: Event) -> str:
    host, silent_s = event.text("host"), event.number("silent_s")
    name = f"node {_or_unknown(event.integer('suspect'))}{f' ({host})' if host else ''}"
    if event.name == "node_recovered":
        return f"{name} has a heartbeat again"
    return f"{name} has had no heartbeat{f' for {silent_s:.0f} s' if silent_s is not None else ''}"


def _lost(event: Event) -> str:
    each = [
        f"node {node.node_rank} ({node.host or '?'}) is lost: {node.why or 'unknown reason'}"
        for node in lost_nodes(event)
    ]
    waiting = "; the phase waits for its return" if event.fields.get("waiting") is True else ""
    return ("; ".join(each) or "a node is lost") + waiting


def _failed(event: Event) -> str:
    where = f"node {event.node_rank}, iteration {event.iteration}, {event.phase_name}"
    return f"{where} failed: {event.text('error') or 'unknown error'}"


def _rolled_out(event: Event) -> str:
    reward, count = event.number("reward_mean"), event.integer("trajectories")
    rounds = event.integer("rounds") or 1
    unusual = {
        "groups_taken_over": "taken over from slower nodes",
        "groups_cut_off": "cut off",
        "left_out": "left out",
    }
    parts = [
        f"train reward {amount(reward)}" if reward is not None else "",
        f"{count} trajectories" if count is not None else "",
        f"{rounds} rounds" if rounds > 1 else "",
        _unjudged(event),
        *(
            f"{counted(groups, 'group')} {what}"
            for name, what in unusual.items()
            if (groups := event.integer(name))
        ),
    ]
    return f"iteration {event.iteration}: {_listed(parts) or 'rolled out'}{_policy(event)}"


def _evaluated(event: Event) -> str:
    reward = amount(event.number("reward_mean"))
    unjudged = f" ({failed})" if (failed := _unjudged(event)) else ""
    when = "at the end" if event.fields.get("final") is True else f"iteration {event.iteration}"
    sets = [
        f"{name.removesuffix('/reward')} {amount(event.number(name))}"
        for name in event.fields
        if name.endswith("/reward") and name.count("/") == 1
    ]
    of_sets = f": {', '.join(sets)}" if sets else ""
    return f"{when}: held-out reward {reward}{of_sets}{unjudged}{_policy(event)}"


def _unjudged(event: Event) -> str:
    count = event.integer("unjudged")
    if not count:
        return ""
    who = [f"the {name}" for name in ("reward", "agent") if event.integer(f"{name}_errors")]
    return f"{count} not scored: {' or '.join(who) or 'the reward or the agent'} failed"


def _updated(event: Event) -> str:
    steps, loss = event.integer("optimizer_steps"), event.number("loss")
    held_out = event.number("held_out_loss")
    gap, replayed = event.number("logprob_gap_mean"), event.integer("replayed")
    parts = [
        f"{steps} optimizer steps" if steps is not None else "",
        f"loss {loss:.2g}" if loss is not None else "",
        f"held-out loss {held_out:.2g}" if held_out is not None else "",
        f"log-prob gap {gap:.1g}" if gap is not None else "",
        f"{replayed} sequences from other policy versions" if replayed else "",
    ]
    return f"iteration {event.iteration}: updated ({_listed(parts) or 'done'})"


def _published(event: Event) -> str:
    version = _or_unknown(event.integer("policy_version"))
    return f"iteration {event.iteration}: published policy version {version}"


def _noting(field: str, after: str = "") -> Callable[[Event], str | None]:
    """A line with the node and one field of the event; None if the field is empty."""
    return lambda event: f"node {event.node_rank}: {note}{after}" if (note := event.text(field)) else None


def _restarted(event: Event) -> str:
    times = counted(event.integer("times") or 0, "time")
    return f"node {event.node_rank}: {event.phase_name} was started again {times}: {event.text('why')}"


def _phase_started(event: Event) -> str | None:
    if event.phase_name not in LONG:
        return None
    return f"iteration {event.iteration}, phase {event.phase} {event.phase_name} begins"


def _phase_finished(event: Event) -> str | None:
    seconds = event.number("seconds")
    if seconds is None or seconds < WORTH_S:
        return None
    return f"iteration {event.iteration}, phase {event.phase} {event.phase_name} took {duration(seconds)}"


def _ended(event: Event) -> str:
    run_ends = event.text("state") in ("finished", "stopped", "broken")
    who, reason = "the run" if run_ends else f"node {event.node_rank}", event.text("reason")
    return f"{who} ended{f': {reason}' if reason else ''}"


def _policy(event: Event) -> str:
    version = event.integer("policy_version")
    return "" if version is None else f" (policy version {version})"


def _code_changed(event: Event) -> str:
    names = event.fields.get("what")
    listed = ", ".join(map(str, names)) if isinstance(names, list) else "?"
    return f"changed since the last start of this node: {listed}"


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)


#: event name -> its text; other events are meant for scripts
WORDING: dict[str, Callable[[Event], str | None]] = {
    "node_joined": _joined,
    "generation_started": _generation,
    "generation_sealed": _sealed,
    "tracker_failed": lambda event: (
        f"tracker {event.text('tracker') or 'program'} fails: {event.text('why')}"
    ),
    "left_generation": _left,
    "node_suspected": _suspect,
    "node_recovered": _suspect,
    "node_lost": _lost,
    "work_failed": _failed,
    "shares_fixed": lambda event: f"nodes do not take over each other's tasks: {event.text('why') or '?'}",
    "rolled_out": _rolled_out,
    "evaluated": _evaluated,
    "updated": _updated,
    "weights_published": _published,
    "code_changed": _code_changed,
    "listens": lambda event: (
        f"port {_or_unknown(event.integer('port'))} is open to other hosts for the update: on all addresses until torchrun has "
        "started, then only on the address that all nodes can reach"
    ),
    "nodes_differ": lambda event: f"{event.text('what') or '?'}: {event.text('found') or '?'}",
    "weights_checked": _noting("note", "; its engines read the run directory"),
    "engine_ready": _noting("engine_note"),
    "engine_restarted": lambda event: (
        f"node {event.node_rank}: engines.{event.text('engine')} was started again: {event.text('why')}"
    ),
    "program_restarted": _restarted,
    "phase_started": _phase_started,
    "phase_finished": _phase_finished,
    "iteration_finished": lambda event: f"iteration {event.iteration} is done",
    "node_ended": _ended,
}
