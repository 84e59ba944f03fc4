"""Prints the output of `fsbarrier status`, and of a run's end: position or ending and its reason, rewards, times, file locations."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fsbarrier.view import terminal_lines as lines
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.node_table import nodes_table
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus, elapsed_s, look_once
from fsbarrier.view.timings import IterationTime
from fsbarrier.wording import clock_time

#: number of events to list
NEWEST = 12
NOTABLE = frozenset({"node_lost", "node_recovered", "work_failed", "left_generation", "generation_started"})


def print_status(status: RunStatus) -> None:
    """Print the status of a run that may be in progress."""
    console = Console(highlight=False)
    width = min(console.width, 120)
    nodes = [nodes_table(status, width), *lines.waiting_line(status), *lines.problem_lines(status, width, 20)]
    results = result_lines(status, status.finished_times[-1:], width)
    _print(console, [*lines.header(status, width), "", *nodes, "", *results, *lines.file_lines(status)])


def print_summary(log_path: Path, output: Console | None = None) -> None:
    """Print the summary of a run that has ended, with its notable events. Raises UsageError if there is no run."""
    console = output or Console(highlight=False)
    reader, status = look_once(log_path)
    width = min(console.width, 100)
    top = [*lines.header(status, width, elapsed_s(reader)), *lines.problem_lines(status, width, 24)]
    results = [*result_lines(status, status.finished_times, width)]
    if happened := [*_happened(reader, width)]:
        results += [Text(), *happened]
    report = lines.file_line("report", f"fsbarrier report --log-path {shlex.quote(status.log_path)}")
    _print(console, ["", *top, "", *results, "", *lines.file_lines(status), report])


def _print(console: Console, parts: Sequence[RenderableType]) -> None:
    """Print the parts. Long lines, such as paths, are not wrapped, so that they can be copied."""
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table))


def result_lines(status: RunStatus, times: Sequence[IterationTime], width: int) -> Iterator[Text]:
    """Rewards, times and figures of the training."""
    yield from lines.reward_lines(status.rewards, width)
    yield from lines.time_line(times, width)
    yield from lines.figures_line(status.figures, width)
    if status.draws is not None:
        style = "yellow" if status.draws.never else "dim"
        yield from lines.wrapped(("tasks: ", "dim"), lines.draws_text(status.draws), style, width, most=3)


def _happened(reader: RunReader, width: int) -> Iterator[Text]:
    """Notable events: lost and returned nodes, failed programs, trajectories without a reward."""
    events = []
    for event in reader.history.newest_events():
        usual = event.name == "generation_started" and event.text("reason") == "start"
        text = event_text(event)
        if (event.name in NOTABLE or event.integer("unjudged")) and text and not usual:
            events.append((event, text))
    if hidden := events[:-NEWEST]:
        yield lines.line((f"… {len(hidden)} earlier", "dim"))
    for event, text in events[-NEWEST:]:
        style = "red" if lines.EVENT_STYLE.get(event.name) == "red" else ""
        yield from lines.wrapped((f"{clock_time(event.at)}  ", "dim"), text, style, width, most=3)
