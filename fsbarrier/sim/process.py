"""One start of one node, with its loop, clock and heartbeats, in virtual time."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.paces import Paces, make_paces
from fsbarrier.coordination.polling import FIRST_PAUSE_S
from fsbarrier.errors import Fenced
from fsbarrier.protocol.facts import Beat, Join, Payload
from fsbarrier.protocol.rows import SLICE_CHOICE
from fsbarrier.protocol.state import Node, Stage
from fsbarrier.rundir.names import PULSE
from fsbarrier.rundir.record_store import Store
from fsbarrier.settings.sections import Settings
from fsbarrier.sim import mishaps
from fsbarrier.sim.disk import Directory, File, SimPath
from fsbarrier.sim.faults import Crash, Livelock, Mishap, Trouble
from fsbarrier.sim.history import JournalLine, Missing
from fsbarrier.sim.interruptible import InterruptibleCall
from fsbarrier.sim.settings import can_hold
from fsbarrier.sim.setup import PATHS
from fsbarrier.sim.store import MountClient
from fsbarrier.sim.work import SimHost, make_work
from fsbarrier.store.retry import PASSING_S, Backoff

if TYPE_CHECKING:
    from fsbarrier.sim.world import World

JOINING = Stage.JOINING
# between two tries to join
AGAIN_S = 0.2
# The longest time between two polls. Only polls that would see something new are simulated.
POLL_S = 0.1
# The following times are multiples of the time between two heartbeats.
# Between two looks at rarely changing records. A change wakes the processes anyway.
RARELY = 0.95
# A longer gap between two looks does not count as silence.
BLIND = 1.5
# The longest time between two looks at heartbeats. It must stay below BLIND.
IDLE = 1.4


def usual_paces(settings: Settings, beat_s: float, dead_s: float, outage_s: float) -> Paces:
    """The daemon's paces, without the looks that would show nothing new."""
    usual = make_paces(settings.with_values({"coordination.beat_s": beat_s}))
    usual = replace(usual, outage_s=outage_s)
    return replace(usual, members_s=RARELY * beat_s, beats_s=RARELY * beat_s, dead_s=dead_s)


class _BeatStore:
    """What a process writes its heartbeats through. An outage loses them, and they have mishaps of their own: others strike the loop."""

    def __init__(self, world: World, client: MountClient, trouble: Trouble) -> None:
        self._world, self._client, self._trouble = world, client, trouble
        # the last heartbeat that was written, until it is taken note of
        self.written: tuple[SimPath, File] | None = None

    def put(self, path: SimPath, beat: Beat) -> None:
        self._write(path, lambda: self._client.replace(path, beat))

    def mark(self, path: SimPath, beat: Beat) -> None:
        self._write(path, lambda: self._client.replace(path, beat), heartbeat=True)

    def rename(self, path: SimPath, new: SimPath) -> bool:
        return self._write(new, lambda: self._client.move(path, new), heartbeat=True) is not None

    def _write(
        self, path: SimPath, write: Callable[[], File | None], *, heartbeat: bool = False
    ) -> File | None:
        if self._trouble.outage is not None:
            raise OSError(self._trouble.outage, "outage", path)
        mishap = mishaps.mishap_of_a_beat(self._world)
        file = write() if mishap != "error" else None
        if heartbeat and file is not None:
            self.written = path, file
        self._raise(mishap, path)
        return file

    def _raise(self, mishap: str, path: SimPath) -> None:
        if mishap:
            raise OSError(errno.EIO, mishap, path)


class Process:
    """One start of one node."""

    def __init__(self, world: World, number: int, rank: int, client: MountClient, trouble: Trouble) -> None:
        self.world, self.number, self.rank, self.client, self.trouble = world, number, rank, client, trouble
        self.host = client.host
        self.up = True
        self.paused = False
        self.woke_at = 0.0
        # what its last heartbeat says
        self.said = ""
        # its last heartbeats
        self.noted = deque[Beat](maxlen=2)
        # True from a pause until the next look
        self.slept = False
        # The whole host is stopped, with its programs.
        self.frozen = False
        self.deferred: list[Callable[[], None]] = []
        self._beats = _BeatStore(world, client, trouble)
        self.started = self.ticked_at = world.now
        # when it looks next
        self.due: list[float] = []
        # the look that is blocked in the middle of an operation
        self.held_look: InterruptibleCall | None = None
        self.prepared = self.joined = False
        # Started with `--rank auto`: it takes exactly the next incarnation, or ends.
        self.claims = False
        # since when it has tried in vain to join
        self.failing_since: float | None = None
        # Before this it looks at no news.
        self.pause_until = 0.0
        self.mishap = mishaps.mishap_of_a_start(world)
        # the directory of its row
        self.watching: Directory | None = None
        # when it can first see new records outside its row
        self.news_at: float | None = None
        clocks = world.setup.clocks
        self.offset = world.clocks.uniform(0, 1e6) if clocks else 0.0
        self.rate = world.clocks.choice((1.0, 1.0001, 0.9999)) if clocks else 1.0
        valid = partial(can_hold, world.settings)
        self.observer: Observer = Observer(cast(Store, client), PATHS, world.program, world.paces, valid)
        self.work = make_work(world, self)
        session = world.sessions[-1]
        join = Join(
            rank,
            0,
            self.host,
            number,
            self.host,
            (f"10.0.0.{rank}",),
            until=session.until,
            choices={SLICE_CHOICE: session.phases} if len(world.sessions) > 1 else {},
            digest=world.codes[rank],
            fingerprint={"code": {"program": world.codes[rank]}, **self._packages()},
            time=f"p{number}",
            stated=world.command_lines.of(rank, again=number >= world.setup.nodes),
        )
        self.loop = NodeLoop(cast(Store, client), self.observer, world.rules, self.work, join, self._record)

    @cached_property
    def life(self) -> NodeLife:
        beats, pauses = cast(Store, self._beats), Backoff(FIRST_PAUSE_S, POLL_S)
        world = self.world
        return NodeLife(
            self.loop,
            lambda: self.work.unfit,
            world.beat_s,
            pauses,
            self.clock,
            beats=beats,
            note_beat=self.noted.append,
            dice=world.beating,
        )

    def _packages(self) -> Payload:
        """What is installed on this host; sometimes what does not fit together with the others."""
        world, right = self.world, "2.9"
        if world.refusals and not world.healed:
            world.refusals -= 1
            world.history.faults.add("refused")
            right = "1.13"
        return {"packages": {"torch": right}}

    @property
    def clock(self) -> float:
        """This process's own monotonic clock."""
        return self.offset + self.world.now * self.rate

    def wake(self, at: float, since: float | None = None) -> None:
        """Look at time `at`, unless a look is already due between `since` and `at`. `since`: when there were news, which end no pause."""
        if not self.up:
            return
        at = at if since is None else max(at, self.pause_until)
        for time in self.due:
            if (at if since is None else since) <= time <= at:
                return
        self.due.append(at)
        self.world.at(at, self._tick)

    def notice(self, at: float) -> None:
        """A new generation, join or request to stop is visible from `at` on."""
        self.news_at = at if self.news_at is None else max(at, self.news_at)
        self.wake(at + self.world.rng.random() * POLL_S, at)

    def _idle(self) -> None:
        """Plan the next look. Polls that would see nothing new are left out, but not for so long that the gap counts as blindness."""
        world, seen_at = self.world, self.observer.looked_at
        now, blind_s = world.now, 0.9 * world.beat_s
        if not self.life.failing and seen_at is not None:
            blind_s = (self.offset + now * self.rate - seen_at) / self.rate
        at = max(self.pause_until, now + max(POLL_S, IDLE * world.beat_s - world.rng.random() - blind_s))
        self.due.append(at)
        world.at(at, self._tick)

    # --- a look ---

    def _tick(self) -> None:
        if not self.up:
            return
        self.due.remove(self.world.now)
        if self.paused or self.held_look is not None:
            return
        mishap = self.mishap
        if mishap is None and self.world.mishap_rate:
            mishap = mishaps.small_mishap(self.world)
        if mishap is not None:
            self._struck(mishap)
            return
        self.client.done = 0
        self._looked(self._look())

    def _struck(self, mishap: Mishap) -> None:
        """A look with a mishap. If it must block in the middle, it runs in a thread."""
        self.mishap = None
        self.trouble.begin(mishap)
        if mishap.how == "block":
            self.held_look = InterruptibleCall(self._look)
            self.go_on()
        else:
            self._look_continued(self._look())

    def go_on(self) -> None:
        """Continue a blocked look until it ends or blocks again."""
        if not self.up or self.held_look is None:
            return
        if self.paused:
            self.deferred.append(self.go_on)
        elif self.held_look.go_on():
            look, self.held_look = self.held_look, None
            self._look_continued(look.result)

    def _look_continued(self, how: str) -> None:
        left = self.trouble.rest()
        self.mishap = self.mishap or left
        self._looked(how)

    def _look(self) -> str:
        """One look of the daemon's loop, or its start. Returns what was unusual, "" for nothing; never raises."""
        now = self.ticked_at = self.world.now
        self.slept = False
        try:
            if not self.joined:
                return self._join()
            if self.news_at is not None and self.news_at <= now:
                self.news_at = None
                self.observer.hurry()
            self.pause_until = now + self.life.look(self.offset + now * self.rate) / self.rate
        except OSError as error:
            return f"error {error}"
        except Crash:
            return "crash"
        except Livelock as error:
            self.world.history.stuck.append(f"node {self.rank}: {error}")
            return "crash"
        return ""

    @property
    def host_of_work(self) -> SimHost:
        return cast(SimHost, self.work.workplace.host)

    def end_work(self) -> None:
        """As the daemon does at its end."""
        self.work.cancel()
        self.work.workplace.end_residents()
        self.host_of_work.engines.stop()

    def _join(self) -> str:
        if not self.prepared:
            self.observer.prepare()
            self.prepared = True
        newest = self.observer.joins.get(self.rank)
        claimed = 1 + (newest.incarnation if newest is not None else 0) if self.claims else None
        try:
            self.loop.start(self.clock, claimed)
        except Fenced as error:
            self.world.end(self, 2, str(error))
            return ""
        self.joined = True
        return "joined"

    def _looked(self, how: str) -> None:
        """A look has ended. `how`: what was unusual, "" for nothing."""
        if how:
            self._after_mishap(how)
        if not self.up:
            return
        if self.loop.exit is not None:
            self.world.finish(self)
        elif min(self.due, default=float("inf")) > self.world.now + IDLE * self.world.beat_s:
            # The next look may be far away, when a stale listing expires.
            self._idle()

    def _after_mishap(self, how: str) -> None:
        if how == "crash":
            self.world.kill(self, "killed in the middle of an operation")
        elif how == "joined":
            self.beat()
            self.wake(self.world.now + 0.001)
        else:
            self._could_not_join(how)

    def _could_not_join(self, how: str) -> None:
        """Like the daemon, try again for a moment."""
        now = self.world.now
        self.failing_since = now if self.failing_since is None else self.failing_since
        if now - self.failing_since >= PASSING_S:
            self.world.end(self, 3, how)
        else:
            self.wake(now + AGAIN_S)

    # --- heartbeats and the journal ---

    def beat(self) -> None:
        """Write a heartbeat, and plan the next one."""
        if not self.up:
            return
        if self.paused:
            self.slept = True
            self.deferred.append(self.beat)
            return
        world, now = self.world, self.world.now
        if self.held_look is None and not self.slept and not self.life.failing and now >= self.pause_until:
            # Empty looks are left out here.
            self.life.looked_at = self.clock
        pause_s = self.put_beat()
        if self.loop.node.stage is JOINING and self.life.looked_at == self.clock:
            # Nor is each heartbeat of a long wait written.
            age_s = now - self.started
            pause_s = max(pause_s, 0.8 if age_s < 5.0 else world.beat_s) if age_s >= 1.0 else pause_s
            if age_s >= 5.0:
                # As the daemon does, which names them to people.
                assert self.rank not in self.loop.awaited(self.clock)
        world.at(now + pause_s, self.beat)

    def put_beat(self) -> float:
        """Write a heartbeat, perhaps; returns the pause before the next."""
        pause_s, written = self.life.beat(self.clock), self._beats.written
        self._beats.written = None
        if written is not None:
            self._note_beat(*written)
        return pause_s

    def _note_beat(self, path: SimPath, file: File) -> None:
        world, pulse = self.world, PULSE.parse(path.name)
        assert pulse is not None
        hangs_s = world.now - self.ticked_at if self.held_look is not None and self.loop.exit is None else 0.0
        if hangs_s > world.rules.limits.suspect_s / 2 + 0.1:
            world.history.stuck.append(f"node {self.rank} looks alive, and has hung for {hangs_s:.1f} s")
        self.said = pulse.state
        times = world.history.beats.setdefault((self.rank, pulse.incarnation), [])
        times.append(world.now)
        # The second heartbeat shows the others that it is alive; later ones are no news.
        if len(times) <= 2:
            world.first_beat(file)

    def _write_journal(self) -> None:
        """The journal is on the shared directory, too. Raises OSError: then the line is written later, or never."""
        self.client.append()

    def _record(self, event: str, node: Node, fields: Payload) -> None:
        world = self.world
        self._write_journal()
        world.history.events.append(JournalLine(world.now, self.number, event, node, fields, self.ticked_at))
        if event == "work_failed" and "is no complete policy version" in str(fields.get("error")):
            world.history.missing.append(Missing(world.now, self.number, node, str(fields["error"])))
        # In this look the node rejoins or proposes a generation.
        mishap = None
        if event == "left_generation":
            mishap = mishaps.mishap_of_a_start(world, 0.2)
        elif event == "generation_sealed":
            mishap = mishaps.mishap_after_a_seal(world, self.rank)
        if mishap is not None:
            self.trouble.begin(mishap)
        if event == "phase_started":
            assert node.generation is not None and node.position is not None
            row = self.observer.row_dir(node.generation.number, node.position)
            self.watching = world.disk.dirs.get(row)  # type: ignore[call-overload]
            if world.awaited:
                world.entered(node)
