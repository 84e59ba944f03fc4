"""A simulated run: N nodes with the daemon's own loop, heartbeats and work, one disk, virtual time, one seed.

Faults strike for a while (scripts/lab/sim/strikes.py plans them); after that, everything must end within a bounded time.
scripts/lab/sim/invariants.py checks the history.
"""

from __future__ import annotations

from typing import NamedTuple

from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Fact, Join, Record
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.names import PULSE
from sim.disk import Disk, File, SimPath
from sim.history import Asked, History, Removed, RowPlace, Standstill, Write, row_of
from sim.process import Process
from sim.schedule import Action, Mishap, Schedule, Start
from sim.sessions import OTHERS, Session, another
from sim.settings import CommandLines
from sim.setup import LIMITS, ROOT, START_SETTINGS, Draw, Setup, program
from sim.store import After, Habits, MountClient, nothing

# the limit for each node and iteration, a hundred times the usual number; more is a livelock
EVENTS = 100_000
# After the faults stop, everything must end within this virtual time for each iteration.
SETTLE_S = 2000.0
# the virtual time between two looks for a standstill
NOTE_S = 5.0
# No row takes longer than so many programs.
WORKS = 12


class OnEntry(NamedTuple):
    """What happens `delay` after node `rank` (None: any) first enters a row."""

    rank: int | None
    iteration: int
    phase: int
    delay: float
    action: Action


class OnFact(NamedTuple):
    """What happens `delay` after node `rank` (None: any) has published "done" in a row, in generation `least` or a later one."""

    rank: int | None
    iteration: int
    phase: int
    least: int
    delay: float
    action: Action


class World(Schedule):
    """One schedule."""

    def __init__(self, seed: int, setup: Setup) -> None:
        draw = Draw(seed, setup)
        setup, settings = draw.setup, draw.settings
        super().__init__(draw, _new_history(draw))
        self.seed, self.setup, self.settings, self.rules = seed, setup, settings, draw.rules
        self.history.root = str(self.artifacts.root)
        self.history.reached |= {"a judge on some nodes"} if settings.engines else set()
        self.disk = self._make_disk()
        # what the nodes were started for
        self.sessions = [Session(0.0, settings.rl_phase, setup.iterations)]
        self.sessions_left = draw.sessions
        self.command_lines = CommandLines(seed if setup.mix else None, self.history, settings)
        self.processes: list[Start] = []
        self.clients: dict[str, MountClient] = {}
        # the host of each rank
        self.hosts = [f"host{rank}" for rank in range(setup.nodes)]
        # the ranks whose next start claims exactly one incarnation
        self.claiming: set[int] = set()
        self.awaited: list[OnEntry] = []
        self.awaited_facts: list[OnFact] = []
        # pending starts
        self.starting = 0
        # when something last happened that the nodes may wait for, and how much had happened by then
        self.moved_at, self.moves = 0.0, (0, 0, 0)
        # A row may take as long as a stale listing lasts, and a few rows are repeated.
        self.settle_s = (SETTLE_S + 30 * draw.habits.listing_s) * setup.iterations
        # when everything must have ended
        self.end_s = float("inf") if setup.mix else self.settle_s

    def _make_disk(self) -> Disk:
        draw = self.draw
        disk = Disk(
            coarse_s=draw.coarse_s,
            order=draw.order,
            encode=encode if draw.in_bytes else None,
        )
        disk.watch, disk.watch_rename = self._written, self._renamed
        disk.watch_removal, disk.watch_missed = self._removed, self._missed
        return disk

    # --- the schedule ---

    def run(self) -> History:
        """Run from the first start to the end of the last process."""
        self.artifacts.make(self.setup.iterations + 1 if self.rules.slice == "update" else 0)
        try:
            self._run()
        finally:
            for process in self.processes:
                process.up = False
                process.end_threads()
            self.artifacts.remove()
        return self.history

    def _run(self) -> None:
        if "junk" in self.setup.mix and self.rng.random() < 0.3:
            self._litter()
        for rank in range(self.setup.nodes):
            self.start(rank, self.rng.random() * self.rng.choice((0.01, 0.01, 0.01, 0.01, 0.5, 4.0)))
        if self.setup.mix:
            self.plan_faults()
            self.at(20.0 * self.setup.iterations + 10.0, self.heal)
        if not self.setup.groups:
            self._note_standstills()
        most = EVENTS * self.setup.nodes * self.setup.iterations
        while self.agenda:
            time, _, action = self.agenda.pop(0)
            if time > self.end_s:
                break
            self.now = self.disk.now = time
            action()
            if self.ending and not self.starting and self._all_ended():
                break
            if self.events > most:
                self.history.stuck.append(f"{most} events, and no end")
                break
        self._close()

    def _litter(self) -> None:
        """Put foreign and torn files into the directories."""
        for folder, name, data in (
            ("joins", "node-0000.inc-0099.json", encode(Join(0, 99, "?", 1, "?"))[:40]),
            ("joins", ".nfs0000000000a1", b""),
            ("generations", "gen-000001.json.swp", b"\0" * 64),
            ("generations", "lost+found", b""),
            ("beats", "node-0001.inc-0001.json~", b"x"),
            ("beats", "node-0000.inc-0099.json", self.rng.randbytes(32)),
            ("stops", "000001.json", b""),
            ("gen-000001/p99-somebodys", "notes", b"x"),
        ):
            self.disk.junk(ROOT / "coordination" / folder, name, data)

    def _all_ended(self) -> bool:
        """Whether the schedule is over. If all processes have ended but the run could go on, end the faults, which restarts some."""
        self.ending = False
        if any(process.up for process in self.processes):
            return False
        if not self.healed and not self.over():
            self.heal()
            return False
        if not self.sessions_left:
            return True
        self.sessions_left -= 1
        self.sessions.append(another(self.history, self.sessions[-1], self.now, self.rng))
        self.start_again()
        return False

    def start_again(self) -> None:
        """Start all nodes for the next session, half of the time with faults again."""
        session, rng = self.sessions[-1], self.rng
        self.say(f"the run is started again: {session.phases}, up to iteration {session.until}")
        self._end_faults()
        self.end_s = self.now + 2 * self.settle_s
        for rank in range(self.setup.nodes):
            self.start(rank, rng.random() * rng.choice((1.0, 1.0, 25.0)))
        if self.setup.mix and rng.random() < 0.5:
            self.healed, self.end_s = False, float("inf")
            self.plan_faults()
            self.after(30.0, self.heal)

    def plan_faults(self) -> None:
        """Plan the faults of a session."""

    def over(self) -> bool:
        """Whether the run has ended for good, so that restarting a node would change nothing."""
        codes = {ended.code for ended in self.history.ended.values()}
        return codes <= {0, 4, 5} or (self.history.stopped_at is not None and codes <= {0, 4, 5, 6})

    def heal(self) -> None:
        """End all faults: stopped processes wake up, what was damaged is restored, and enough dead nodes are restarted."""
        if self.healed:
            return
        self.end_s = self.now + self.settle_s
        self.say("all faults stop")
        self._end_faults()
        for rank in range(self.setup.nodes):
            if self.lives(rank) or not self._may_return(rank):
                continue
            lonely = not self.starting and not any(map(self.lives, range(self.setup.nodes)))
            if self.rules.on_node_failure == "wait" or lonely or self.rng.random() < 0.7:
                self.start(rank, self.rng.random() * 5)

    def _end_faults(self) -> None:
        self.healed = True
        self.mend()
        self.draw.error_rate = 0.0
        self.draw.reads.end()
        self.codes = [""] * self.setup.nodes
        self.awaited.clear()
        self.awaited_facts.clear()
        for process in self.processes:
            process.mishap = process.client.outage = None
            process.client.slow_s = 0.0
            process.resume()

    def mend(self) -> None:
        """Restore damaged records, and make everything readable again."""
        unreadable = any(client.cannot_read for client in self.clients.values())
        if self.disk.spoilt or self.artifacts.damaged or unreadable:
            self.say("what could not be read is mended")
        self.disk.spoilt.clear()
        self.artifacts.restore()
        for client in self.clients.values():
            client.cannot_read = ""

    def lives(self, rank: int) -> bool:
        """Whether the last start of a rank is up. Older starts do not count, since they will see the newer one and end; nor does a
        start that found its rank taken."""
        starts = [start for start in self.processes if start.rank == rank and (start.up or start.joined)]
        return [process.up for process in starts][-1:] == [True]

    def _may_return(self, rank: int) -> bool:
        ended = [self.history.ended[p.number] for p in self.processes if p.rank == rank and not p.up]
        return not ended or ended[-1].code not in (0, 4, 5)

    def _close(self) -> None:
        for process in self.processes:
            if process.up:
                self.history.stuck.append(f"node {process.rank} still waits ({process})")
                process.kill("the schedule is over")
        for client in self.clients.values():
            for path, count in client.misses.items():
                self.history.misses[path] = max(count, self.history.misses.get(path, 0))
        self.history.faults |= self.draw.reads.struck

    def _note_standstills(self) -> None:
        """Note that nothing has happened for so long that each node must have done its work, seen the others, and had its turn."""
        history, draw, limits = self.history, self.draw, self.rules.limits
        moves = len(history.writes), len(history.starts), len(history.ended)
        living = [process for process in self.of(None) if isinstance(process, Process)]
        unreadable = self.disk.spoilt or any(client.cannot_read for client in self.clients.values())
        if moves != self.moves or unreadable or not living or any(map(_hindered, living)):
            self.moved_at, self.moves = self.now, moves
        turns_s = limits.stagger_s * (self.setup.nodes + 2**self.rules.retries)
        seen_s = limits.dead_s + history.hidden_s + draw.reads.longest_s + turns_s
        if self.now - self.moved_at > seen_s + WORKS * max(draw.lengths):
            nodes = tuple(process.loop.node for process in living)
            history.standstills.append(Standstill(self.now, self.moved_at, nodes))
            self.moved_at = self.now
        self.after(NOTE_S, self._note_standstills)

    # --- processes ---

    def start(self, rank: int, delay: float) -> None:
        self.starting += 1
        self.after(delay, lambda: self._start(rank))

    def _start(self, rank: int) -> None:
        self.starting -= 1
        host = self.hosts[rank]
        if host not in self.clients:
            client = MountClient(self.disk, host, self.draw.habits, self.draw.reads)
            client.trouble = self._operation
            self.clients[host] = client
        process = self.new_process(rank, self.clients[host])
        if rank in self.claiming and not self.healed:
            # While it creates its join record, another start of the rank joins.
            process.mishap = Mishap("block", seconds=1.0, verb="create", inside="/joins/")
            self.hosts[rank] += "b"
            self.start(rank, 0.3)
        self.claiming.discard(rank)
        self.processes.append(process)
        self.history.starts[process.number] = (self.now, rank)
        with_code = f" with code {self.codes[rank]}" if self.codes[rank] else ""
        self.say(f"node {rank} is started on {host}{with_code}")

    def new_process(self, rank: int, client: MountClient) -> Start:
        """A new start of a node."""
        number = len(self.processes)
        stated = self.command_lines.of(rank, again=number >= self.setup.nodes)
        claims = rank in self.claiming
        return Process(self, number, rank, client, self.sessions[-1], self.codes[rank], stated, claims)

    def _operation(self, verb: str, path: str) -> After:
        return self.running.owner.operation(verb, path) if self.running is not None else nothing

    def of(self, rank: int | None) -> list[Start]:
        """The starts of a rank that are up; None: of all."""
        return [process for process in self.processes if process.up and rank in (process.rank, None)]

    # --- what others do ---

    def entered(self, node: Node) -> None:
        """Plan the actions that are bound to this row."""
        assert node.position is not None
        place = (node.position.iteration, node.position.phase)
        for item in [
            a for a in self.awaited if (a.iteration, a.phase) == place and a.rank in (node.rank, None)
        ]:
            self.awaited.remove(item)
            self.after(item.delay, item.action)

    def _written(self, path: SimPath, record: Record, file: File) -> None:
        if isinstance(record, Beat):
            self._renamed(path)
        else:
            self.history.writes.append(Write(self.now, file.host, path, record))
            if self.awaited_facts and isinstance(record, Fact) and record.status == "done":
                self._act_on(record, row_of(path))

    def _act_on(self, fact: Fact, place: RowPlace) -> None:
        """Plan the actions that are bound to this fact."""
        generation, *row = place
        for item in self.awaited_facts[:]:
            if (
                [item.iteration, item.phase] == row
                and item.rank in (fact.rank, None)
                and generation >= item.least
            ):
                self.awaited_facts.remove(item)
                self.after(item.delay, item.action)

    def _renamed(self, path: SimPath) -> None:
        """A heartbeat, or what a node says beside it."""
        pulse = PULSE.parse(path.name)
        if pulse is not None and self.running is not None:
            self.history.beats.setdefault((pulse.rank, pulse.incarnation), []).append(self.now)
            self.running.owner.beat_written(pulse)

    def _removed(self, path: str) -> None:
        if "/iter-" in path:
            self.history.removed.append(Removed(self.now, path, row_of(path)))

    def _missed(self, path: str, host: str) -> None:
        """A process has read a removed fact. A starting node with stale listings may do that; a member of the generation may not."""
        process = self.running.owner if self.running is not None else None
        if isinstance(process, Process) and process.up and process.joined:
            generation = process.loop.node.generation
            if generation is not None and generation.number == row_of(path)[0]:
                self.history.asked.append(Asked(self.now, process.rank, path))


def _hindered(process: Process) -> bool:
    """Whether something keeps a node from looking."""
    hangs = process.hung_at > process.schedule.now
    return process.paused or hangs or process.client.outage is not None or not process.joined


def _new_history(draw: Draw) -> History:
    setup, settings, habits, poll_gap_s = draw.setup, draw.settings, draw.habits, draw.intervals.poll_gap_s
    first, last = program().span(draw.rules.slice)
    return History(
        first,
        last,
        dead_s=LIMITS.dead_s,
        poll_gap_s=poll_gap_s,
        hidden_s=habits.oldest_s + habits.absence_s + poll_gap_s,
        caches=habits != Habits() or bool(draw.coarse_s),
        phases=settings.rl_phase,
        spans={phases: program().span(phases) for phases in OTHERS},
        settings={**START_SETTINGS, "num_nodes": setup.nodes, "rank_weights": [1.0] * setup.nodes},
        ahead=settings.rollout.ahead,
        in_flight=settings.rollout.in_flight,
        tasks={"train": settings.rollout.tasks, "test": settings.eval.tasks},
    )
