"""The daemon of one node: it joins the run and loops (look, decide, act) until the run ends or a signal comes.

Its main threads are the loop, the heartbeat (so that a slow disk or a long clean-up does not look like death), and the work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import fsbarrier
from fsbarrier.context import POLICY
from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.poll_intervals import size_factor
from fsbarrier.coordination.polling import FIRST_PAUSE_S, POLL_MAX_S, LookWaits
from fsbarrier.coordination.run_rules import make_rules, poll_intervals
from fsbarrier.engine import accelerators
from fsbarrier.errors import (
    EXIT_INTERNAL,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    StoreError,
)
from fsbarrier.loader import load_program
from fsbarrier.network.listening import LOOPBACK, listen
from fsbarrier.network.this_host import boot_id, candidate_addresses, host_name, user_at_host
from fsbarrier.processes.death_notice import DeathNotice
from fsbarrier.processes.signals import ending_signals_handled
from fsbarrier.protocol.facts import Beat, Join, Payload
from fsbarrier.protocol.membership import JOIN_TIMEOUT_S, death_notice
from fsbarrier.run.event_log import EventLog
from fsbarrier.run.fingerprint import Fingerprint, code_digests, one_digest
from fsbarrier.run.job import Workplace
from fsbarrier.run.job_runner import ContextMaker, JobRunner
from fsbarrier.rundir.heartbeats import iteration_of_others
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import can_hold
from fsbarrier.settings.placement import ALL, Ranges
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files
from fsbarrier.store.retry import HIDDEN_S, Backoff, fails_or_hides, patiently
from fsbarrier.training.weights_copy import WeightsCopy
from fsbarrier.view.quiet import Silence, progress_text
from fsbarrier.wording import clock_time, counted, ranks

if TYPE_CHECKING:
    from fsbarrier.engine.frozen import FrozenEngine
    from fsbarrier.engine.replicas import Replicas

# How long the end of the daemon waits for the last heartbeat and the last console lines, since a filesystem or a terminal may hang.
LAST_WORDS_S = 1.0
# A start that waits for other nodes names them after this time, and then every minute.
SAY_AWAITED_S, SAY_AGAIN_S = 5.0, 60.0
# How long a program may take to end when its node ends.
GRACE_S = 0.5


@contextmanager
def starting(record: RunRecord) -> Iterator[None]:
    """In this block a failing filesystem ends the start with a message. Raises StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot join the run at {record.log_path}: {error}") from None


class Daemon:
    """The daemon process of one node. If the other nodes went on without it, it rejoins as its next incarnation."""

    def __init__(
        self,
        record: RunRecord,
        choices: Payload,
        stated: Payload,
        rank: int,
        until: int | None,
        work_dir: Path,
        weights: WeightsCopy | None,
    ) -> None:
        """Read the run directory and create everything that this node needs. `choices`, `stated`, `until`: see Join. `weights`: this node's
        copy of the newest weights; None: its engines read the run directory. Raises OSError; UsageError if it has too few accelerators.

        This process keeps the settings that it read at its start. Each work gets those of its generation (`ContextMaker`).
        """
        self.record, self.settings = record, record.settings
        settings = record.settings
        self._signal: int | None = None
        self._death_notice = DeathNotice()
        self._say_awaited_at = time.monotonic() + SAY_AWAITED_S
        # What the running program waits for, and its phase.
        self._program_awaits = ("", "")
        self._silence, self._last_said_at = Silence(time.monotonic()), 0.0
        self._ended = threading.Event()
        self._program = program = load_program(settings.program)
        devices = accelerators.detect()
        rules, wake = make_rules(settings, program, len(devices)), threading.Event()
        valid = partial(can_hold, settings)
        observer = Observer(PosixStore(), record.paths, program, poll_intervals(settings), valid)
        patiently(observer.prepare, HIDDEN_S, passes=fails_or_hides)
        last_join = observer.joins.get(rank)
        log_dir = record.paths.node_logs(1 + (last_join.incarnation if last_join else 0), rank)
        files.make_dirs_below(record.log_path, log_dir)
        self.events = patiently(
            lambda: EventLog(record, rules, log_dir / "daemon.log", work_dir), HIDDEN_S, passes=fails_or_hides
        )
        self.workplace = self._make_workplace(rank, log_dir, work_dir, weights, devices)
        make_context = ContextMaker(record, program, observer, self.workplace)
        self.jobs = JobRunner(make_context, self.workplace, wake.set)
        code = code_digests(settings)
        fingerprint = Fingerprint.collect(devices, code, log_dir=log_dir)
        join = describe_start(rank, until, choices, stated, digest=one_digest(code), fingerprint=fingerprint)
        offered = {name: engine.offer for name, engine in self.workplace.frozen.items() if engine.offered}
        if engines := self.workplace.engines:
            offered |= {POLICY: engines.head_listener.offer} if engines.head_listener is not None else {}
        join = replace(join, engines=offered)
        self._changed_code = last_join.other_code(join) if last_join else []
        events = self.events
        self.loop = NodeLoop(observer.store, observer, rules, self.jobs, join, events.write, events.note_work)
        self._waiting, factor = LookWaits(self.loop, wake), size_factor(settings.num_nodes)
        self._pauses = Backoff(FIRST_PAUSE_S * factor, POLL_MAX_S * factor)
        beat_s, now = settings.coordination.beat_s, time.monotonic()
        self._life = NodeLife(
            self.loop,
            self.jobs.unfit,
            beat_s,
            self._pauses,
            now,
            note_beat=self._note_beat,
            say=lambda text: events.console.say(f"fsbarrier: {text}\n", to=2),
        )

    def _make_workplace(
        self,
        rank: int,
        log_dir: Path,
        work_dir: Path,
        weights: WeightsCopy | None,
        devices: Sequence[accelerators.Accelerator],
    ) -> Workplace:
        """Make the state that all jobs of this node share, with its engines. Raises UsageError if there are too few accelerators."""
        settings, coordination = self.settings, self.settings.coordination
        has_model = "model" in self._program.needs
        return Workplace(
            engines=make_engines(settings, log_dir, work_dir, devices) if has_model else None,
            frozen=make_frozen(settings, rank, log_dir, work_dir, devices) if has_model else {},
            work_dir=work_dir,
            log_dir=log_dir,
            log_path=self.record.log_path,
            stall_timeout_s=coordination.stall_timeout_s,
            outage_s=coordination.outage_s,
            weights=weights,
            devices=devices,
        )

    def join(self, incarnation: int | None) -> None:
        """Join the run as the next incarnation of this rank, or as exactly `incarnation`. Raises StoreError; Fenced if that is taken."""
        # The others do not know this start yet, so announcing it may be retried.
        with starting(self.record):
            patiently(lambda: self.loop.start(time.monotonic(), incarnation), HIDDEN_S, passes=fails_or_hides)

    def run(self) -> int:
        """Run to the end; returns the exit code."""
        if self._changed_code:
            with starting(self.record):
                self.events.write("code_changed", self.loop.node, {"what": self._changed_code})
        self._say_what_it_waits_for()
        beats = threading.Thread(target=self._write_heartbeats, name="beat", daemon=True)
        beats.start()
        try:
            self._loop()
        except Exception as error:
            self._life.leave(EXIT_INTERNAL, f"internal error: {type(error).__name__}: {error}")
            raise
        finally:
            self._end_work()
            # The thread still writes the last heartbeat, which says how this node ended.
            self._ended.set()
            beats.join(LAST_WORDS_S)
        ended = self.loop.exit
        assert ended is not None
        if ended.code:
            self.events.console.say(f"fsbarrier: {ended.reason}\n", to=2)
        self.events.console.close(LAST_WORDS_S)
        return ended.code

    def _say_what_it_waits_for(self) -> None:
        """Say what this node waits for if it joins a running run, since it has nothing to do before the next iteration, or if its rank is
        beyond the run's number of nodes."""
        me, places = self.loop.node.rank, self.settings.num_nodes
        if me >= places:
            asked, up_to_s = f"--num-nodes {me + 1}", JOIN_TIMEOUT_S
            self.events.console.say(
                f"fsbarrier: node {me}: this run has {counted(places, 'node')}; waiting up to {up_to_s:g} s for node 0 (--master) to be "
                f"started with {asked} or more\n"
            )
        # The line is for people only. The observer finds out who is alive.
        with contextlib.suppress(OSError):
            if iteration := iteration_of_others(self.record.log_path, me):
                where = f"the others were in iteration {iteration}; it is taken in when the next one begins"
                where += ", at once if they wait for it or are gone"
                self.events.console.say(f"fsbarrier: node {me}: {where}\n")

    def _name_missing_nodes(self, now: float) -> None:
        """Name the missing nodes, because a start that waits looks like one that hangs."""
        if now < self._say_awaited_at:
            return
        self._say_awaited_at = now + SAY_AGAIN_S
        if missing := self.loop.awaited(now):
            nodes = f"node{'s' if len(missing) > 1 else ''} {ranks(missing)}"
            waited_s, up_to_s = now - self.loop.node.since, JOIN_TIMEOUT_S
            seen = self.loop.observer.ledger.seen.values()
            heard = any(news.moved and news.beat.rank != self.loop.node.rank for news in seen)
            # If this mount shows no file of another node, the mount may be wrong, though the nodes run.
            why = (
                ""
                if heard
                else "; nothing of any other node shows here: if they run, compare --log-path and their mounts"
            )
            left, newest = self.loop.observer.resume_point, self.loop.observer.newest
            if left and newest and newest.until is not None and left.position.iteration > newest.until:
                done = counted(newest.until, "iteration")
                why = f"; the run has done its {done}, so start node 0 (--master) with a larger --iterations"
            self.events.console.say(
                f"fsbarrier: waiting up to {up_to_s:g} s for {nodes} to join {self.record.log_path} ({waited_s:.0f} s so far){why}\n"
            )

    def _say_progress(self, now: float) -> None:
        """Say what this node is doing if it has said nothing for a while, as when vLLM starts."""
        if self.events.console.said_at != self._last_said_at:
            self._last_said_at = self.events.console.said_at
            self._silence.broken(now)
        if not self._silence.due(now):
            return
        where, said = self.loop.node.position, progress_text(self.jobs.progress())
        if where is not None and said:
            self.events.console.say(f"{clock_time(time.time())}  iteration {where.iteration}: {said}\n")
            self._last_said_at = self.events.console.said_at

    def _loop(self) -> None:
        """Look, decide and act until this node has ended or received a signal."""
        while self.loop.exit is None and self._signal is None:
            now = time.monotonic()
            pause_s = self._life.tick(now)
            self._name_missing_nodes(now)
            self._say_progress(now)
            self._waiting.wait(
                pause_s,
                hints=pause_s >= self._pauses.most_s,
                ended=lambda: self._signal is not None or self.loop.exit is not None,
            )

    def _end_work(self) -> None:
        """End everything that this node runs. After a signal, record that as its end."""
        if self.loop.exit is None:
            number = self._signal or signal.SIGTERM
            code = EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM
            by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._life.leave(code, f"stopped by {by}")
        self.workplace.grace_s = GRACE_S
        # A program may hang in the kernel. Its guard keeps trying to end it.
        with contextlib.suppress(StoreError):
            self.jobs.cancel()
            self.workplace.end_residents()
        for engine in (self.workplace.engines, *self.workplace.frozen.values()):
            if engine is not None:
                engine.stop()

    def _write_heartbeats(self) -> None:
        """Write heartbeats, in a thread, until this node has ended, and one last time then."""
        last = False
        while not last:
            last = self._ended.is_set()
            pause_s = self._life.beat(time.monotonic())
            if not last:
                self._ended.wait(pause_s)

    def _note_beat(self, beat: Beat) -> None:
        """Called before each heartbeat is written."""
        paths = self.record.paths
        self._death_notice.note(paths.pulse(beat.pulse), paths.pulse(death_notice(beat)))
        self._say_what_its_program_awaits(beat)

    def _say_what_its_program_awaits(self, beat: Beat) -> None:
        """Tell a person once what the running program waits for, such as a server of the user's own, and when it goes on."""
        before, now = self._program_awaits, (str(beat.progress.get("awaits", "")), beat.phase_name)
        if now == before:
            return
        self._program_awaits, where = now, f"fsbarrier: node {beat.rank}: {beat.phase_name}"
        if now[0]:
            self.events.console.say(f"{where}: {now[0]}\n", to=2)
        elif before[0] and before[1] == beat.phase_name:
            self.events.console.say(f"{where} goes on\n", to=2)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """In this block SIGINT, SIGTERM and SIGHUP end the node gracefully, and `fsbarrier debug` makes it write its stacks."""

        def note(number: int, frame: FrameType | None) -> None:
            # Above all do not set the loop's event here. If the signal interrupts the loop's wait, which holds the event's lock,
            # setting the event would deadlock.
            self._signal = number

        self.events.write_stacks_on_signal()
        with ending_signals_handled(note):
            yield

    def close(self) -> None:
        """Close what is still open after the last heartbeat."""
        self._waiting.close()
        self._death_notice.close()
        # A failure here must not change the exit code, which is decided already.
        with contextlib.suppress(OSError):
            self.events.close()


def describe_start(
    rank: int, until: int | None, choices: Payload, stated: Payload, *, digest: str, fingerprint: Fingerprint
) -> Join:
    """The join record of this start, without its incarnation."""
    return Join(
        rank=rank,
        incarnation=0,
        host=host_name(),
        pid=os.getpid(),
        boot_id=boot_id(),
        addresses=tuple(candidate_addresses()),
        until=until,
        version=fsbarrier.__version__,
        digest=digest,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        choices=choices,
        stated=stated,
        by=user_at_host(),
        fingerprint=fingerprint.as_json(),
    )


def make_engines(
    settings: Settings, log_dir: Path, work_dir: Path, devices: Sequence[accelerators.Accelerator]
) -> Replicas:
    """The local engines of this node. Raises UsageError if there are too few accelerators."""
    # Imported late: a program without a model does not need the engine's libraries.
    from fsbarrier.engine.answer_format import Parsers
    from fsbarrier.engine.replicas import Replicas
    from fsbarrier.engine.span import HeadListener

    return Replicas(
        settings.engine,
        head_listener=HeadListener(listen(candidate_addresses())) if settings.engine.nodes > 1 else None,
        external=not settings.manages_engine,
        log_dir=log_dir,
        work_dir=work_dir,
        devices=devices,
        secrets_named=(settings.judge.api_key_env,),
        parsers=Parsers.of(settings.rollout),
        adapter_rank=settings.lora.rank if settings.lora.serve == "adapter" else 0,
    )


def make_frozen(
    settings: Settings, rank: int, log_dir: Path, work_dir: Path, devices: Sequence[accelerators.Accelerator]
) -> dict[str, FrozenEngine]:
    """The frozen engines that may have servers on this node. Raises UsageError, OSError."""
    if not settings.engines:
        return {}
    from fsbarrier.engine.frozen import FrozenEngine
    from fsbarrier.engine.replicas import Replicas

    engines, nodes = {}, range(settings.num_nodes)
    samplers = Ranges.parse(settings.placement.rollout).holders(nodes, len(devices))
    for name, own_settings in settings.engines.items():
        holders = Ranges.parse(own_settings.placement or ALL).holders(nodes, len(devices))
        if rank not in holders and rank < settings.num_nodes:
            continue
        # Listen beyond loopback only if some node that rolls out has no server of its own.
        addresses = LOOPBACK if samplers.keys() <= holders.keys() else candidate_addresses()
        replicas = Replicas(
            own_settings,
            log_dir=log_dir,
            work_dir=work_dir,
            devices=devices,
            secrets_named=(settings.judge.api_key_env,),
            frozen=name,
        )
        engines[name] = FrozenEngine(replicas, addresses)
    return engines
