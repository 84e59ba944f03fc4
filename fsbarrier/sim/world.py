"""A simulated run: N nodes with the real node.loop.NodeLoop, one disk, virtual time, one seed.

Faults strike for a while; after that, everything must end within a bounded time. sim/invariants.py checks the history.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Record
from fsbarrier.protocol.state import Node, RowPart
from fsbarrier.protocol.timing import BEAT_S
from fsbarrier.sim import faults, mishaps, strikes
from fsbarrier.sim.artifacts import Artifacts
from fsbarrier.sim.disk import Disk, File, SimPath
from fsbarrier.sim.faults import StrikeOnEntry, Trouble
from fsbarrier.sim.history import Asked, History, ProcessEnd, Removed, Said, Write, row_of
from fsbarrier.sim.process import BLIND, JOINING, POLL_S, Process, usual_paces
from fsbarrier.sim.programs import SimTorchrun
from fsbarrier.sim.sessions import OTHERS, Session, another
from fsbarrier.sim.settings import CommandLines
from fsbarrier.sim.setup import ITERATIONS, START_SETTINGS, Setup, draw_rules, litter, program
from fsbarrier.sim.store import Habits, MountClient

# the limit for each node and iteration, a hundred times the usual number; more is a livelock
EVENTS = 20_000
# After the faults stop, everything must end within this virtual time for each iteration.
SETTLE_S = 900.0
# Some schedules have much staler listings, since an NFS client may cache one for a minute.
OLD_S, VERY_OLD_S = 3.0, 60.0
NEVER_S = float("inf")
Action = Callable[[], None]


class World:
    """One schedule."""

    def __init__(self, seed: int, setup: Setup) -> None:
        setup = replace(setup, iterations=setup.iterations or Random(f"iterations {seed}").choice(ITERATIONS))
        self.setup, self.rng, self.healed = setup, Random(seed), not setup.mix
        self.clocks, dice = Random(f"clocks {seed}"), Random(f"world {seed}")
        self.now = 0.0
        self.program = program()
        self.beat_s = setup.beat_s or (BEAT_S, 3.0, 4.0)[seed % 3]
        self.settings, self.rules = draw_rules(seed, setup, self.rng, dice, self.beat_s)
        self.artifacts = Artifacts()
        self._draw_disk(seed, dice)
        self.paces = usual_paces(self.settings, self.beat_s, self.rules.limits.dead_s, setup.outage_s)
        # what runs in several nodes at once, by its address and the folder that it writes
        self.meetings: dict[tuple[str, str, str], SimTorchrun] = {}
        self.copies_weights = Random(f"weights {seed}").random() < 0.3
        # the number of a start whose host can run no program
        unfit = Random(f"unfit {seed}")
        self.unfit = (
            unfit.randrange(2 * setup.nodes) if "program" in setup.mix and unfit.random() < 0.05 else -1
        )
        # what the nodes were started for, and how often they will be again after the run has ended
        self.sessions = [Session(0.0, self.settings.rl_phase, setup.iterations)]
        self.later = Random(f"later {seed}")
        whole = self.settings.rollout_split is None
        self.sessions_left = int(whole and bool(setup.mix) and self.later.random() < 0.12)
        self.command_lines = CommandLines(seed, self.history, self.settings)
        self.processes: list[Process] = []
        self.clients: dict[str, tuple[MountClient, Trouble]] = {}
        # the host of each rank
        self.hosts = [f"host{rank}" for rank in range(setup.nodes)]
        # the code digest of each rank's next start
        self.codes = [""] * setup.nodes
        self._draw_faults(seed, dice)
        # pending starts
        self.starting = 0
        # the ranks whose next start claims exactly one incarnation
        self.claiming: set[int] = set()
        self.ending = False
        # A row may take as long as a stale listing lasts, and a few rows are repeated.
        self.settle_s = (SETTLE_S + 30 * self.habits.listing_s) * setup.iterations
        # when everything must have ended
        self.end_s = NEVER_S if setup.mix else self.settle_s
        # Sorted by time. It is so short that a heap would not be faster.
        self._agenda: list[tuple[float, int, Action]] = []
        self._order = 0

    def _draw_disk(self, seed: int, dice: Random) -> None:
        """Draw the shared directory and the staleness of its mounts."""
        rng, setup, mix = self.rng, self.setup, self.setup.mix
        drawn, coarse = faults.draw_habits(rng, mix)
        if drawn.listing_s == OLD_S and Random(f"listings {seed}").random() < 0.2:
            drawn = replace(drawn, listing_s=VERY_OLD_S)
        self.habits = setup.habits or drawn
        in_bytes = encode if dice.random() < 0.15 else None
        exclusive, order = "winners" not in mix, rng.randrange(3)
        self.disk = Disk(coarse_s=coarse, order=order, exclusive=exclusive, encode=in_bytes)
        self.disk.watch = self._written
        self.disk.watch_removal, self.disk.watch_missed = self._removed, self._missed
        blind_s = BLIND * self.beat_s
        hidden_s = self.habits.oldest_s + self.habits.absence_s + blind_s
        caches = self.habits != Habits() or bool(coarse)
        first, last = self.program.span(self.rules.slice)
        self.history = History(
            first, last, setup.limits.dead_s, blind_s, hidden_s, caches, self.rules.longest
        )
        size = {"num_nodes": setup.nodes, "rank_weights": [1.0] * setup.nodes}
        self.history.phases, self.history.root = self.settings.rl_phase, str(self.artifacts.root)
        self.history.spans = {phases: self.program.span(phases) for phases in OTHERS}
        self.history.settings = {**START_SETTINGS, **size}
        self.history.tasks = {"train": self.settings.rollout.tasks, "test": self.settings.eval.tasks}

    def _draw_faults(self, seed: int, dice: Random) -> None:
        """Draw the faults."""
        rng, setup, mix = self.rng, self.setup, self.setup.mix
        self.strikes = faults.draw_strikes(rng, mix, setup.nodes, setup.iterations)
        self.announcing = Random(f"announcing {seed}")
        self.beating = Random(f"beating {seed}")
        errors = [how for how, kind in (("lost", "lost"), ("error", "errors")) if kind in mix]
        # what happens to some heartbeats; in most schedules nothing
        self.beat_mishaps = errors if self.beating.random() < 0.25 else []
        self.mishap_rate = rng.choice((0.0, 0.0, 0.01, 0.05)) if mix else 0.0
        self.garbling = faults.Garbling(seed, mix, self.history.faults)
        self.stale_handles = faults.StaleHandles(seed, mix, self.history.faults)
        # For example nodes in containers of one host, which share the first one's mount.
        self.one_mount = "shared" in mix and Random(f"shared {seed}").random() < 0.15
        self.failure_rate = rng.choice((0.0, 0.0, 0.0, 0.01, 0.08)) if "program" in mix else 0.0
        # A node where no program works, before all faults stop.
        broken = Random(f"broken {seed}")
        self.broken_node = (
            broken.randrange(setup.nodes) if "program" in mix and broken.random() < 0.1 else None
        )
        self.lengths = setup.lengths or rng.choice(
            ((0.02, 0.05, 0.2), (0.02, 0.05, 0.2), (0.1, 0.2, 1.0), (0.02, 0.05, 0.1, 0.1, 0.1, 9.0))
        )
        strikes.plan_an_old_view(self, seed)
        # how often the nodes of a session will still not fit together
        self.refusals = int("program" in mix and Random(f"refused {seed}").random() < 0.03)
        # the iteration to which an operator recovers the run in the end; None: nobody does
        back = "unreadable" in mix and dice.random() < 0.1
        self.taken_back_to = dice.randint(1, setup.iterations) if back else None
        # verifying a checkpoint takes as long as a program
        self.slow_checks = bool(mix) and dice.random() < 0.5
        # (rank, phase) -> how often its program will still fail
        self.failures: dict[tuple[int, str], int] = {}
        self.awaited = [
            StrikeOnEntry(s.rank, s.iteration, s.phase, s.delay, partial(strikes.strike, self, s))
            for s in self.strikes
            if s.iteration
        ]
        strikes.plan_a_stranger(self, seed)

    # --- time ---

    def at(self, time: float, action: Action) -> None:
        self._order += 1
        insort(self._agenda, (time, self._order, action))

    def after(self, delay: float, action: Action) -> None:
        self._order += 1
        insort(self._agenda, (self.now + delay, self._order, action))

    def short(self) -> float:
        return self.rng.random() * 0.02

    def length(self) -> float:
        """The duration of a program."""
        return self.rng.choice(self.lengths) * (0.5 + self.rng.random())

    # --- the schedule ---

    def run(self) -> History:
        """Run from the first start to the end of the last process."""
        self.artifacts.make(self.setup.iterations + 1 if self.rules.slice == "update" else 0)
        try:
            self._run()
        finally:
            self.artifacts.remove()
        return self.history

    def _run(self) -> None:
        self._begin()
        most, agenda, disk = EVENTS * self.setup.nodes * self.setup.iterations, self._agenda, self.disk
        while agenda:
            time, order, action = agenda.pop(0)
            if time > self.end_s:
                break
            self.now = disk.now = time
            action()
            if self.ending and not self.starting and self._all_ended():
                break
            if order > most:
                self.history.stuck.append(f"{most} events, and no end")
                break
        self._close()

    def _all_ended(self) -> bool:
        """Whether the schedule is over. If all processes have ended but the run could go on, end the faults, which restarts some."""
        self.ending = False
        if any(process.up for process in self.processes):
            return False
        if not self.healed and not self.over():
            strikes.heal(self)
            return False
        if not self.sessions_left:
            return True
        self.sessions_left -= 1
        self.sessions.append(another(self))
        strikes.start_again(self)
        return False

    def _begin(self) -> None:
        if "junk" in self.setup.mix and self.rng.random() < 0.3:
            litter(self.disk, self.rng)
        for rank in range(self.setup.nodes):
            self.start(rank, self.rng.random() * self.rng.choice((0.01, 0.01, 0.01, 0.01, 0.5, 4.0)))
        for strike in self.strikes:
            if not strike.iteration:
                self.at(strike.time, partial(strikes.strike, self, strike))
        self.at(20.0 * self.setup.iterations + 10.0, partial(strikes.heal, self))

    def entered(self, node: Node) -> None:
        """A node has entered a row: plan the actions that are bound to it."""
        assert node.position is not None
        place = (node.position.iteration, node.position.phase)
        for item in [
            a for a in self.awaited if (a.iteration, a.phase) == place and a.rank in (node.rank, None)
        ]:
            self.awaited.remove(item)
            self.after(item.delay, item.action)

    def over(self) -> bool:
        """Whether the run has ended for good, so that restarting a node would change nothing."""
        codes = {ended.code for ended in self.history.ended.values()}
        return codes <= {0, 4, 5} or (self.history.stopped_at is not None and codes <= {0, 4, 5, 6})

    def _close(self) -> None:
        for process in self.processes:
            if process.up:
                node = process.loop.node if process.joined else None
                where = (
                    f"{node.stage.value} {node.position} {node.part.value}" if node else "before its start"
                )
                self.history.stuck.append(f"node {process.rank} still waits ({where})")
                self.kill(process, "the schedule is over")
        for path in self.disk.files:
            if "/iter-" in path:
                generation = row_of(path)[0]
                self.history.left[generation] = self.history.left.get(generation, 0) + 1
        for client, _ in self.clients.values():
            for path, count in client.misses.items():
                self.history.misses[path] = max(count, self.history.misses.get(path, 0))
            for verb, count in client.ops.items():
                self.history.operations[verb] = self.history.operations.get(verb, 0) + count

    # --- processes ---

    def start(self, rank: int, delay: float) -> None:
        """Start a node after `delay` seconds."""
        self.starting += 1
        self.after(delay, lambda: self._start(rank))

    def _start(self, rank: int) -> None:
        self.starting -= 1
        host = self.hosts[rank]
        if host not in self.clients:
            first = next(iter(self.clients.values()), None) if self.one_mount else None
            client = MountClient(self.disk, host, self.habits, first[0] if first else None)
            client.garbled = self.garbling if self.garbling.rate else None
            client.stale_handle = self.stale_handles if self.stale_handles.rate else None
            if first:
                self.history.faults.add("shared")
            self.clients[host] = (
                client,
                Trouble(client, lambda seconds, stopped: self._block(host, seconds, stopped)),
            )
        process = self.new_process(rank, *self.clients[host])
        process.claims = rank in self.claiming
        self.claiming.discard(rank)
        if process.claims:
            strikes.race_for_a_rank(self, process)
        self.processes.append(process)
        self.history.starts[process.number] = (self.now, rank)
        with_code = f" with code {self.codes[rank]}" if self.codes[rank] else ""
        self.say(f"node {rank} is started on {host}{with_code}")
        process.wake(self.now)

    def new_process(self, rank: int, client: MountClient, trouble: Trouble) -> Process:
        """A new start of a node."""
        return Process(self, len(self.processes), rank, client, trouble)

    def _block(self, host: str, seconds: float, stopped: bool) -> None:
        """Block a process in the middle of an operation."""
        process = next(p for p in self.processes if p.held_look is not None and p.held_look.inside)
        look = process.held_look
        assert look is not None
        if stopped:
            self.pause(process, seconds, frozen=True)
            process.deferred.append(process.go_on)
        else:
            self.say(f"node {process.rank}: an operation hangs for {seconds:g} s")
            self.after(seconds, process.go_on)
        look.park()

    def finish(self, process: Process) -> None:
        """End a process gracefully: cancel its work, then write its last heartbeat."""
        ended = process.loop.exit
        assert ended is not None
        process.end_work()
        process.put_beat()
        if process.said != ended.state and process.trouble.outage is None and not self.beat_mishaps:
            self.history.stuck.append(
                f"node {process.rank} ended, and its last heartbeat says {process.said!r}"
            )
        self.end(process, ended.code, f"{ended.state}: {ended.reason}")

    def end(self, process: Process, code: int, why: str) -> None:
        process.up = False
        self.ending = True
        self.history.ended[process.number] = ProcessEnd(self.now, process.rank, code, why)
        self.say(f"node {process.rank} ends with code {code}: {why}")
        if code == 2:
            self.codes[process.rank] = ""
        if not self.healed and code in (2, 3, 143) and self.rng.random() < 0.6:
            self.start(process.rank, 1 + self.rng.random() * 20)

    def kill(self, process: Process, why: str, *, host: bool = False) -> None:
        """Kill a process and its programs; with `host`, everything on its host."""
        if not process.up:
            return
        process.up = process.paused = False
        process.host_of_work.kill()
        if process.held_look is not None:
            process.held_look.kill()
        process.trouble.rest()
        self.ending = True
        self.history.ended[process.number] = ProcessEnd(self.now, process.rank, None, why)
        self.say(f"node {process.rank} is dead: {why}")
        mishaps.leave_epitaph(process, host=host)

    def pause(self, process: Process, seconds: float, *, frozen: bool) -> None:
        if process.up and not process.paused:
            process.paused, process.frozen = True, frozen
            self.say(f"node {process.rank} is stopped for {seconds:g} s{' with its host' if frozen else ''}")
            self.after(seconds, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        if process.up and process.paused:
            process.paused, process.news_at, process.woke_at = False, self.now, self.now
            self.say(f"node {process.rank} wakes up")
            waiting, process.deferred = process.deferred, []
            for action in waiting:
                self.after(self.short() / 10, action)
            process.wake(self.now + self.short())

    # --- what others notice ---

    def _written(self, path: SimPath, record: Record, file: File) -> None:
        self.history.writes.append(Write(self.now, file.host, path, record))
        if "/iter-" in path:
            self._fact_written(path, file)
            return
        for process in self.processes:
            if process.up and not process.paused and process.host != file.host:
                process.notice(process.client.visible_at(file.directory))

    def _removed(self, path: str) -> None:
        if "/iter-" in path:
            self.history.removed.append(Removed(self.now, path, row_of(path)))

    def _missed(self, path: str, host: str) -> None:
        """A process has read a removed fact. A starting node with stale listings may do that; a member of the generation may not."""
        for process in self.processes:
            generation = process.loop.node.generation if process.up and process.joined else None
            if process.host == host and generation is not None and generation.number == row_of(path)[0]:
                self.history.asked.append(Asked(self.now, process.rank, path))

    def _fact_written(self, path: SimPath, file: File) -> None:
        """Wake the processes that wait in this fact's row."""
        directory, host = file.directory, file.host
        for process in self.processes:
            if process.watching is not directory or process.host == host or not process.up or process.paused:
                continue
            node = process.loop.node
            if node.part not in (RowPart.ANNOUNCED, RowPart.GATHER) and path.endswith(".done"):
                continue
            size = 1 if node.generation is None else len(node.generation.members)
            if len(directory.names) >= size or self.rng.random() * size < 0.6:
                visible = process.client.visible_at(directory)
                process.wake(visible + self.rng.random() * 0.05, visible)

    def first_beat(self, file: File) -> None:
        """Wake the joining processes, since a heartbeat shows them who else is there."""
        for process in self.processes:
            if process.joined and process.loop.node.stage is JOINING and process.host != file.host:
                seen_at = process.client.visible_at(file.directory)
                process.wake(seen_at + self.rng.random() * POLL_S, seen_at)

    def say(self, text: str, mark: str = "!") -> None:
        self.history.said.append(Said(self.now, text, len(self.history.events), mark))
