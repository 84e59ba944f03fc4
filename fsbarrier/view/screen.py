"""What the terminal shows of a run, as rich renderables: header, table of nodes, reward curves, where the time goes, events.

Everything is built to a given width, one line a thing, nothing wraps; what came from files is stripped of control characters.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsbarrier.program import PHASE_NAMES
from fsbarrier.view.event_text import (
    amount,
    clock_time,
    duration,
    event_text,
    one_line,
    percent,
    ranks,
    short,
    sparkline,
)
from fsbarrier.view.history import Rewards
from fsbarrier.view.lines import Line, number, text
from fsbarrier.view.status import RunStatus
from fsbarrier.view.timings import IterationTime, phase_totals
from fsbarrier.view.troubles import NodeStatus

STATE_STYLE = {
    "running": "green",
    "finished": "green",
    "joining": "cyan",
    "stalled": "bold yellow",
    "suspected": "bold yellow",
    "stopped": "yellow",
    "left": "yellow",
    "lost": "bold red",
    "broken": "bold red",
    "absent": "dim",
}
TRAIN, TEST = "cyan", "magenta"
LEAST_SPAN = 0.25  # of the largest reward: what the height of a curve stands for at least
SHORT_SHARE = 0.005  # phases below this share of an iteration are told together
EVENT_STYLE = {
    "node_lost": "red",
    "work_failed": "red",
    "node_suspected": "yellow",
    "left_generation": "yellow",
    "evaluated": TEST,
    "rolled_out": TRAIN,
    "generation_started": "bold",
}


def line(*parts: str | tuple[str, str] | Text) -> Text:
    """One line that is cut, not wrapped."""
    joined = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        joined.append_text(part) if isinstance(part, Text) else joined.append(
            *([part] if isinstance(part, str) else part)
        )
    return joined


# --- header -----------------------------------------------------------------------------------------------------------------


def header(status: RunStatus, width: int, elapsed_s: float | None = None) -> list[Text]:
    """Two lines: which run, in which state; where in it."""
    dot = ("● " if status.state in ("running", "stalled") else "■ ") + status.state
    left = line(
        ("fsbarrier ", "bold"), f"{one_line(status.program)}  ", (dot, STATE_STYLE.get(status.state, ""))
    )
    right = [status.run_id] + ([duration(elapsed_s)] if elapsed_s is not None else [])
    return [spread(left, line(("  ".join(right), "dim")), width), spread(*_place(status), width)]


def _place(status: RunStatus) -> tuple[Text, Text]:
    if status.phase is None:
        seen = sum(1 for node in status.nodes if node.state not in ("absent", "lost"))
        return line(f"waiting for the nodes: {seen} of {status.num_nodes} have joined"), line()
    of = f" of {status.iterations}" if status.iterations is not None else ""
    index = status.phase.index
    strip = line(("━" * index, "green"), ("●", "bold green"), ("─" * (len(PHASE_NAMES) - 1 - index), "dim"))
    left = line(
        "iteration ",
        (f"{status.iteration}{of}", "bold"),
        "  phase ",
        (f"{index} {one_line(status.phase.name)} ", "bold"),
        strip,
    )
    leader = f", leader {status.leader}" if status.leader is not None else ""
    return left, line((f"generation {status.generation}{leader}", "dim"))


def spread(left: Text, right: Text, width: int) -> Text:
    """Two texts at the ends of a line; the right one gives way."""
    gap = width - cell_len(left.plain) - cell_len(right.plain)
    return line(left) if gap < 2 or not right.plain else line(left, " " * gap, right)


# --- nodes ------------------------------------------------------------------------------------------------------------------


def nodes_table(status: RunStatus, width: int, most: int | None = None) -> RenderableType:
    """One row a node; `most` rows, the troubled ones before the others."""
    shown, hidden = _chosen(status.nodes, most)
    hosts = {node.host for node in status.nodes if node.host}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, width=width, expand=True)
    table.add_column("node", style="bold", no_wrap=True, min_width=4)
    if len(hosts) > 1:
        table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16, min_width=5)
    table.add_column("state", no_wrap=True, min_width=9)
    table.add_column("phase", no_wrap=True, overflow="ellipsis", min_width=10, max_width=21)
    table.add_column("progress", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("beat", justify="right", no_wrap=True, min_width=4)
    host_width = (min(16, max(cell_len(one_line(h)) for h in hosts)) + 1) if len(hosts) > 1 else 0
    phase_width = max((min(21, len(_phase(status, node))) for node in shown), default=10)
    room = max(10, width - 5 - host_width - 10 - max(10, phase_width) - 1 - 6)
    for node in shown:
        cells: list[RenderableType] = [f"{node.node_rank}{'*' if node.node_rank == status.leader else ''}"]
        if len(hosts) > 1:
            cells.append(line(one_line(node.host or "–")))
        state = node.activity or node.state
        cells += [
            line((state, _state_style(node))),
            line(_phase(status, node)),
            progress_text(status, node, room),
            line(_beat(node)),
        ]
        table.add_row(*cells)
    if hidden:
        table.add_row("…", *([""] if len(hosts) > 1 else []), line((f"{hidden} more", "dim")))
    return table


def _chosen(nodes: Sequence[NodeStatus], most: int | None) -> tuple[list[NodeStatus], int]:
    if most is None or len(nodes) <= most:
        return list(nodes), 0
    order = {"lost": 0, "suspected": 0, "broken": 0, "left": 1, "absent": 1, "joining": 1}
    first = sorted(nodes, key=lambda node: (order.get(node.state, 2), node.node_rank))
    kept = first[: max(0, most - 1)]
    return sorted(kept, key=lambda node: node.node_rank), len(nodes) - len(kept)


def _state_style(node: NodeStatus) -> str:
    return "yellow" if node.activity == "waiting" else STATE_STYLE.get(node.state, "")


def _phase(status: RunStatus, node: NodeStatus) -> str:
    if node.phase is None or node.state in ("lost", "absent"):
        return ""
    behind = "" if node.iteration == status.iteration else f" (iteration {node.iteration})"
    return f"{node.phase.index} {one_line(node.phase.name)}{behind}"


def _beat(node: NodeStatus) -> str | tuple[str, str]:
    if node.state == "suspected":
        age = max(node.last_beat_age_s or 0.0, node.silent_s or 0.0)
        return f">{age:.0f} s" if age >= 1 else f">{age:.1f} s", "bold yellow"
    return "–" if node.last_beat_age_s is None else (f"{node.last_beat_age_s:.0f} s", "dim")


def progress_text(status: RunStatus, node: NodeStatus, room: int) -> Text:
    """A node's progress in `room` cells: bar, done/total, reward so far, tokens a second, as far as they fit."""
    if node.progress:
        return progress_bar(node.progress, room)
    if node.activity == "waiting" and status.waiting_for and node.node_rank in _waiters(status):
        awaited = status.waiting_for.node_ranks
        return line((f"waits for node{'s' if len(awaited) > 1 else ''} {ranks(awaited)}", "dim"))
    return line()


def _waiters(status: RunStatus) -> set[int]:
    awaited = status.waiting_for.node_ranks if status.waiting_for else ()
    return {node.node_rank for node in status.nodes} - set(awaited)


def progress_bar(progress: Mapping[str, Any], room: int) -> Text:
    done, total = number(progress, "done"), number(progress, "total")
    note = one_line(text(progress, "note"))
    if done is None or total is None or total <= 0:
        return line((note, "dim"))
    share = max(0.0, min(1.0, done / total))
    counted = f" {short(done)}/{short(total)}" if total >= 10_000 else f" {done:.0f}/{total:.0f}"
    extras = []
    reward, speed = number(progress, "reward_mean"), number(progress, "tokens_per_s")
    if reward is not None:
        extras.append((f"  reward {amount(reward)}", f" r {amount(reward)}"))
    if speed is not None:
        extras.append((f"  {short(speed)} tokens/s", f" {short(speed)}/s"))
    if note:
        extras.append((f"  {note}", ""))
    least = 6
    used = cell_len(counted)
    tail = ""
    for long, brief in extras:
        for form in (long, brief):
            if form and used + cell_len(form) + least <= room:
                tail, used = tail + form, used + cell_len(form)
                break
    width = max(3, min(30, room - used))
    full = round(share * width)
    return line(("━" * full, "green"), ("─" * (width - full), "dim"), counted, (tail, "dim"))


# --- rewards and times --------------------------------------------------------------------------------------------------------


def reward_lines(rewards: Sequence[Rewards], width: int, so_far: float | None = None) -> list[Text]:
    """Up to two lines: the curves of train and held-out reward with first and last value."""
    curves = {"train": [r.train for r in rewards], "held-out": [r.test for r in rewards]}
    if so_far is not None:
        curves["train"].append(so_far)
    known = [value for curve in curves.values() for value in curve if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    high = max(high, low + LEAST_SPAN * max(abs(low), abs(high)))  # noise is not to look like a rise
    found = []
    for name, style in (("train", TRAIN), ("held-out", TEST)):
        values = [value for value in curves[name] if value is not None]
        if not values:
            continue
        spark = sparkline(curves[name], max(8, min(60, width - 50)), low, high)
        change = amount(values[0]) + (f" → {amount(values[-1])}" if len(values) > 1 else "")
        note = "  (so far)" if name == "train" and so_far is not None else ""
        found.append(
            line(f"reward {name:<8} ", (spark, style), "  ", (change, f"bold {style}"), (note, "dim"))
        )
    return found


def so_far(status: RunStatus) -> float | None:
    """The mean reward of the train rollouts under way, by how much each node has done."""
    if status.phase is None or status.phase.name != "train_rollout":
        return None
    pairs = []
    for node in status.nodes:
        reward = number(node.progress or {}, "reward_mean")
        done = number(node.progress or {}, "done")
        if reward is not None and done:
            pairs.append((reward, done))
    total = sum(done for _, done in pairs)
    return sum(reward * done for reward, done in pairs) / total if total > 0 else None


def time_line(times: Sequence[IterationTime], width: int) -> Text | None:
    """Where the time of the last whole iteration went."""
    finished = [one for one in times if one.complete]
    if not finished:
        return None
    last = finished[-1]
    parts = [f"iteration {last.iteration}: {duration(last.seconds)}"]
    longest = sorted(last.phases.items(), key=lambda item: -item[1])
    for (_, name), seconds in longest[:3]:
        if last.seconds > 0 and seconds / last.seconds >= 0.05:
            parts.append(f"{one_line(name)} {percent(seconds / last.seconds)}")
    coordination = f"coordination {duration(last.coordination_s)} ({percent(last.share)})"
    while len(parts) > 1 and cell_len(" · ".join([*parts, coordination])) > width:
        parts.pop()
    return line((" · ".join([*parts, coordination]), "dim"))


def waiting_line(status: RunStatus) -> Text | None:
    """Whom a barrier waits for, once that is worth saying."""
    waiting = status.waiting_for
    if waiting is None or (waiting.for_s is not None and waiting.for_s < 1.0):
        return None
    many = "nodes" if len(waiting.node_ranks) > 1 else "node"
    since = f" for {duration(waiting.for_s)}" if waiting.for_s is not None else ""
    what = f"phase {status.phase.index}" if status.phase is not None else "the start"
    return line((f"{what} waits for {many} {ranks(waiting.node_ranks)}{since}", "yellow"))


def problem_lines(status: RunStatus, width: int, most: int) -> list[Text]:
    """What a person should know, the worst first, in at most `most` lines; what a program said last is indented."""
    style = "bold red" if status.state == "broken" else "yellow"
    found: list[Text] = []
    for problem in status.problems:
        said = problem[:1] == " "
        lead = ("  ", "dim") if said else ("! ", style)
        found += wrapped(lead, one_line(problem), "dim" if said else style, width, most)
    return found[:most]


def wrapped(lead: tuple[str, str], words: str, style: str, width: int, most: int) -> list[Text]:
    """`words` behind `lead`, wrapped into at most `most` lines that are indented as deep."""
    indent = cell_len(lead[0])
    rows = textwrap.wrap(words, max(20, width - indent), max_lines=most, placeholder=" …") or [""]
    return [line(lead if number == 0 else " " * indent, (row, style)) for number, row in enumerate(rows)]


def event_lines(events: Iterable[Line], most: int) -> list[Text]:
    """The newest events in plain words, the newest last."""
    told = [(event, words) for event in events if (words := event_text(event)) is not None]
    return [
        line((f"{clock_time(event.at)}  ", "dim"), (words, EVENT_STYLE.get(event.event, "")))
        for event, words in told[-most:]
        if most > 0
    ]


def phase_table(times: Sequence[IterationTime], width: int) -> RenderableType | None:
    """Seconds a phase took in the mean of the whole iterations, with bars; the very short ones in one row."""
    finished = [one for one in times if one.complete]
    if not finished:
        return None
    totals = phase_totals(finished)
    whole = sum(totals.values()) or 1.0
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(justify="right", style="dim", width=2)
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=9)
    table.add_column(justify="right", no_wrap=True, min_width=6)
    room = max(8, min(40, width - 2 - 18 - 9 - 6 - 10))

    def add(index: str, name: str, seconds: float) -> None:
        full = round(seconds / whole * room)
        bar = line(("━" * full, "green"), ("─" * (room - full), "dim"))
        share = line((percent(seconds / whole), "dim"))
        table.add_row(index, one_line(name), bar, duration(seconds / len(finished)), share)

    short_ones = {key for key, seconds in totals.items() if seconds / whole < SHORT_SHARE}
    for key, seconds in totals.items():
        if key not in short_ones or len(short_ones) < 3:
            add(str(key[0]), key[1], seconds)
    if len(short_ones) >= 3:
        add("", f"{len(short_ones)} short phases", sum(totals[key] for key in short_ones))
    return table
