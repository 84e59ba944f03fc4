"""Follows a run: a live view on a terminal, otherwise its events as plain lines. Imports rich only where needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fsbarrier.errors import EXIT_INTERNAL
from fsbarrier.rundir.journal import Event
from fsbarrier.view.event_wording import event_line
from fsbarrier.view.quiet import Silence, progress_text
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus, elapsed_s, status_of, status_reader
from fsbarrier.wording import clock_time, one_line, ranks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: polling interval in seconds
FRAME_S = 0.25
#: The view starts with events no older than this, in seconds.
RECENT_S = 10.0
#: nodes whose work in progress a plain line names
MOST_NODES = 3
ENDED = frozenset({"finished", "stopped", "broken"})
#: The view ends when the run has been over for this many seconds, because a run still looks ended when a new session starts.
LASTING_S = 1.0

#: shows the current status and the new events
Show = Callable[[RunStatus, Sequence[Event]], None]


class StartedDaemon(Protocol):
    """A daemon that was started here."""

    def poll(self) -> int | None: ...


def follow(
    log_path: Path,
    processes: Mapping[int, StartedDaemon] | None = None,
    *,
    failed: Callable[[], bool] = lambda: False,
    stop: threading.Event | None = None,
    output: Console | None = None,
) -> int | None:
    """Show the run until it ends: live on a terminal, otherwise its events line by line.

    With `processes` (node rank -> process), ends when all have ended or `failed` returns true; otherwise ends when the run has ended. Also
    ends when `stop` is set. Returns the exit code of the run, or with `processes` the first one that is not 0; None if the view ended for
    another reason, such as Ctrl-C. Always restores the terminal. Exceptions from signal handlers propagate. Raises UsageError if there is
    no run.
    """
    from rich.console import Console

    console = output or Console(highlight=False)
    reader = status_reader(log_path)
    watched = list((processes or {}).values())
    # For a run that was started here, show events from now on; otherwise also those of the last seconds.
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
    watched: Sequence[StartedDaemon],
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
    """The live view, on the terminal's alternate screen."""
    from rich.live import Live

    def show(status: RunStatus, fresh: Sequence[Event]) -> None:
        live.update(frame(status, reader, console.size.width, console.size.height), refresh=True)

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield show


@contextmanager
def _plain(console: Console, since: float) -> Iterator[Show]:
    """Prints one line per event."""

    silence = Silence(time.monotonic())

    def show(status: RunStatus, fresh: Sequence[Event]) -> None:
        now = time.monotonic()
        if silence.due(now) and (doing := working_line(status)):
            console.out(doing, highlight=False)
        for event in fresh:
            line = event_line(event)
            # Every node reports every phase; show only the leader's reports.
            of_another = event.name.startswith(("phase_", "iteration_")) and event.node_rank != status.leader
            if line is not None and event.at >= since and not of_another:
                console.out(line, highlight=False)
                silence.broken(now)

    yield show


def working_line(status: RunStatus) -> str:
    """What the nodes are doing, in one line; "" if they say nothing."""
    if status.phase is None:
        waited = status.waiting_for.node_ranks if status.waiting_for is not None else ()
        return f"{clock_time(time.time())}  waiting for node {ranks(waited)} to join" if waited else ""
    working = [
        f"node {node.node_rank}: {text}"
        for node in status.nodes
        if node.progress and (text := progress_text(node.progress))
    ]
    more = f"; and {len(working) - MOST_NODES} more nodes" if len(working) > MOST_NODES else ""
    where = f"iteration {status.iteration}, phase {status.phase.index} {one_line(status.phase.name)}"
    return f"{clock_time(time.time())}  {where}: {'; '.join(working[:MOST_NODES])}{more}" if working else ""


def frame(status: RunStatus, reader: RunReader, width: int, height: int) -> RenderableType:
    """One frame of the live view, of at most `height` lines."""
    from rich.console import Group
    from rich.text import Text

    from fsbarrier.view import terminal_lines as lines
    from fsbarrier.view.node_table import nodes_table
    from fsbarrier.view.summary import result_lines

    rule = Text("─" * width, style="dim", no_wrap=True)
    top = [*lines.header(status, width, elapsed_s(reader)), rule]
    troubles = [*lines.waiting_line(status), *lines.problem_lines(status, width, 5)]
    results = [*result_lines(status, status.finished_times[-1:], width)]
    # The node table gets the space that the other parts leave, and the events the rest. The 3 lines are the table's header and two rules.
    fixed = len(top) + len(troubles) + len(results) + 3
    table_rows = max(2, min(len(status.nodes), height - fixed - 4))
    most = table_rows if table_rows < len(status.nodes) else None
    events = lines.event_lines(reader.history.newest_events(200), min(12, height - fixed - table_rows - 1))
    parts: list[RenderableType] = [*top, nodes_table(status, width, most), *troubles]
    for section in (results, events):
        parts += [rule, *section] if section else []
    return Group(*parts)
