"""One start of one node: its loop, its clock, its heartbeats, as the daemon does them, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fsbarrier.errors import Fenced
from fsbarrier.node.agent import Agent
from fsbarrier.node.observer import Observer, Paces
from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.state import Exit, Node
from fsbarrier.sim.faults import Crash, Livelock, Mishap, Trouble
from fsbarrier.sim.history import Event
from fsbarrier.sim.invariants import BLIND_S
from fsbarrier.sim.setup import PATHS
from fsbarrier.sim.store import Client, SimPath
from fsbarrier.sim.strand import Strand
from fsbarrier.sim.work import SimWork

if TYPE_CHECKING:
    from fsbarrier.sim.world import World

BEAT_S = 2.0
POLL_S = 0.1  # the longest time between two polls, which are simulated only where they see something new
RARELY_S = 1.9  # the time between two looks at what changes seldom; whoever changes it wakes the others
IDLE_S = 2.8  # the longest time between two looks at heartbeats: less than what counts as blind


class Process:
    """One start of one node."""

    def __init__(self, world: World, number: int, rank: int, client: Client, trouble: Trouble) -> None:
        self.world, self.number, self.rank, self.client, self.trouble = world, number, rank, client, trouble
        self.up = True
        self.paused = False
        self.frozen = False  # the whole host: its programs stand still too
        self.deferred: list[Callable[[], None]] = []
        self.started = self.ticked_at = world.now
        self.due: list[float] = []  # when it is going to look
        self.strand: Strand | None = None
        self.joined = False
        self.failing_since: float | None = None
        self.mishap: Mishap | None = None
        self.watching: Any = ""
        self.news_at: float | None = None  # when it is going to see something new beside its row
        clocks = world.setup.clocks
        self._beats_as = 0, SimPath()
        self.offset = world.clocks.uniform(0, 1e6) if clocks else 0.0
        self.rate = world.clocks.choice((1.0, 1.0001, 0.9999)) if clocks else 1.0
        paces = Paces(RARELY_S, RARELY_S, BLIND_S, watchers=world.watchers)
        observer = Observer(cast(Any, client), PATHS, world.rules.program, paces)
        self.work = SimWork(world, self)
        host = f"{client.host}"
        join = Join(
            rank, 0, host, number, host, (f"10.0.0.{rank}",), world.setup.iterations, time=f"p{number}"
        )
        self.agent = Agent(cast(Any, client), observer, world.rules, self.work, join, self._record)

    @property
    def clock(self) -> float:
        """This process's own monotonic clock."""
        return self.offset + self.world.now * self.rate

    def beat_path(self, incarnation: int) -> SimPath:
        """Where its heartbeat goes."""
        if self._beats_as[0] != incarnation:
            self._beats_as = incarnation, cast(SimPath, PATHS.beat(self.rank, incarnation))
        return self._beats_as[1]

    def wake(self, at: float, since: float | None = None) -> None:
        """Look at `at`; a look that is due between `since` and then does as well."""
        if not self.up:
            return
        for time in self.due:
            if (at if since is None else since) <= time <= at:
                return
        self.due.append(at)
        self.world.at(at, self._tick)

    def notice(self, at: float) -> None:
        """Something beside this node's row (a generation, a join, a request to stop) can be seen from `at` on."""
        self.news_at = at if self.news_at is None else max(at, self.news_at)
        self.wake(at + self.world.rng.random() * POLL_S, at)

    def idle(self) -> None:
        """Plan the next look, unless one is due: polls between two changes would see nothing new and are left out. Heartbeats
        must be looked at before the time since the last look counts as blindness.
        """
        if not self.due:
            seen_at = self.agent.observer.ledger.looked_at
            blind_s = (
                (self.clock - seen_at) / self.rate
                if self.failing_since is None and seen_at is not None
                else 1.8
            )
            self.wake(self.world.now + max(POLL_S, IDLE_S - self.world.rng.random() - blind_s))

    def _tick(self) -> None:
        if not self.up or self.world.now not in self.due:
            return
        self.due.remove(self.world.now)
        if not self.paused and self.strand is None:
            self.world.look(self)

    def _record(self, event: str, node: Node, fields: Any) -> None:
        self.world.history.events.append(
            Event(self.world.now, self.number, event, node, fields, self.ticked_at)
        )
        if event == "phase_started":
            assert node.generation is not None and node.position is not None
            self.watching = self.agent.observer.row_dir(node.generation.number, node.position)
            self.world.entered(node)

    def loop(self) -> str:
        """One look of the daemon's loop (or its start), and how it went; never raises."""
        now = self.ticked_at = self.world.now
        if self.news_at is not None and self.news_at <= now and self.joined:
            self.news_at = None
            self.agent.observer.hurry()
        try:
            if not self.joined:
                self.agent.observer.prepare()
                self.agent.start(self.clock)
                self.joined = True
                return "joined"
            busy = self.agent.tick(self.offset + now * self.rate)
        except OSError as error:
            return f"error {error}"
        except Fenced as error:
            self.agent.exit = Exit(6, "left", str(error))
            return "busy"
        except Crash:
            return "crash"
        except Livelock as error:
            self.world.history.stuck.append(f"node {self.rank}: {error}")
            return "crash"
        self.failing_since = None
        return "busy" if busy else "idle"
