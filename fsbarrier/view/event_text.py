"""Events, durations and amounts in plain words. Pure; one wording for the log, the live view and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from fsbarrier.view.history import lost_nodes
from fsbarrier.view.lines import Line, integer, number, parse, text

SHOWN_RANKS = 6
WORTH_S = 1.0  # phases shorter than this are not told as lines
#: phases that are told when they begin, since they may take long
LONG_PHASES = frozenset({"train_rollout", "eval_rollout", "update"})


def event_line(line: Mapping[str, Any]) -> str | None:
    """A journal's line for a plain log: local time and words; None where it is not worth a line."""
    parsed = parse(line)
    told = event_text(parsed) if parsed is not None else None
    return f"{clock_time(parsed.at)}  {told}" if parsed is not None and told else None


def event_text(line: Line) -> str | None:
    """An event in plain words, one line; None where it is not worth a line."""
    tell = _TELL.get(line.event)
    told = tell(line) if tell is not None else None
    return one_line(told) if told else None


# --- the events -----------------------------------------------------------------------------------------------------------


def _joined(line: Line) -> str:
    pid = integer(line.fields, "pid")
    where = text(line.fields, "host") or "?"
    return f"node {line.node_rank} joined ({where}{f', process {pid}' if pid else ''})"


def _generation(line: Line) -> str:
    members = line.fields.get("members")
    nodes = ", ".join(str(rank) for rank in members) if isinstance(members, list) else "?"
    reason = text(line.fields, "reason")
    leader = integer(line.fields, "leader")
    told = reason in ("", "start") or " is lost: " in reason  # by a line of its own
    why = "" if told else " (another try)" if reason.startswith("again: ") else f" ({reason})"
    return f"generation {line.generation}: nodes {nodes}; leader {leader if leader is not None else '?'}{why}"


def _sealed(line: Line) -> str:
    number, place = integer(line.fields, "number"), line.fields.get("goes_on_at")
    where = (
        f" at iteration {place[0]}, phase {place[1]}" if isinstance(place, list) and len(place) == 2 else ""
    )
    name = number if number is not None else "?"
    return f"generation {name} is over, whoever of it still lives; the run goes on{where}"


def _left(line: Line) -> str:
    reason = text(line.fields, "reason")
    newest = integer(line.fields, "newest")
    return f"node {line.node_rank} is not in generation {newest}{f' ({reason})' if reason else ''}; it joins again"


def _suspect(line: Line) -> str:
    rank, host = integer(line.fields, "suspect"), text(line.fields, "host")
    name = f"node {rank if rank is not None else '?'}{f' ({host})' if host else ''}"
    silent = number(line.fields, "silent_s")
    if line.event == "node_recovered":
        return f"{name} is heard again"
    return f"{name} is silent{f' for {silent:.0f} s' if silent is not None else ''}"


def _lost(line: Line) -> str:
    each = [
        f"node {item.get('node_rank')} ({text(item, 'host') or '?'}) is lost: {text(item, 'why') or 'no news'}"
        for item in lost_nodes(line)
    ]
    waiting = "; the phase waits until it is back" if line.fields.get("waiting") is True else ""
    return ("; ".join(each) or "a node is lost") + waiting


def _failed(line: Line) -> str:
    where = f"node {line.node_rank}, iteration {line.iteration}, {line.phase_name}"
    return f"{where} failed: {text(line.fields, 'error') or 'no reason was given'}"


ROLLED_OUT = (
    ("groups_taken_over", "taken over from slower nodes"),
    ("groups_cut_off", "cut off"),
    ("left_out", "left out"),
)


def _rolled_out(line: Line) -> str:
    reward, count = number(line.fields, "reward_mean"), integer(line.fields, "trajectories")
    version = integer(line.fields, "policy_version")
    parts = [
        f"train reward {amount(reward)}" if reward is not None else "",
        f"{count} trajectories" if count is not None else "",
        *(f"{many} groups {what}" for name, what in ROLLED_OUT if (many := integer(line.fields, name))),
    ]
    return f"iteration {line.iteration}: {', '.join(part for part in parts if part) or 'rolled out'}{_policy(version)}"


def _evaluated(line: Line) -> str:
    reward, version = number(line.fields, "reward_mean"), integer(line.fields, "policy_version")
    return f"iteration {line.iteration}: held-out reward {amount(reward)}{_policy(version)}"


def _updated(line: Line) -> str:
    steps, loss = integer(line.fields, "optimizer_steps"), number(line.fields, "loss")
    gap = number(line.fields, "logprob_gap_mean")
    parts = [
        f"{steps} optimizer steps" if steps is not None else "",
        f"loss {loss:.4g}" if loss is not None else "",
        f"log-prob gap {gap:.1g}" if gap is not None else "",
        f"{replayed} sequences of other policies" if (replayed := integer(line.fields, "replayed")) else "",
    ]
    return f"iteration {line.iteration}: updated ({', '.join(part for part in parts if part) or 'done'})"


def _published(line: Line) -> str:
    version = integer(line.fields, "policy_version")
    return (
        f"iteration {line.iteration}: policy version {version if version is not None else '?'} is published"
    )


def _engine(line: Line) -> str | None:
    note = text(line.fields, "engine_note")
    return f"node {line.node_rank}: {note}" if note else None


def _policy(version: int | None) -> str:
    return "" if version is None else f" (policy version {version})"


def _phase_started(line: Line) -> str | None:
    if line.phase_name not in LONG_PHASES:
        return None
    return f"iteration {line.iteration}, phase {line.phase} {line.phase_name} begins"


def _phase_finished(line: Line) -> str | None:
    seconds = number(line.fields, "seconds")
    if seconds is None or seconds < WORTH_S:
        return None
    return f"iteration {line.iteration}, phase {line.phase} {line.phase_name} took {duration(seconds)}"


def _ended(line: Line) -> str:
    reason, state = text(line.fields, "reason"), text(line.fields, "state")
    who = "the run" if state in ("finished", "stopped", "broken") else f"node {line.node_rank}"
    return f"{who} ended{f': {reason}' if reason else ''}"


_TELL: dict[str, Callable[[Line], str | None]] = {
    "node_joined": _joined,
    "generation_started": _generation,
    "generation_sealed": _sealed,
    "left_generation": _left,
    "node_suspected": _suspect,
    "node_recovered": _suspect,
    "node_lost": _lost,
    "work_failed": _failed,
    "shares_fixed": lambda line: f"nodes do not take over from each other: {text(line.fields, 'why') or '?'}",
    "rolled_out": _rolled_out,
    "evaluated": _evaluated,
    "updated": _updated,
    "weights_published": _published,
    "engine_ready": _engine,
    "phase_started": _phase_started,
    "phase_finished": _phase_finished,
    "iteration_finished": lambda line: f"iteration {line.iteration} is done",
    "node_ended": _ended,
}

# --- amounts --------------------------------------------------------------------------------------------------------------


def one_line(words: str) -> str:
    """The first line of `words`, without what could confuse a terminal."""
    first = words.strip().split("\n", 1)[0]
    return "".join(c if c.isprintable() else " " for c in first).strip()


def clock_time(at: float) -> str:
    """A wall-clock time of day, as it is here."""
    try:
        return f"{datetime.fromtimestamp(at):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def duration(seconds: float) -> str:
    """12 ms, 3.4 s, 83 s, 5 min 12 s, 2 h 05 min, 3 d 4 h."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 99.5:
        return f"{seconds:.{2 if seconds < 0.995 else 1 if seconds < 9.95 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def amount(value: float | None) -> str:
    """A reward or the like with two to three digits that count; – for none."""
    if value is None:
        return "–"
    return f"{value:.3f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def short(value: float) -> str:
    """980, 1.5k, 23k, 4.1M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.{1 if abs(scaled) < 9.95 else 0}f}{unit}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """0.04 %, 3.1 %, 42 %."""
    value = 100 * share
    return f"{value:.{2 if value < 0.995 else 1 if value < 9.95 else 0}f} %"


def ranks(values: Iterable[int]) -> str:
    """0, 1, 5 or, where there are many, 0, 1, 2, 3, 4, 5 and 12 more."""
    chosen = list(values)
    rest = len(chosen) - SHOWN_RANKS
    named = ", ".join(map(str, chosen[:SHOWN_RANKS]))
    return named if rest <= 0 else f"{named} and {rest} more"


TICKS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: list[float | None], width: int, low: float | None = None, high: float | None = None
) -> str:
    """The newest `width` values as one line of blocks, between `low` and `high` (their own extremes if not given)."""
    shown = values[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low = min(known) if low is None else low
    high = max(known) if high is None else high
    span = high - low

    def tick(value: float | None) -> str:
        if value is None:
            return "·"
        share = 0.5 if span <= 0 else (value - low) / span
        return TICKS[max(0, min(len(TICKS) - 1, round(share * (len(TICKS) - 1))))]

    return "".join(map(tick, shown))
