"""The one-line text of each event, used by the daemon's log, the live view, the summary and the report. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from fsbarrier.program import PHASE_NAMES, RL_SLICES
from fsbarrier.protocol.succession import RENEWED
from fsbarrier.rundir.journal import Event, lost_nodes
from fsbarrier.wording import amount, clock_time, counted, duration, one_line, printable, setting_text

#: Phases shorter than this many seconds get no line when they finish.
WORTH_S = 1.0
#: Prefix of the reason of a generation that retries a failed program; the rest describes the failure.
AGAIN = "again: "
COUNT = len(PHASE_NAMES)

#: the phase whose heartbeats contain the training reward so far
TRAIN_ROLLOUT = "train_rollout"

#: long phases, whose start is reported too
LONG = frozenset({TRAIN_ROLLOUT, "eval_rollout", "update"})


def event_text(event: Event) -> str | None:
    """An event as one line of text; None for events that are meant for scripts or that repeat other events."""
    wording = WORDING.get(event.name, "")
    text = filled(wording, event) if isinstance(wording, str) else wording(event)
    return one_line(text) or None


def event_line(event: Event) -> str | None:
    """`event_text` with the time of day in front, for a plain log."""
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


# --- templates ------------------------------------------------------------------------------------------------------------

_FIELD = re.compile(r"\{(\w+):?([^}]*)\}")
_PART = re.compile(rf"\[([^\]]*)\]|{_FIELD.pattern}")
#: number formats of templates in addition to Python's; "": the number is not worth showing
FORMATS: Mapping[str, Callable[[float], str]] = {
    "amount": amount,
    "duration": duration,
    "some": lambda number: f"{number:.0f}" if number else "",
    "groups": lambda number: counted(int(number), "group") if number else "",
    "rounds": lambda number: f"{number:.0f} rounds" if number > 1 else "",
    "times": lambda number: counted(int(number), "time") if number else "",
}


def filled(template: str, event: Event) -> str:
    """Fill a template with the fields of an event: {name} or {name:format}, "?" for a missing field. A part in [brackets] is left out if
    one of its fields is missing; its alternatives a|b are joined with commas."""

    def part(match: re.Match[str]) -> str:
        optional, name, form = match.groups()
        if name is not None:
            return _value(event, name, form) or "?"
        return ", ".join(filter(None, (_optional(word, event) for word in optional.split("|"))))

    return _PART.sub(part, template)


def _optional(part: str, event: Event) -> str:
    values = [_value(event, name, form) for name, form in _FIELD.findall(part)]
    return _FIELD.sub(lambda _: values.pop(0), part) if all(values) else ""


def _value(event: Event, name: str, form: str) -> str:
    """A field as text; "" if it is missing or has another type than the template expects."""
    if form:
        number = event.number(name)
        if number is None:
            return ""
        return FORMATS[form](number) if form in FORMATS else format(number, form)
    whole = event.integer(name)
    return (event.text(name) or ", ".join(event.lines(name))) if whole is None else str(whole)


# --- events that need more than a template ---------------------------------------------------------------------------------


def _generation(event: Event) -> str:
    reason = event.text("reason")
    if reason.startswith(RENEWED):
        return ""
    why = " (retry)" if reason.startswith(AGAIN) else f" ({reason})"
    # The lost node already has its own line.
    if reason in ("", "start") or " is lost: " in reason:
        why = ""
    settings = event.fields.get("settings")
    each = settings.items() if isinstance(settings, Mapping) else ()
    changed = "".join(f"; {name}={setting_text(value)}" for name, value in each)
    return filled("generation {generation}: nodes {members}; leader {leader}", event) + why + changed


def _lost(event: Event) -> str:
    each = [
        f"node {node.node_rank} ({node.host or '?'}) is lost: {node.why or 'unknown reason'}"
        for node in lost_nodes(event)
    ]
    after = ""
    if event.fields.get("waiting") is True:
        after = "; the phase waits for its return"
    elif event.fields.get("finishing") is True:
        after = f"; the others first finish the {event.text('phase_name') or 'phase'}"
    return ("; ".join(each) or "a node is lost") + after


def _evaluated(event: Event) -> str:
    when = "at the end" if event.fields.get("final") is True else f"iteration {event.iteration}"
    sets = [
        f"{name.removesuffix('/reward')} {amount(event.number(name))}"
        for name in event.fields
        if name.endswith("/reward") and name.count("/") == 1
    ]
    reward = f"held-out reward {amount(event.number('reward_mean'))}"
    of_sets = f": {', '.join(sets)}" if sets else ""
    return f"{when}: {reward}{of_sets}{filled(f'{UNJUDGED}{POLICY}', event)}"


def _phase_started(event: Event) -> str:
    begins = "iteration {iteration}, phase {phase} {phase_name} begins"
    return filled(begins, event) if event.phase_name in LONG else ""


def _phase_finished(event: Event) -> str:
    took = "iteration {iteration}, phase {phase} {phase_name} took {seconds:duration}"
    return filled(took, event) if (event.number("seconds") or 0.0) >= WORTH_S else ""


def _ended(event: Event) -> str:
    run_ends = event.text("state") in ("finished", "stopped", "broken")
    return filled(f"{'the run' if run_ends else 'node {node_rank}'} ended[: {{reason}}]", event)


POLICY = "[ (policy version {policy_version})]"
UNJUDGED = "[; {unjudged:some} not scored|the reward failed {reward_errors:times}|the agent failed {agent_errors:times}]"

#: event name -> its template, or the function that words it; other events are meant for scripts
WORDING: dict[str, str | Callable[[Event], str]] = {
    "node_joined": "node {node_rank} joined ({host}[, process {pid}])",
    "generation_started": _generation,
    "generation_sealed": "generation {number} has ended; the run continues",
    "tracker_failed": "tracker {tracker} fails: {why}",
    "left_generation": "node {node_rank} is not in generation {newest}[ ({reason})]; it rejoins",
    "node_suspected": "node {suspect}[ ({host})] has had no heartbeat[ for {silent_s:.0f} s]",
    "node_recovered": "node {suspect}[ ({host})] has a heartbeat again",
    "node_lost": _lost,
    "work_failed": "node {node_rank}, iteration {iteration}, {phase_name} failed: {error}",
    "shares_fixed": "nodes do not take over each other's tasks: {why}",
    "rolled_out": "iteration {iteration}: [train reward {reward_mean:amount}|{trajectories} trajectories|{rounds:rounds}"
    "|{groups_taken_over:groups} taken over from slower nodes|{groups_cut_off:groups} cut off|{left_out:groups} left out]"
    f"{UNJUDGED}{POLICY}",
    "evaluated": _evaluated,
    "updated": "iteration {iteration}: updated ([{optimizer_steps} optimizer steps|loss {loss:.2g}|held-out loss {held_out_loss:.2g}"
    "|log-prob gap {logprob_gap_mean:.1g}|{replayed:some} sequences from other policy versions])",
    "weights_published": "iteration {iteration}: published policy version {policy_version}",
    "code_changed": "changed since the last start of this node: {what}",
    "listens": "port {port} is open to other hosts for the update: on all addresses until torchrun has started, then only on the address "
    "that all nodes can reach",
    "nodes_differ": "{what}: {found}",
    "weights_checked": "[node {node_rank}: {note}; its engines read the run directory]",
    "engine_ready": "[node {node_rank}: {engine_note}]",
    "engine_restarted": "node {node_rank}: engines.{engine} was started again: {why}",
    "program_restarted": "node {node_rank}: {phase_name} was started again {times:times}: {why}",
    "phase_started": _phase_started,
    "phase_finished": _phase_finished,
    "iteration_finished": "iteration {iteration} is done[, about {left_s:duration} left]",
    "node_ended": _ended,
}


def phase_name(index: int) -> str:
    """The name of a phase; "" for an unknown number."""
    return PHASE_NAMES[index] if index < COUNT else ""


def last_phase(rl_phase: str, seen: Mapping[int, str]) -> int | None:
    """The last phase of an iteration with this --rl-phase. `seen`: the phases in the run's journals.

    None for a program whose phases the views do not know.
    """
    if any(name != phase_name(index) for index, name in seen.items()):
        return None
    names = (part.last for part in RL_SLICES if part.name == rl_phase)
    return PHASE_NAMES.index(next(names, PHASE_NAMES[-1]))
