"""Following a run: the live view on a terminal, or its events as plain lines. rich is imported where it is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fsbarrier.errors import EXIT_INTERNAL
from fsbarrier.rundir.journal import Event
from fsbarrier.view.event_wording import event_line, event_text
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus, status_of, status_reader

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: Seconds between two looks at the run.
FRAME_S = 0.25
#: In seconds. When the view begins, it shows no event that is older than this. If the same event comes again within this time, another
#: node has reported it, and it is not shown twice.
RECENT_S = 10.0
ENDED = frozenset({"finished", "stopped", "broken"})
#: The view ends when the run has looked ended for so many seconds. At the start of a new session the run still looks ended for a moment.
LASTING_S = 1.0

#: Shows the run as it is now, and the events that are new.
Show = Callable[[RunStatus, Sequence[Event]], None]


class Process(Protocol):
    """A daemon that was started here."""

    def poll(self) -> int | None: ...


def follow(
    log_path: Path,
    processes: Mapping[int, Process] | Sequence[Process] | None = None,
    *,
    failed: Callable[[], bool] = lambda: False,
    stop: threading.Event | None = None,
    output: Console | None = None,
) -> int | None:
    """Show the run until it has ended: live on a terminal, else its events line by line.

    Ends when all of `processes` (node rank -> process) have ended, or `failed` says that they will not begin; without them, when the
    run has ended; and when `stop` is set. Gives the exit code of the run (of the processes, where there are some: the first
    that is not 0), None where it ended for another reason or the user left with Ctrl-C. The terminal is as before in any case; a
    signal handler's exception passes through. Raises UsageError where there is no run.
    """
    from rich.console import Console

    console = output or Console(highlight=False)
    reader = status_reader(log_path)
    watched = list(processes.values() if isinstance(processes, Mapping) else processes or ())
    # Of a run that was started here, show events from now on; of another run, also those of the last seconds.
    since = time.time() - (RECENT_S if processes is None else 0.0)
    view = _live(console, reader) if console.is_terminal else _plain(console, since)
    try:
        with view as show:
            return _follow(show, reader, watched, failed, stop or threading.Event())
    except KeyboardInterrupt:
        if processes is not None:
            raise
        return None


def _follow(
    show: Show,
    reader: RunReader,
    watched: Sequence[Process],
    failed: Callable[[], bool],
    stop: threading.Event,
) -> int | None:
    ended_since: float | None = None
    while True:
        now = time.monotonic()
        codes = [process.poll() for process in watched]
        fresh = reader.poll(now)
        status = status_of(reader, now)
        show(status, fresh)
        if watched:
            if all(code is not None for code in codes):
                return next((code for code in codes if code), 0)
            if failed():
                return None
        elif status.state in ENDED:
            ended_since = now if ended_since is None else ended_since
            if now - ended_since >= LASTING_S:
                return status.exit_code if status.exit_code is not None else EXIT_INTERNAL
        else:
            ended_since = None
        if stop.wait(FRAME_S):
            return None


@contextmanager
def _live(console: Console, reader: RunReader) -> Iterator[Show]:
    """The live view, on the terminal's other screen."""
    from rich.live import Live

    def show(status: RunStatus, fresh: Sequence[Event]) -> None:
        live.update(frame(status, reader, console.size.width, console.size.height), refresh=True)

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield show


@contextmanager
def _plain(console: Console, since: float) -> Iterator[Show]:
    """One line an event, printed once however many nodes report it."""
    printed: dict[tuple[int, str], float] = {}

    def show(status: RunStatus, fresh: Sequence[Event]) -> None:
        for event in fresh:
            text, line = event_text(event), event_line(event)
            # Every node reports every phase. The leader's reports are enough.
            of_another = event.name.startswith(("phase_", "iteration_")) and event.node_rank != status.leader
            if text is None or line is None or event.at < since or of_another:
                continue
            # Two nodes that report the same silent node have seen it silent for different times, so their texts differ.
            key = (event.generation, event.name if event.name == "node_suspected" else text)
            before = printed.get(key)
            printed[key] = event.at
            if before is None or event.at - before > RECENT_S:
                console.out(line, highlight=False)

    yield show


def frame(status: RunStatus, reader: RunReader, width: int, height: int) -> RenderableType:
    """One picture of the live view, of at most `height` lines."""
    from rich.console import Group
    from rich.text import Text

    from fsbarrier.view import terminal_lines as lines
    from fsbarrier.view.node_table import nodes_table

    rule = Text("─" * width, style="dim", no_wrap=True)
    top = [*lines.header(status, width, _elapsed_s(reader)), rule]
    troubles = [*lines.waiting_line(status), *lines.problem_lines(status, width, 5)]
    rewards = lines.reward_lines(status.rewards, width, lines.reward_so_far(status))
    results = [*rewards, *lines.time_line(status.times, width)]
    # Everything else has its lines first, then the table of nodes, and the events get what is left. The 3 lines: the table's head and two
    # rules.
    fixed = len(top) + len(troubles) + len(results) + 3
    table_rows = max(2, min(len(status.nodes), height - fixed - 4))
    most = table_rows if table_rows < len(status.nodes) else None
    events = lines.event_lines(reader.history.newest_events(200), min(12, height - fixed - table_rows - 1))
    parts: list[RenderableType] = [*top, nodes_table(status, width, most), *troubles]
    for section in (results, events):
        parts += [rule, *section] if section else []
    return Group(*parts)


def _elapsed_s(reader: RunReader) -> float | None:
    """Seconds since this session of the run began, by wall clocks: for display."""
    starts = [
        event.at
        for event in reader.history.events
        if event.name == "generation_started" and event.text("reason").startswith("start")
    ]
    if not starts:
        return None
    begin, ends = max(starts), [ending.at for ending in reader.history.endings.values()]
    over = reader.newest is not None and len(ends) >= len(reader.newest.ranks) and min(ends) >= begin
    return max(0.0, (max(ends) if over else time.time()) - begin)
