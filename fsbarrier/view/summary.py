"""What a run's end is told with: reward per iteration, time per phase, coordination's share, what happened, where the files are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsbarrier.view import screen
from fsbarrier.view.event_text import amount, clock_time, duration, event_text, one_line, percent
from fsbarrier.view.screen import TEST, TRAIN, line
from fsbarrier.view.status import RunStatus
from fsbarrier.view.timings import IterationTime
from fsbarrier.view.watching import RunReader

SHOWN = 12
NOTABLE = frozenset({"node_lost", "node_recovered", "work_failed", "left_generation", "generation_started"})
EXPLAINED = {
    "run": "run directory",
    "model": "served weights",
    "train_trajectories": "trajectories",
    "test_trajectories": "held-out",
    "logs": "logs",
    "events": "journal",
}


def parts(status: RunStatus, reader: RunReader, width: int) -> Iterator[RenderableType]:
    """The summary, piece by piece."""
    finished = [one for one in status.times if one.complete]
    yield ""
    yield _headline(status, finished)
    yield from screen.problem_lines(status, width, 24)
    if status.rewards:
        yield ""
        yield line(("mean reward", "bold"))
        yield _rewards(status, finished, width)
    table = screen.phase_table(finished, width)
    if table is not None:
        yield ""
        yield line(("time per phase", "bold"), (f"  mean of {_iterations(len(finished))}", "dim"))
        yield table
        yield from _coordination(finished, width)
    happened = _happened(reader, width)
    if happened:
        yield ""
        yield line(("what happened", "bold"))
        yield from happened
    yield ""
    yield line(("files", "bold"))
    yield from _files(status)


def _iterations(number: int) -> str:
    return f"{number} iteration{'s' if number != 1 else ''}"


def _headline(status: RunStatus, finished: list[IterationTime]) -> Text:
    done = _iterations(len(finished))
    seconds = sum(one.seconds for one in finished)
    style = screen.STATE_STYLE.get(status.state, "")
    code = f"  exit code {status.exit_code}" if status.exit_code else ""
    took = f" in {duration(seconds)}" if finished else ""
    nodes = f"{status.num_nodes} node{'s' if status.num_nodes > 1 else ''}"
    return line((f"■ {status.state}", style), f"  {done}{took}, {nodes}", (f"{code}  {status.run_id}", "dim"))


def _rewards(status: RunStatus, finished: list[IterationTime], width: int) -> RenderableType:
    seconds = {one.iteration: one.seconds for one in finished}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("iteration", justify="right")
    table.add_column("policy", justify="right", style="dim")
    table.add_column("train", justify="right", style=TRAIN)
    table.add_column("held-out", justify="right", style=TEST)
    table.add_column("")
    table.add_column("took", justify="right", style="dim")
    rewards = status.rewards
    known = [value for r in rewards for value in (r.train, r.test) if value is not None]
    low, high = min(0.0, *known), max(1.0, *known)
    for one in rewards[-SHOWN:]:
        value = one.test if one.test is not None else one.train
        share = ((value or 0.0) - low) / (high - low)
        full = round(20 * share)
        style = TEST if one.test is not None else TRAIN
        table.add_row(
            str(one.iteration),
            "–" if one.policy_version is None else str(one.policy_version),
            amount(one.train),
            amount(one.test),
            line(("━" * full, style), ("─" * (20 - full), "dim")),
            duration(seconds[one.iteration]) if one.iteration in seconds else "",
        )
    return table


def _coordination(finished: list[IterationTime], width: int) -> list[Text]:
    seconds, whole = sum(one.coordination_s for one in finished), sum(one.seconds for one in finished)
    cut = sum(one.cut_short_s for one in finished)
    about = "" if all(one.exact for one in finished) else " (by the hosts' wall clocks)"
    lost = f"; {duration(cut)} in phases that were cut short" if cut else ""
    share = percent(seconds / whole if whole else 0.0)
    words = f"{share} of the time: {duration(seconds / max(1, len(finished)))} an iteration{about}{lost}"
    return screen.wrapped(("coordination ", ""), words, "bold", width, most=3)


def _happened(reader: RunReader, width: int) -> list[Text]:
    """What was out of the ordinary: nodes lost and back, programs that failed."""
    events = []
    for event in reader.history.happenings():
        usual = event.event == "generation_started" and str(event.fields.get("reason", "")) == "start"
        words = event_text(event)
        if event.event in NOTABLE and words and not usual:
            events.append((event, words))
    hidden = len(events) - SHOWN
    found = [line((f"… {hidden} earlier", "dim"))] if hidden > 0 else []
    for event, words in events[-SHOWN:]:
        style = "red" if screen.EVENT_STYLE.get(event.event) == "red" else ""
        found += screen.wrapped((f"{clock_time(event.at)}  ", "dim"), words, style, width, most=3)
    return found


def _files(status: RunStatus) -> Iterator[Text]:
    for name, path in status.files.items():
        yield line((f"{EXPLAINED.get(name, name.replace('_', ' ')):<16}", "dim"), one_line(shown(Path(path))))
    run = one_line(shown(Path(status.log_path)))
    yield line((f"{'report':<16}", "dim"), f"fsbarrier report --log-path {run}")


def shown(path: Path) -> str:
    """The path as a person here would write it: relative where that is shorter and goes nowhere up."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return str(path)
    return str(path) if relative.startswith("..") else relative
