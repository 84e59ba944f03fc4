"""The terminal: a live view of a run, its events as plain lines, a summary at the end. rich is imported where it is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsbarrier.errors import EXIT_INTERNAL, UsageError
from fsbarrier.view.event_text import event_line, event_text, one_line
from fsbarrier.view.lines import Line
from fsbarrier.view.status import RunStatus, judge
from fsbarrier.view.watching import RunReader

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["event_line", "follow", "frame", "print_summary"]

FRAME_S = 0.25
KEPT_ITERATIONS = 20
RECENT_S = 10.0  # events older than this, when the following of a run begins, are not told as lines
ENDED = frozenset({"finished", "stopped", "broken"})
#: An end counts once it was seen for this long: a start right after one looks like it for a moment.
LASTING_S = 1.0


class Process(Protocol):
    """A daemon that was started here."""

    def poll(self) -> int | None: ...


Processes = Mapping[int, Process] | Sequence[Process]


def follow(
    log_path: Path,
    processes: Processes | None = None,
    *,
    stop: threading.Event | None = None,
    output: Console | None = None,
) -> int | None:
    """Show the run until it has ended: live on a terminal, else its events line by line.

    Ends when all of `processes` (node rank -> process) have ended, or one was refused (exit code 2); without them, when the
    run has ended; and when `stop` is set. Gives the exit code of the run (of the processes, where there are some: the first
    that is not 0), None where it ended for another reason or the user left with Ctrl-C. The terminal is as before in any case; a
    signal handler's exception passes through. Raises UsageError where there is no run.
    """
    from rich.console import Console

    console = output or Console(highlight=False)
    reader = RunReader(log_path, keep=KEPT_ITERATIONS)
    watched = list(processes.values() if isinstance(processes, Mapping) else processes or ())
    began = time.time() - (
        RECENT_S if processes is None else 0.0
    )  # what was started here tells nothing of before
    view = _Live(console, reader) if console.is_terminal else _Plain(console, reader, began)
    stop = stop or threading.Event()
    try:
        with view:
            return _follow(view, reader, watched, stop)
    except KeyboardInterrupt:
        if processes is not None:
            raise
        return None


def _follow(view: _View, reader: RunReader, watched: Sequence[Process], stop: threading.Event) -> int | None:
    ended_since: float | None = None
    while True:
        now = time.monotonic()
        codes = [process.poll() for process in watched]
        fresh = reader.poll(now)
        status = judge(reader, now)
        view.show(status, fresh)
        if watched:
            if all(code is not None for code in codes):
                return next((code for code in codes if code), 0)
            if any(code == UsageError.exit_code for code in codes):
                return None
        elif status.state in ENDED:
            ended_since = now if ended_since is None else ended_since
            if now - ended_since >= LASTING_S:
                return status.exit_code if status.exit_code is not None else EXIT_INTERNAL
        else:
            ended_since = None
        if stop.wait(FRAME_S):
            return None


class _View(Protocol):
    def __enter__(self) -> _View: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, status: RunStatus, fresh: Sequence[Line]) -> None: ...


class _Live:
    """The live view, on the terminal's other screen."""

    def __init__(self, console: Console, reader: RunReader) -> None:
        from rich.live import Live

        self._console, self._reader, self._began = console, reader, time.monotonic()
        self._live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> _Live:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, status: RunStatus, fresh: Sequence[Line]) -> None:
        size = self._console.size
        self._live.update(frame(status, self._reader, size.width, size.height), refresh=True)


class _Plain:
    """One line an event, told once however many nodes report it."""

    def __init__(self, console: Console, reader: RunReader, since: float) -> None:
        self._console, self._reader, self._since = console, reader, since
        self._told: dict[tuple[int, str], float] = {}

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, status: RunStatus, fresh: Sequence[Line]) -> None:
        for line in fresh:
            words = event_text(line)
            frequent = line.event.startswith(("phase_", "iteration_"))
            if words is None or line.at < self._since or (frequent and line.node_rank != status.leader):
                continue
            key = (line.generation, line.event if line.event.startswith("node_sus") else words)
            told = self._told.get(key)
            self._told[key] = line.at
            if told is None or line.at - told > RECENT_S:
                self._console.out(event_line(line.fields) or "", highlight=False)


# --- what is shown --------------------------------------------------------------------------------------------------------


def frame(status: RunStatus, reader: RunReader, width: int, height: int) -> RenderableType:
    """One picture of the live view, of at most `height` lines."""
    from rich.console import Group
    from rich.text import Text

    from fsbarrier.view import screen

    rule = Text("─" * width, style="dim", no_wrap=True)
    top = [*screen.header(status, width, elapsed_s(reader)), rule]
    rewards = screen.reward_lines(status.rewards, width, screen.so_far(status))
    times = screen.time_line(status.times, width)
    waiting = screen.waiting_line(status)
    problems = screen.problem_lines(status, width, 5)
    middle = [*([waiting] if waiting else []), *problems]
    below = [*rewards, *([times] if times else [])]
    fixed = len(top) + 1 + len(middle) + len(below) + 2
    table_rows = max(2, min(len(status.nodes), height - fixed - 4))
    most = table_rows if table_rows < len(status.nodes) else None
    room = height - fixed - table_rows - 1
    events = screen.event_lines(reader.history.happenings(200), max(0, min(12, room)))
    parts: list[RenderableType] = [*top, screen.nodes_table(status, width, most), *middle]
    if below:
        parts += [rule, *below]
    if events:
        parts += [rule, *events]
    return Group(*parts)


def elapsed_s(reader: RunReader) -> float | None:
    """Seconds since this session of the run began, by wall clocks: for display."""
    starts = [
        line.at
        for line in reader.history.events
        if line.event == "generation_started" and str(line.fields.get("reason", "")).startswith("start")
    ]
    ends = [ending.at for ending in reader.history.endings.values()]
    if not starts:
        return None
    begin = max(starts)
    over = reader.newest is not None and len(ends) >= len(reader.newest.ranks) and min(ends) >= begin
    return max(0.0, (max(ends) if over else time.time()) - begin)


def print_summary(log_path: Path, output: Console | None = None) -> None:
    """What came of a run: rewards, times, what happened, where the files are. Raises UsageError where there is no run."""
    from rich.console import Console

    from fsbarrier.view import summary

    console = output or Console(highlight=False)
    reader = RunReader(log_path)
    reader.poll(time.monotonic())
    status = judge(reader, time.monotonic(), once=True)
    print_parts(summary.parts(status, reader, min(console.width, 100)), console)


def print_parts(parts: Iterable[RenderableType], console: Console) -> None:
    """Print one after the other; a line that is too long (a path) stays one line, so that it can be copied."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str) or not hasattr(part, "columns"))


def status_parts(status: RunStatus, width: int) -> list[Any]:
    """What `fsbarrier status` shows of one look."""
    from fsbarrier.view import screen

    waiting = screen.waiting_line(status)
    times = screen.time_line(status.times, width)
    files = [
        screen.line((f"{name.replace('_', ' '):<19}", "dim"), one_line(path))
        for name, path in status.files.items()
    ]
    return [
        *screen.header(status, width),
        "",
        screen.nodes_table(status, width),
        *([waiting] if waiting else []),
        *screen.problem_lines(status, width, 20),
        "",
        *screen.reward_lines(status.rewards, width),
        *([times] if times else []),
        *files,
    ]
