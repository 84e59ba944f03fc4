"""Writes a daemon's events to its journal and, as text, to its log file and the console."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from fsbarrier.coordination.loop import place
from fsbarrier.processes.signals import register_daemon
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node, Rules
from fsbarrier.run.notifier import Notifier
from fsbarrier.run.tracking import TrackerProgram
from fsbarrier.rundir.journal import Journal
from fsbarrier.rundir.logs import last_lines_of_node
from fsbarrier.rundir.phase_time import DIGITS, PhaseTime
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.store import files
from fsbarrier.view.event_wording import log_lines
from fsbarrier.view.timings import NEWEST_ITERATIONS


class EventLog:
    """Records the events of one daemon. The journal is opened at the first event, since its name contains the incarnation."""

    def __init__(self, record: RunRecord, rules: Rules, log_file: Path, work_dir: Path) -> None:
        """`log_file` may exist from an earlier start. Raises OSError if it cannot be opened."""
        self._record, self._rules = record, rules
        self._log = files.open_append(log_file)
        self._journal: Journal | None = None
        self._row_entered = time.monotonic()
        # When the work in this row was done, and how long its parts took; None: it is not done, or the row has no work.
        self._worked: tuple[float, PhaseTime] | None = None
        self._last_node: Node | None = None
        self._iteration_began = time.monotonic()
        self._iterations_s: deque[float] = deque(maxlen=NEWEST_ITERATIONS)
        self.console = Console()
        command = record.settings.notify.command
        self._tracking = TrackerProgram(record, work_dir, log_file.with_name("trackers.log"))
        about = {"run_id": record.run_id, "log_path": str(record.log_path)}
        self._notifier = Notifier(command, log_file.with_name("notify.log"), about) if command else None

    def write_stacks_on_signal(self) -> None:
        """Make the signal of `fsbarrier debug` write the stacks of all threads of this process to the log file."""
        register_daemon(self._log)

    def note_work(self, work: PhaseTime) -> None:
        """Remember that the node's work in its row is done now, for the event at the row's end."""
        self._worked = time.monotonic(), work

    def write(self, event: str, node: Node, fields: Payload) -> None:
        """Record an event of `node`. Raises OSError if the journal cannot be written."""
        now = time.monotonic()
        where = {"incarnation": node.incarnation, **place(node, node.position, self._rules)}
        if self._journal is None:
            path = self._record.paths.journal(node.rank, node.incarnation)
            self._journal = Journal(
                path, run_id=self._record.run_id, node_rank=node.rank, incarnation=node.incarnation
            )
        own = self._own_fields(event, node, fields, now)
        written = self._journal.write(event, now, where, {**fields, **own})
        if self._notifier is not None:
            self._notifier.tell(event, node, {**where, **fields})
        self._tracking.tell(event, node, fields)
        text = "".join(f"{line}\n" for line in log_lines(written))
        if text:
            # A full disk must not end the node because of its log file. The journal has the event.
            with contextlib.suppress(OSError):
                os.write(self._log, text.encode(errors="surrogateescape"))
            self.console.say(text)
        self._last_node = node
        if event != "tracker_failed":
            self._write_troubles(node)

    def _write_troubles(self, node: Node) -> None:
        for trouble in self._tracking.troubles():
            self.write("tracker_failed", node, trouble)

    def _own_fields(self, event: str, node: Node, fields: Payload, now: float) -> Payload:
        """The fields that only the daemon can add: the duration of a row, and the last log lines of a lost node."""
        if event == "phase_started":
            self._row_entered, self._worked = now, None
        elif event == "phase_finished":
            return self._row_time(node, now)
        elif event == "work_finished" and self._worked is not None:
            return {"waited_s": round(now - self._worked[0], DIGITS)}
        elif event == "iteration_finished":
            return self._time_left(node, now)
        elif event == "node_lost":
            paths = self._record.paths
            logs = [
                last_lines_of_node(paths, lost["node_rank"], lost["incarnation"]) for lost in fields["lost"]
            ]
            return {"lost": [{**lost, "log": log} for lost, log in zip(fields["lost"], logs, strict=True)]}
        return {}

    def _time_left(self, node: Node, now: float) -> Payload:
        """An estimate of the time until the last iteration ends, from the newest ones that this daemon saw; {} if there is no last one."""
        seconds, self._iteration_began = now - self._iteration_began, now
        self._iterations_s.append(seconds)
        until = node.generation.until if node.generation is not None else None
        left = until - node.position.iteration if until is not None and node.position is not None else 0
        mean_s = sum(self._iterations_s) / len(self._iterations_s)
        return {"left_s": round(left * mean_s, 1)} if left > 0 else {}

    def _row_time(self, node: Node, now: float) -> Payload:
        """The duration of the row; with work, also of its parts."""
        seconds = now - self._row_entered
        row_fields: dict[str, object] = {"seconds": round(seconds, DIGITS)}
        if self._worked is None or node.position is None or node.generation is None:
            return row_fields
        done_at, work = self._worked
        after_s, row = now - done_at, self._rules.row(node.position, node.generation)
        if row.each is not None and row.leader is not None and node.generation.leader == node.rank:
            # The leader works twice in a row, and waits for all other nodes in between.
            return {**row_fields, **work.within(seconds).fields(), "waited_s": round(after_s, DIGITS)}
        daemon_s = max(0.0, seconds - work.seconds - after_s)
        work = replace(work, work_s=work.work_s + daemon_s)
        return {**row_fields, **work.within(seconds).fields()}

    def close(self) -> None:
        """Wait a while for notifications and trackers, and close the files. Raises OSError."""
        if self._notifier is not None:
            self._notifier.close()
        self._tracking.close()
        if self._last_node is not None:
            # The run is over, so an unwritable journal does not matter.
            with contextlib.suppress(OSError):
                self._write_troubles(self._last_node)
        os.close(self._log)
        if self._journal is not None:
            self._journal.close()


class Console:
    """Prints in its own thread, so that a stopped terminal, or a full disk behind a redirect, does not block the node."""

    def __init__(self) -> None:
        #: when something was printed last, by the monotonic clock
        self.said_at = time.monotonic()
        self._waiting: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="console", daemon=True)
        self._thread.start()

    def say(self, text: str, *, to: int = 1) -> None:
        """Print to standard output (1) or standard error (2), soon."""
        self.said_at = time.monotonic()
        self._waiting.put((to, text))

    def close(self, timeout_s: float) -> None:
        """Wait until everything is printed, for at most `timeout_s`."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _print(self) -> None:
        sys.stdout.flush()
        while (item := self._waiting.get()) is not None:
            fd, text = item
            # The terminal may be gone. The journal has every event.
            with contextlib.suppress(OSError):
                os.write(fd, text.encode(errors="surrogateescape"))
