"""The summary at a run's end: rewards, time per phase, coordination overhead, notable events, file locations."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fsbarrier.protocol.wording import counted
from fsbarrier.view.amounts import amount, clock_time, duration, one_line
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus, look_once
from fsbarrier.view.terminal_lines import (
    EVENT_STYLE,
    STATE_STYLE,
    TEST,
    TRAIN,
    bar,
    line,
    mean_time_lines,
    problem_lines,
    wrapped,
)
from fsbarrier.view.timings import IterationTime, together

#: number of recent iterations and events to list
NEWEST = 12
NOTABLE = frozenset({"node_lost", "node_recovered", "work_failed", "left_generation", "generation_started"})
FILES = {
    "run": "run directory",
    "model": "served weights",
    "train_trajectories": "trajectories",
    "test_trajectories": "held-out",
    "logs": "logs",
    "events": "journal",
}


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
    yield _headline(status, finished)
    yield from problem_lines(status, width, 24)
    if status.rewards:
        yield ""
        yield line(("mean reward", "bold"))
        yield _rewards(status, finished)
        yield from _unjudged(reader, width)
    if finished:
        yield ""
        yield line(("time per iteration", "bold"))
        yield from mean_time_lines(finished, width)
    happened = _happened(reader, width)
    if happened:
        yield ""
        yield line(("what happened", "bold"))
        yield from happened
    yield ""
    yield line(("files", "bold"))
    yield from _files(status)


def _headline(status: RunStatus, finished: Sequence[IterationTime]) -> Text:
    # Only the newest part of a long run's journals was read; say so in the headline.
    newest = "the newest " if finished and finished[0].iteration > 1 else ""
    took = f" in {duration(together(finished).seconds)}" if finished else ""
    nodes = counted(status.num_nodes, "node")
    code = f"  exit code {status.exit_code}" if status.exit_code else ""
    return line(
        (f"■ {status.state}", STATE_STYLE.get(status.state, "")),
        f"  {newest}{counted(len(finished), 'iteration')}{took}, {nodes}",
        (f"{code}  {status.run_id}", "dim"),
    )


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


def _unjudged(reader: RunReader, width: int) -> list[Text]:
    """The number of trajectories without a reward, because the reward function or the agent failed. The means do not include them."""
    history = reader.history
    events = [*history.reports("rolled_out").values(), *history.reports("evaluated").values()]
    counts = {
        name: sum(event.integer(f"{name}_errors") or 0 for event in events) for name in ("reward", "agent")
    }
    failures = ", ".join(
        f"the {name} failed for {count} trajectories" for name, count in counts.items() if count
    )
    return wrapped(("not judged ", ""), failures, "red", width, most=2) if failures else []


def _happened(reader: RunReader, width: int) -> list[Text]:
    """Notable events: lost and returned nodes, failed programs."""
    events = []
    for event in reader.history.newest_events():
        usual = event.name == "generation_started" and event.text("reason") == "start"
        text = event_text(event)
        if event.name in NOTABLE and text and not usual:
            events.append((event, text))
    hidden = len(events) - NEWEST
    found = [line((f"… {hidden} earlier", "dim"))] if hidden > 0 else []
    for event, text in events[-NEWEST:]:
        style = "red" if EVENT_STYLE.get(event.name) == "red" else ""
        found += wrapped((f"{clock_time(event.at)}  ", "dim"), text, style, width, most=3)
    return found


def _files(status: RunStatus) -> Iterator[Text]:
    for name, path in status.files.items():
        yield line((f"{FILES.get(name, name.replace('_', ' ')):<16}", "dim"), one_line(_typed(path)))
    yield line(
        (f"{'report':<16}", "dim"),
        f"fsbarrier report --log-path {one_line(shlex.quote(_typed(status.log_path)))}",
    )


def _typed(path: str) -> str:
    """The path as a user would type it: relative if that is shorter and does not contain `..`."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if relative.startswith("..") else relative
