"""The summary at a run's end: where it ended and why, rewards, time per phase, notable events, file locations."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fsbarrier.view.amounts import amount, clock_time, duration
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus, elapsed_s, look_once
from fsbarrier.view.terminal_lines import (
    EVENT_STYLE,
    TEST,
    TRAIN,
    bar,
    file_line,
    file_lines,
    header,
    line,
    problem_lines,
    time_line,
    wrapped,
)
from fsbarrier.view.timings import IterationTime

#: number of recent iterations and events to list
NEWEST = 12
NOTABLE = frozenset({"node_lost", "node_recovered", "work_failed", "left_generation", "generation_started"})


def print_summary(log_path: Path, output: Console | None = None) -> None:
    """The summary of a run. Raises UsageError if there is no run."""
    console = output or Console(highlight=False)
    reader, status = look_once(log_path)
    print_parts(_sections(status, reader, min(console.width, 100)), console)


def print_parts(parts: Iterator[RenderableType], console: Console) -> None:
    """Print the parts. Long lines, such as paths, are not wrapped, so that they can be copied."""
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table))


def _sections(status: RunStatus, reader: RunReader, width: int) -> Iterator[RenderableType]:
    finished = status.finished_times
    yield ""
    yield from header(status, width, elapsed_s(reader))
    yield from problem_lines(status, width, 24)
    if status.rewards:
        yield ""
        yield line(("mean reward", "bold"))
        yield _rewards(status, finished)
    if finished:
        yield ""
        yield line(("time per iteration", "bold"))
        yield from time_line(finished, width)
    happened = _happened(reader, width)
    if happened:
        yield ""
        yield line(("what happened", "bold"))
        yield from happened
    yield ""
    yield line(("files", "bold"))
    yield from file_lines(status)
    yield file_line("report", f"fsbarrier report --log-path {shlex.quote(status.log_path)}")


def _rewards(status: RunStatus, finished: Sequence[IterationTime]) -> Table:
    """A row per iteration; the bar shows the held-out reward if there is one."""
    seconds = {one.iteration: duration(one.seconds) for one in finished}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("iteration", justify="right")
    table.add_column("policy", justify="right", style="dim")
    table.add_column("train", justify="right", style=TRAIN)
    table.add_column("held-out", justify="right", style=TEST)
    table.add_column("")
    table.add_column("took", justify="right", style="dim")
    known = [value for one in status.rewards for value in (one.train, one.test) if value is not None]
    low, high = min(0.0, *known), max(1.0, *known)
    for one in status.rewards[-NEWEST:]:
        value, style = (one.test, TEST) if one.test is not None else (one.train or 0.0, TRAIN)
        table.add_row(
            str(one.iteration),
            "–" if one.policy_version is None else str(one.policy_version),
            amount(one.train),
            amount(one.test),
            bar((value - low) / (high - low), 20, style),
            seconds.get(one.iteration, ""),
        )
    return table


def _happened(reader: RunReader, width: int) -> list[Text]:
    """Notable events: lost and returned nodes, failed programs, trajectories without a reward."""
    events = []
    for event in reader.history.newest_events():
        usual = event.name == "generation_started" and event.text("reason") == "start"
        text = event_text(event)
        if (event.name in NOTABLE or event.integer("unjudged")) and text and not usual:
            events.append((event, text))
    hidden = len(events) - NEWEST
    found = [line((f"… {hidden} earlier", "dim"))] if hidden > 0 else []
    for event, text in events[-NEWEST:]:
        style = "red" if EVENT_STYLE.get(event.name) == "red" else ""
        found += wrapped((f"{clock_time(event.at)}  ", "dim"), text, style, width, most=3)
    return found
