"""The parts of the terminal views other than the node table: header, problems, reward curves, timings, events, as rich texts.

Each text is one line, truncated at the given width, without control characters.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsbarrier.rundir.journal import Event
from fsbarrier.view import event_wording
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.history import Draws, Rewards
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import IterationTime, together
from fsbarrier.wording import (
    amount,
    clock_time,
    counted,
    duration,
    one_line,
    percent,
    printable,
    ranks,
    short,
    sparkline,
)

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
EVENT_STYLE = {
    "node_lost": "red",
    "work_failed": "red",
    "node_suspected": "yellow",
    "left_generation": "yellow",
    "evaluated": TEST,
    "rolled_out": TRAIN,
    "generation_started": "bold",
}
#: A reward curve spans at least this share of the largest reward, so that noise does not look like progress.
LEAST_RANGE = 0.5
#: the latest figures of the training, the most important first: name (view/run_status.py), words around the value
FIGURES = (
    ("left_s", "about {} left"),
    ("tokens_per_s", "{} tokens/s"),
    ("loss", "loss {}"),
    ("entropy", "entropy {}"),
    ("answer_tokens_mean", "{} tokens an answer"),
    ("segments_per_episode", "{} segments an episode"),
    ("reasoning_share", "{} of the tokens thoughts"),
    ("updates_at_risk", "updates that a lost node repeats: {}"),
)
#: width for a pipe, so that names are not shortened
PIPE_WIDTH = 400


def line(*parts: str | tuple[str, str] | Text) -> Text:
    """One line that is truncated, not wrapped. A part is a text, or a text with its style."""
    return Text.assemble(*map(_safe, parts), no_wrap=True, overflow="ellipsis")


def _safe(part: str | tuple[str, str] | Text) -> str | tuple[str, str] | Text:
    if isinstance(part, Text):
        return part
    return printable(part) if isinstance(part, str) else (printable(part[0]), part[1])


def bar(share: float, cells: int, style: str) -> Text:
    """A bar filled to `share` (0 to 1)."""
    filled = round(max(0.0, min(1.0, share)) * cells)
    return line(("━" * filled, style), ("─" * (cells - filled), "dim"))


def spread(left: Text, right: Text, width: int) -> Text:
    """A left- and a right-aligned text on one line; only the left one if there is not enough room."""
    gap = width - cell_len(left.plain) - cell_len(right.plain)
    return left if gap < 2 or not right.plain else line(left, " " * gap, right)


def wrapped(lead: tuple[str, str], text: str, style: str, width: int, most: int) -> list[Text]:
    """`text` after `lead`, wrapped into at most `most` lines with a hanging indent; a flag or a path is not divided at a hyphen."""
    indent = cell_len(lead[0])
    wrap = textwrap.TextWrapper(
        max(20, width - indent), max_lines=most, placeholder=" …", break_on_hyphens=False
    )
    rows = wrap.wrap(text) or [""]
    return [line(lead if number == 0 else " " * indent, (row, style)) for number, row in enumerate(rows)]


# --- position -------------------------------------------------------------------------------------------------------------


def header(status: RunStatus, width: int, elapsed_s: float | None = None) -> list[Text]:
    """Two lines: the run, by its folder's name, and its state; its position."""
    mark = "●" if status.state in ("running", "stalled") else "■"
    # A problem line says what stopped a run that was stopped.
    code = status.exit_code if status.state != "stopped" else 0
    state = f"{mark} {status.state}{f', exit code {code}' if code else ''}"
    right = f"{one_line(status.program)}  {status.run_id}"
    right += f"  {duration(elapsed_s)}" if elapsed_s is not None else ""
    name = Text(one_line(PurePath(status.log_path).name), "bold")
    name.truncate(max(12, width - cell_len(f"fsbarrier    {state}  {right}")), overflow="ellipsis")
    left = line("fsbarrier ", name, "  ", (state, STATE_STYLE.get(status.state, "")))
    return [spread(left, line((right, "dim")), width), spread(*_place(status), width)]


def _place(status: RunStatus) -> tuple[Text, Text]:
    if status.phase is None:
        seen = sum(1 for node in status.nodes if node.state not in ("absent", "lost"))
        joined = f"{seen} of {counted(status.num_nodes, 'node')}"
        waits = status.state in ("running", "stalled")
        text = (
            f"waiting for nodes: {joined} joined" if waits else f"ended before it began: {joined} had joined"
        )
        return line(text), line()
    of = f" of {status.iterations}" if status.iterations is not None else ""
    index = status.phase.index
    left = line(
        "iteration ",
        (f"{status.iteration}{of}", "bold"),
        "  phase ",
        (f"{index} {one_line(status.phase.name)} ", "bold"),
        ("━" * index, "green"),
        ("●", "bold green"),
        ("─" * (event_wording.COUNT - 1 - index), "dim"),
    )
    leader = f", leader {status.leader}" if status.leader is not None else ""
    return left, line((f"generation {status.generation}{leader}", "dim"))


def waiting_line(status: RunStatus) -> list[Text]:
    """The nodes that a barrier is waiting for, if it has been waiting long enough to be worth a line."""
    waiting = status.waiting_for
    if waiting is None or (waiting.for_s is not None and waiting.for_s < 1.0):
        return []
    many = "nodes" if len(waiting.node_ranks) > 1 else "node"
    since = f" for {duration(waiting.for_s)}" if waiting.for_s is not None else ""
    what = f"phase {status.phase.index}" if status.phase is not None else "the start"
    return [line((f"{what} is waiting for {many} {ranks(waiting.node_ranks)}{since}", "yellow"))]


def problem_lines(status: RunStatus, width: int, most: int) -> list[Text]:
    """Problems, the worst first, in at most `most` lines: the first and the last ones. Log lines of a failed program are indented; the
    last one usually has the reason."""
    style = "bold red" if status.state == "broken" else "yellow"
    lines: list[Text] = []
    for problem in status.problems:
        lead, own = (("  ", "dim"), "dim") if problem.startswith(" ") else (("! ", style), style)
        lines += wrapped(lead, one_line(problem), own, width, most)
    last = most // 2
    return lines if len(lines) <= most else [*lines[: most - last - 1], line(("  …", "dim")), *lines[-last:]]


# --- rewards, times, events -----------------------------------------------------------------------------------------------


def reward_lines(rewards: Sequence[Rewards], width: int) -> list[Text]:
    """Up to two lines: sparklines of training and held-out reward with first and last value."""
    curves = (
        ("train", TRAIN, [reward.train for reward in rewards]),
        ("held-out", TEST, [reward.test for reward in rewards]),
    )
    known = [value for _, _, curve in curves for value in curve if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    high = max(high, low + LEAST_RANGE * max(abs(low), abs(high)))
    lines = []
    for name, style, curve in curves:
        values = [value for value in curve if value is not None]
        if not values:
            continue
        spark = sparkline(curve, max(8, min(60, width - 50)), low, high)
        change = amount(values[0]) + (f" → {amount(values[-1])}" if len(values) > 1 else "")
        lines.append(line(f"reward {name:<8} ", (spark, style), "  ", (change, f"bold {style}")))
    return lines


def time_line(iterations: Sequence[IterationTime], width: int) -> list[Text]:
    """The mean duration, longest phases and coordination of these iterations."""
    if not iterations:
        return []
    total, count = together(iterations), len(iterations)
    name = f"mean of {count}" if count > 1 else f"iteration {total.iteration}"
    parts = [f"{name}: {duration(total.seconds / count)}"]
    for (_, phase), seconds in sorted(total.phases.items(), key=lambda item: -item[1]):
        if total.seconds > 0 and seconds / total.seconds >= 0.05:
            parts.append(f"{one_line(phase)} {percent(seconds / total.seconds)}")
    coordination = f"coordination {duration(total.coordination_s / count)} ({percent(total.share)})"
    while len(parts) > 1 and cell_len(" · ".join([*parts, coordination])) > width:
        parts.pop()
    return [line((" · ".join([*parts, coordination]), "dim"))]


def figures_line(figures: Mapping[str, float], width: int) -> list[Text]:
    """The latest figures of the training, as many as fit."""
    parts: list[str] = []
    for name, words in FIGURES:
        if (value := figures.get(name)) is not None:
            written = {"left_s": duration, "tokens_per_s": short, "answer_tokens_mean": short}.get(
                name, amount
            )
            part = words.format(written(value))
            parts += [part] if cell_len(" · ".join([*parts, part])) <= width else []
    return [line((" · ".join(parts), "dim"))] if parts else []


def draws_text(draws: Draws) -> str:
    """How many of the drawn tasks were never trained, and which. Slow tasks are lost like this without any other sign."""
    if not draws.never:
        return f"each of the {counted(draws.tasks, 'drawn task')} was finished at least once"
    named = ", ".join(draws.named)
    more = f" and {draws.never - len(draws.named)} more" if draws.never > len(draws.named) else ""
    return (
        f"{draws.never} of {counted(draws.tasks, 'drawn task')} never finished, so not trained: {named}{more}"
    )


def event_lines(events: Iterable[Event], most: int) -> list[Text]:
    """The latest events, the newest last."""
    if most <= 0:
        return []
    worded = [(event, text) for event in events if (text := event_text(event)) is not None]
    return [
        line((f"{clock_time(event.at)}  ", "dim"), (text, EVENT_STYLE.get(event.name, "")))
        for event, text in worded[-most:]
    ]


def file_lines(status: RunStatus) -> list[Text]:
    """Where the files of interest are."""
    return [file_line(name.replace("_", " "), path) for name, path in status.files.items()]


def file_line(name: str, path: str) -> Text:
    return line((f"{name:<19}", "dim"), one_line(path))


def print_listing(
    names: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str],
    shortened: str,
    styles: Mapping[str, str],
) -> None:
    """Print `rows` under `names`. `right`: right-aligned columns; `shortened`: the column to shorten on a narrow terminal;
    `styles`: cell text -> style."""
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        # rich narrows only columns whose text may wrap.
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != shortened)
    for row in texts:
        table.add_row(*(Text(cell, styles.get(cell, ""), no_wrap=True, overflow="ellipsis") for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)
