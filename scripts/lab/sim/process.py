"""One start of a run's node: the daemon's loop, heartbeats and work, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.errors import EXIT_SIGTERM, Fenced
from fsbarrier.protocol.facts import Beat, Join, Payload, Pulse
from fsbarrier.protocol.membership import death_notice
from fsbarrier.protocol.rows import SLICE_CHOICE
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.record_store import Store
from fsbarrier.store.retry import HIDDEN_S, Backoff, fails_or_hides, patiently
from sim.disk import SimPath
from sim.history import JournalLine, Missing
from sim.schedule import Mishap, Schedule, SimThread, Start
from sim.sessions import Session
from sim.settings import can_hold
from sim.setup import PATHS, program
from sim.store import MountClient
from sim.work import OFFER, SimFlag, make_work

T = TypeVar("T")

# the pauses of a short wait; the daemon's are shorter, and most of its looks show nothing new
PAUSES = Backoff(0.02, 1.0, factor=2.0)


class Process(Start):
    """One start of one node."""

    def __init__(
        self,
        schedule: Schedule,
        number: int,
        rank: int,
        client: MountClient,
        session: Session,
        code: str,
        stated: Payload,
        claims: bool,
    ) -> None:
        """`session`: what it is started for. `code`: which. `stated`: the settings on its command line. `claims`: it was started with
        `--rank auto`, and takes exactly the next incarnation, or ends."""
        super().__init__(schedule, number, rank, client)
        draw, store = schedule.draw, cast(Store, client)
        self._claims, self._signalled = claims, False
        # its last heartbeats, and what the last one on the disk says
        self._noted, self._said = deque[Beat](maxlen=2), ""
        # when its last look and its last heartbeat began
        self._looked_at = self._beat_at = schedule.now
        self.observer = Observer(store, PATHS, program(), draw.intervals, partial(can_hold, draw.settings))
        self.work = make_work(self, self.observer, lambda: self.main.wake())
        join = Join(
            rank,
            0,
            self.host,
            number,
            self.host,
            (f"10.0.0.{rank}",),
            until=session.until,
            choices={SLICE_CHOICE: session.phases},
            digest=code,
            fingerprint={"code": {"program": code}, "packages": {"torch": self._torch()}},
            time=f"p{number}",
            stated=stated,
            engines={name: OFFER for name in draw.settings.engines},
        )
        self.loop = NodeLoop(store, self.observer, draw.rules, self.work, join, self._record)
        self.main: SimThread = self.thread(self._main)

    def _torch(self) -> str:
        """What is installed on this host; sometimes what does not fit together with the others."""
        draw = self.schedule.draw
        if not draw.refusals or self.schedule.healed:
            return "2.9"
        draw.refusals -= 1
        self.schedule.history.faults.add("refused")
        return "1.13"

    # --- its threads, as those of the daemon ---

    def _main(self) -> None:
        try:
            self._patiently(self.observer.prepare)
            newest = self.observer.joins.get(self.rank)
            claimed = 1 + (newest.incarnation if newest is not None else 0) if self._claims else None
            self._patiently(lambda: self.loop.start(self.clock, claimed))
        except (Fenced, OSError) as error:
            self.end(3 if isinstance(error, OSError) else 2, f"cannot join: {error}")
            return
        self.joined, draw = True, self.schedule.draw
        self.life = NodeLife(
            self.loop,
            self.work.unfit,
            draw.beat_s,
            PAUSES,
            self.clock,
            note_beat=self._noted.append,
            dice=self.schedule.rng,
        )
        self.beats: SimThread = self.thread(self._beat)
        while self.loop.exit is None:
            self._looked_at = self.schedule.now
            pause_s = self.life.tick(self.clock)
            if self.loop.exit is None and not self._signalled and pause_s:
                self.main.sleep(pause_s / self.rate)
            if self._signalled and self.loop.exit is None:
                self.life.leave(EXIT_SIGTERM, "stopped by SIGTERM")
        self._end()

    def _patiently(self, operation: Callable[[], T]) -> T:
        cancel = SimFlag(self.main.sleep)
        return patiently(operation, HIDDEN_S, passes=fails_or_hides, cancel=cancel, clock=lambda: self.clock)

    def _beat(self) -> None:
        while self.loop.exit is None:
            self._beat_at = self.schedule.now
            self.beats.sleep(self.life.beat(self.clock) / self.rate)

    def _end(self) -> None:
        """End its work, then write its last heartbeat."""
        ended, workplace = self.loop.exit, self.work.workplace
        assert ended is not None and workplace.engines is not None
        self.work.cancel()
        workplace.end_residents()
        workplace.engines.stop()
        self.life.beat(self.clock)
        draw = self.schedule.draw
        if self._said != ended.state and self.client.outage is None and not draw.error_rate:
            self.schedule.history.stuck.append(
                f"node {self.rank} ended, and its last heartbeat says {self._said!r}"
            )
        self.end(ended.code, f"{ended.state}: {ended.reason}")

    def signal(self) -> None:
        """SIGTERM."""
        self._signalled = True
        self.main.wake()

    def leave_death_notice(self) -> None:
        """A killed daemon's last heartbeat mostly says so a moment later."""
        schedule = self.schedule
        if schedule.rng.random() < 0.7:
            schedule.after(schedule.rng.random() * 0.3, self._put_death_notice)

    def _put_death_notice(self) -> None:
        for beat in reversed(self._noted) if self.client.outage is None else ():
            names = [cast(SimPath, PATHS.pulse(pulse)) for pulse in (beat.pulse, death_notice(beat))]
            if self.client.rename(*names):
                return

    # --- heartbeats and the journal ---

    def beat_written(self, pulse: Pulse) -> None:
        schedule = self.schedule
        hangs_s = self._beat_at - self._looked_at if self.main.hangs and self.loop.exit is None else 0.0
        if hangs_s > schedule.draw.rules.limits.suspect_s / 2 + 0.1:
            schedule.history.stuck.append(f"node {self.rank} looks alive, and has hung for {hangs_s:.1f} s")
        self._said = pulse.state

    def _record(self, event: str, node: Node, fields: Payload) -> None:
        """The journal is on the shared directory, too. Raises OSError: then the line is written later, or never."""
        schedule = self.schedule
        self.client.append()
        schedule.history.add(JournalLine(schedule.now, self.number, event, node, fields, self._looked_at))
        if event == "work_failed" and "is no complete policy version" in str(fields.get("error")):
            schedule.history.missing.append(Missing(schedule.now, self.number, node, str(fields["error"])))
        dies = (
            event == "generation_sealed"
            and "crash" in schedule.draw.setup.mix
            and not schedule.healed
            and schedule.rng.random() < 0.5
        )
        if dies:
            # Before it forms the next generation. The living members of the old one then do that.
            schedule.history.faults.add("crash")
            schedule.start(self.rank, 0.2 + schedule.rng.random() * 20)
            self.mishap = Mishap("crash")
        if event == "phase_started":
            schedule.entered(node)
