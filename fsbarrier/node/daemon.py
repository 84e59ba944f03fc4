"""The daemon of one node: joins the run, beats, and loops (look, decide, act) until the run ends or a signal comes.

Three threads: the loop, the heartbeat (so that a slow disk or a long clean-up does not look like death), and the work.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import fsbarrier
from fsbarrier import files
from fsbarrier.errors import EXIT_INTERNAL, EXIT_SIGINT, EXIT_SIGTERM, Fenced, StoreError
from fsbarrier.loader import load_program
from fsbarrier.machine import accelerators
from fsbarrier.machine.addresses import candidate_addresses
from fsbarrier.machine.host import boot_id, host_name
from fsbarrier.node.agent import Agent, place
from fsbarrier.node.console import Console
from fsbarrier.node.context import ContextMaker
from fsbarrier.node.directory_watch import Hints
from fsbarrier.node.job import Workplace
from fsbarrier.node.jobs import Jobs
from fsbarrier.node.observer import Observer, Paces, eagerness
from fsbarrier.node.rank_lock import hold_rank
from fsbarrier.program import SLICES
from fsbarrier.protocol.facts import Join, Payload
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Exit, Node, Rules, Stage
from fsbarrier.retry import Backoff, retry
from fsbarrier.rundir.journal import Journal
from fsbarrier.rundir.log_tail import last_words
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.store import PosixStore
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.signals import ENDING, handled
from fsbarrier.view.event_wording import log_lines

POLL_MIN_S = 0.001
JOINING_BEAT_S = 0.2
DYING_S = 1.0  # what a last heartbeat may take on a filesystem that hangs


def run_node(
    record: RunRecord, settings: Settings, *, node_rank: int, until: int | None, console: bool
) -> int:
    """Be node `node_rank` of the run until it ends; the exit code of design section 2. `console`: print events as lines.

    `settings`: the record's, with what this start has chosen anew.

    Raises UsageError (the rank is taken), StoreError.
    """
    files.set_shared_group(settings.shared_group)
    with ExitStack() as stack:
        with _starting(record):
            stack.enter_context(hold_rank(record.paths, node_rank, settings.coordination.beat_s))
            prefix = f"fsbarrier-{record.run_id[-8:]}-n{node_rank}-"
            # What an earlier start left that was killed: this one holds the rank.
            for killed in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
                shutil.rmtree(killed, ignore_errors=True)
            work_dir = Path(tempfile.mkdtemp(prefix=prefix))
            stack.callback(shutil.rmtree, work_dir, ignore_errors=True)
            daemon = Daemon(record, settings, node_rank, until, console, work_dir)
        stack.callback(daemon.close)
        with daemon.signals():
            return daemon.run()


@contextmanager
def _starting(record: RunRecord) -> Iterator[None]:
    """While this lasts, a filesystem that fails ends the start, and says so. Raises StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot join the run at {record.log_path}: {error}") from None


class Daemon:
    """One incarnation of one node (it takes a new one by itself when it was fenced off and rejoins)."""

    def __init__(
        self,
        record: RunRecord,
        settings: Settings,
        rank: int,
        until: int | None,
        console: bool,
        work_dir: Path,
    ) -> None:
        self.record, self.settings = record, settings
        self.console = Console() if console else None
        self._wake = threading.Event()
        self._signal: int | None = None
        self._ticked_at = time.monotonic()
        self._journal: Journal | None = None
        self._row_entered = self._ticked_at
        self._beating = threading.Event()
        self._store = PosixStore()
        self._hints = Hints(record.log_path, self._wake.set)
        rules = make_rules(settings)
        observer = Observer(self._store, record.paths, rules.program, make_paces(settings))
        retry(observer.prepare, errnos=files.FAILING)
        attempt = 1 + (observer.joins[rank].incarnation if rank in observer.joins else 0)
        self.log_dir = record.paths.node_logs(attempt, rank)
        files.make_dirs(self.log_dir)
        self._log = files.open_append(
            self.log_dir / "daemon.log"
        )  # there, if a start before was killed early
        self.engine = make_engine(settings, self.log_dir, work_dir, rules.program.needs)
        context = ContextMaker(record, settings, observer, len(accelerators.detect()))
        self.workplace = Workplace(
            engine=self.engine,
            work_dir=work_dir,
            log_dir=self.log_dir,
            log_path=record.log_path,
            stall_timeout_s=settings.coordination.stall_timeout_s,
        )
        self.jobs = Jobs(context, self.workplace, self._wake.set)
        join = Join(
            rank=rank,
            incarnation=0,
            host=host_name(),
            pid=os.getpid(),
            boot_id=boot_id(),
            addresses=tuple(candidate_addresses()),
            until=until,
            version=fsbarrier.__version__,
            digest=record.settings_digest,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            choices=settings.choices,
        )
        self.agent = Agent(self._store, observer, rules, self.jobs, join, self._record_event)

    def run(self) -> int:
        """Join and loop to the end; gives the exit code. Raises StoreError (it cannot join)."""
        # A start counts as one of this rank's only once it is announced: it may be tried again.
        with _starting(self.record):
            retry(lambda: self.agent.start(time.monotonic()), errnos=files.FAILING)
        beats = threading.Thread(target=self._beat, name="beat", daemon=True)
        beats.start()
        try:
            self._loop()
        except (Fenced, StoreError) as error:
            self._leave(error.exit_code, str(error))
        except Exception as error:
            self._leave(EXIT_INTERNAL, f"internal error: {type(error).__name__}: {error}")
            raise
        finally:
            self._settle()
            self._beating.set()
            beats.join(DYING_S)
        ended = self.agent.exit
        assert ended is not None
        console = self.console or Console()
        if ended.code:
            console.say(f"fsbarrier: {ended.reason}\n", to=2)
        console.close(DYING_S)
        return ended.code

    def _loop(self) -> None:
        patience = self.settings.coordination.dead_s
        poll = Backoff(POLL_MIN_S, self.settings.coordination.poll_max_s)
        interval, failing_since = poll.first_s, None
        while self.agent.exit is None and self._signal is None:
            now = self._ticked_at = time.monotonic()
            try:
                busy = self.agent.tick(now)
                failing_since = None
            except OSError as error:
                failing_since = now if failing_since is None else failing_since
                if now - failing_since >= patience:
                    where = f"node {self.agent.node.rank}: {self.record.log_path}"
                    raise StoreError(f"{where} has failed for {patience:g} s: {error}") from None
                busy = False
            if self.jobs.unfit is not None:
                raise self.jobs.unfit
            interval = poll.first_s if busy else poll.after(interval)
            self._hints.watch(self._row_dir() if interval == poll.most_s else None)
            self._wake.wait(interval)
            if self._wake.is_set():
                self._wake.clear()
                interval = poll.first_s

    def _row_dir(self) -> Path | None:
        """The directory in which the facts appear that this node waits for."""
        node = self.agent.node
        if node.generation is None or node.position is None:
            return None
        return self.agent.observer.row_dir(node.generation.number, node.position)

    def _settle(self) -> None:
        """End all that this node runs, and say so in a last heartbeat."""
        if self.agent.exit is None:
            number = self._signal or signal.SIGTERM
            code = EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
            self._leave(code, f"stopped by {signal.Signals(number).name}")
        self.workplace.grace_s = 0.5
        with contextlib.suppress(StoreError):  # what hangs in the kernel is left to its guard
            self.jobs.cancel()
        self.engine.stop()

    def _leave(self, code: int, reason: str) -> None:
        """This node ends and the run does not: its peers are to act on that."""
        with contextlib.suppress(OSError):
            self._record_event(
                "node_ended", self.agent.node, {"state": "left", "code": code, "reason": reason}
            )
        self.agent.exit = Exit(code, "left", reason)

    def _beat(self) -> None:
        """Beat until told otherwise. A loop that is stuck must not look alive: then the beats stop as well, and soon, for
        only from then on do the others count."""
        coordination = self.settings.coordination
        while True:
            last = self._beating.is_set()
            stuck = (
                time.monotonic() - self._ticked_at > coordination.suspect_s / 2 and self.agent.exit is None
            )
            if not stuck:
                try:
                    beat = self.agent.beat()
                    self._store.put(self.record.paths.beat(beat.rank, beat.incarnation), beat)
                except OSError:
                    pass  # the loop meets the same filesystem, and decides
            if last:
                return
            joining = self.agent.node.stage is Stage.JOINING
            self._beating.wait(JOINING_BEAT_S if joining else coordination.beat_s)

    def _record_event(self, event: str, node: Node, fields: Payload) -> None:
        if self._journal is None:
            path = self.record.paths.journal(node.rank, node.incarnation)
            self._journal = Journal(path, run_id=self.record.run_id, node_rank=node.rank)
        now, where = time.monotonic(), place(node, node.position, self.agent.rules)
        if event == "phase_started":
            self._row_entered = now
        elif event == "phase_finished":
            fields = {**fields, "seconds": round(now - self._row_entered, 6)}
        elif event == "node_lost":
            paths = self.record.paths
            lost = [
                {**item, "log": last_words(paths, item["node_rank"], item["incarnation"])}
                for item in fields["lost"]
            ]
            fields = {**fields, "lost": lost}
        written = self._journal.write(event, now, {"incarnation": node.incarnation, **where}, fields)
        text = "".join(f"{line}\n" for line in log_lines(written))
        with contextlib.suppress(OSError):  # nobody need read along; the journal has it
            os.write(self._log, text.encode(errors="surrogateescape"))
        if self.console is not None and text:
            self.console.say(text)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """While this lasts, SIGINT, SIGTERM and SIGHUP end the node in order."""

        def handle(number: int, frame: FrameType | None) -> None:
            self._signal = number  # and no more: where it interrupts the loop's wait, an Event set here would wait for itself

        with handled(ENDING, handle):
            yield

    def close(self) -> None:
        self._hints.close()
        os.close(self._log)
        if self._journal is not None:
            self._journal.close()


def make_rules(settings: Settings) -> Rules:
    """The machine's rules from a run's settings."""
    coordination = settings.coordination
    first, last = SLICES[settings.rl_phase]
    return Rules(
        program=load_program(settings.program),
        first=first,
        last=last,
        num_nodes=settings.num_nodes,
        min_nodes=settings.min_nodes,
        on_node_failure=settings.on_node_failure,
        retries=coordination.retries,
        limits=Limits(
            suspect_s=coordination.suspect_s,
            dead_s=coordination.dead_s,
            stagger_s=2 * coordination.beat_s,
            join_timeout_s=coordination.join_timeout_s,
            rejoin_timeout_s=coordination.rejoin_timeout_s,
        ),
    )


def make_paces(settings: Settings) -> Paces:
    """How often to look for what; a large run looks less often, so that the metadata server's load stays bounded."""
    beat_s = settings.coordination.beat_s
    crowd = max(1.0, settings.num_nodes / 32)
    eager = eagerness(settings.num_nodes)
    return Paces(members_s=0.1 * crowd, beats_s=beat_s / 2, blind_s=1.5 * beat_s, eager=eager)


def make_engine(settings: Settings, log_dir: Path, work_dir: Path, needs: frozenset[str]) -> Any:
    """The local engine of this node; a stand-in that refuses where the program has no model."""
    if "model" not in needs:
        return NoEngine()
    from fsbarrier.engine.engine import Engine

    external = not settings.manages_engine
    return Engine(settings.engine, external=external, log_file=log_dir / "vllm.log", work_dir=work_dir)


class NoEngine:
    """The engine of a program without a model."""

    threads = 0

    def ensure(self, weights: Path, policy_version: int, *, cancel: threading.Event) -> Any:
        raise StoreError("this program has no engine")

    def release(self, *, cancel: threading.Event) -> Payload:
        return {}

    def stop(self) -> None:
        pass
