"""What waiting costs the shared directory: real loops on the simulator's disk, in virtual time, each operation counted."""

from __future__ import annotations

import threading
from collections import Counter
from typing import cast

import pytest
from core_builders import generation
from node_loops import PING
from sim.disk import Disk, SimPath
from sim.setup import PATHS
from sim.store import Habits, MountClient

from fsbarrier.coordination import polling
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.poll_intervals import size_factor
from fsbarrier.coordination.polling import FIRST_PAUSE_S, POLL_MAX_S, LookWaits, Pace
from fsbarrier.coordination.run_rules import poll_intervals
from fsbarrier.group.collective import CollectiveWork
from fsbarrier.protocol.facts import Beat, Fact, Join, Position, Pulse, R, Record
from fsbarrier.protocol.membership import BEAT_S, DEAD_S
from fsbarrier.protocol.state import RowPart, Rules
from fsbarrier.rundir.names import fact_name
from fsbarrier.rundir.record_store import Store
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.store.retry import Backoff

#: how many files each verb opens or names
COST = {
    "make_dir": 1,
    "names": 1,
    "read": 1,
    "put": 2,
    "mark": 1,
    "create": 3,
    "rename": 1,
    "remove": 1,
    "remove_dir": 1,
}


class CountingClient(MountClient):
    """Counts operations by verb and the folder that they are about."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk, "here", Habits())
        self.counted: Counter[tuple[str, str]] = Counter()

    def _count(self, verb: str, folder: object) -> None:
        self.counted[verb, str(folder).rsplit("/", 1)[-1]] += COST[verb]

    def make_dir(self, path: SimPath) -> None:
        self._count("make_dir", path)
        super().make_dir(path)

    def remove_dir(self, path: SimPath) -> None:
        self._count("remove_dir", path)
        super().remove_dir(path)

    def names(self, directory: SimPath) -> list[str]:
        self._count("names", directory)
        return super().names(directory)

    def read(self, path: SimPath, cls: type[R]) -> R | None:
        self._count("read", str(path).rsplit("/", 1)[0])
        return super().read(path, cls)

    def put(self, path: SimPath, record: Record, *, durable: bool = False) -> None:
        self._count("put", str(path).rsplit("/", 1)[0])
        super().put(path, record, durable=durable)

    def mark(self, path: SimPath, record: Record) -> None:
        self._count("mark", str(path).rsplit("/", 1)[0])
        super().mark(path, record)

    def create(self, path: SimPath, record: Record) -> bool:
        self._count("create", str(path).rsplit("/", 1)[0])
        return super().create(path, record)

    def remove(self, path: SimPath) -> None:
        self._count("remove", str(path).rsplit("/", 1)[0])
        super().remove(path)


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network mount, where polling is all there is."""
    monkeypatch.setattr(polling, "_is_local", lambda path: False)


class WaitingNode:
    """One node of a run whose other members live, in virtual time; they come to a row when the test says so."""

    def __init__(self, nodes: int, rank: int) -> None:
        self.disk = Disk()
        self.client, self.others = CountingClient(self.disk), MountClient(self.disk, "there", Habits())
        self.ranks = [other for other in range(nodes) if other != rank]
        self.now, self.counter, self.beats_from = 0.0, 0, 0.0
        typed = [ChosenValue("num_nodes", nodes, "here")]
        crowd = max(1.0, nodes / 160)
        timing = {"coordination.beat_s": crowd * BEAT_S, "coordination.dead_s": crowd * DEAD_S}
        self.settings = resolve(typed, timing, cross_checks=False)
        self.beat_s = self.settings.coordination.beat_s
        store = cast(Store, self.client)
        observer = Observer(store, PATHS, PING, poll_intervals(self.settings))
        join = Join(rank, 0, f"host{rank}", rank, "boot")
        rules = Rules(PING, nodes)
        self.loop = NodeLoop(store, observer, rules, CollectiveWork(), join, lambda event, node, fields: None)
        observer.prepare()
        for other in self.ranks:
            there = Join(other, 1, f"host{other}", other, "boot")
            self.others.create(cast(SimPath, PATHS.join(other, 1)), there)
        self.beat()
        self.loop.start(0.0)
        self.others.create(cast(SimPath, PATHS.generation(1)), generation(1, tuple(range(nodes)), (1, 0)))
        self.pace = Pace(self.loop)
        factor = size_factor(nodes)
        self.pauses = Backoff(FIRST_PAUSE_S * factor, POLL_MAX_S * factor)
        #: the times of the looks
        self.looks: list[float] = []

    def beat(self) -> None:
        self.counter += 1
        for rank in self.ranks:
            pulses = [Pulse(rank, 1, self.counter - ago, "running", 1) for ago in (1, 0)]
            old, new = (cast(SimPath, PATHS.pulse(pulse)) for pulse in pulses)
            if not self.others.rename(old, new):
                self.others.mark(new, Beat(rank, 1, self.counter, f"host{rank}", rank, "running", 1))

    def until(self, end: float) -> None:
        while self.now < end:
            if self.now >= self.beats_from + self.beat_s:
                self.beats_from = self.now
                self.beat()
            self.disk.now = self.now
            again = self.loop.tick(self.now)
            self.looks.append(self.now)
            self.now += self.pace.next_pause(self.now, self.pauses, again)

    def opens_a_second(self, begin: float, end: float) -> float:
        """How many files this node opens or names in a second of a wait, its own heartbeat included."""
        self.until(begin)
        self.client.counted.clear()
        self.until(end)
        return self.client.counted.total() / (end - begin) + (COST["put"] + COST["rename"]) / self.beat_s

    def finish_row(self, iteration: int, phase: int) -> None:
        """All the others publish that they are done with a row."""
        row = cast(SimPath, PATHS.phase(1, phase, PING.rows[phase].name))
        self.others.make_dir(row)
        for rank in self.ranks:
            self.others.put(row / fact_name(iteration, rank), Fact(rank, 1, "done"))


def test_a_long_wait_costs_little_and_ends_in_time() -> None:
    node = WaitingNode(3, rank=1)
    assert node.opens_a_second(60.0, 180.0) <= 5.0
    assert node.loop.node.part is RowPart.ANNOUNCED
    # It came to its row at once, so that each look comes when the wait has become 1 % longer, or a beat later.
    for before, after in zip(node.looks, node.looks[1:], strict=False):
        assert after - before <= min(max(0.05, 0.01 * after), 2.0) + 1e-9


def test_a_thousand_nodes_fit_a_server_of_1500_operations_a_second() -> None:
    """In a long phase, with room for the users' own work."""
    nodes = [WaitingNode(1000, rank) for rank in (0, 500)]
    watcher, other = (node.opens_a_second(300.0, 360.0) for node in nodes)
    assert 4 * watcher + 996 * other <= 1100.0
    watcher, other = (node.opens_a_second(600.0, 660.0) for node in nodes)
    assert 4 * watcher + 996 * other <= 850.0
    assert watcher <= 1.0 and other <= 1.0


@pytest.mark.parametrize(("rank", "most"), [(0, 3.1), (1, 3.0)])
@pytest.mark.parametrize("nodes", [3, 40])
def test_a_barrier_costs_four_operations(nodes: int, rank: int, most: float) -> None:
    """Beside the listings by which it waits. The leader's: create, link and unlink its fact."""
    node, phases = WaitingNode(nodes, rank), len(PING.rows)
    for number in range(4 * phases):
        if number == phases:
            node.client.counted.clear()
        node.finish_row(1 + number // phases, number % phases)
        # Less than it takes until a fact is published again.
        node.until(node.now + 0.4)
    assert node.loop.node.position == Position(5, 0)
    rows = Counter(
        {key: count for key, count in node.client.counted.items() if key[1].startswith(("p", "iter-"))}
    )
    needed = sum(count for (verb, _), count in rows.items() if verb != "names")
    assert needed / (3 * phases) <= most, rows


def test_a_signal_ends_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler only leaves a note, for setting the event may never return; so the pause looks for the note."""
    node, waits = WaitingNode(3, rank=1), list[float]()
    wake = threading.Event()
    monkeypatch.setattr(wake, "wait", lambda timeout: bool(waits.append(timeout)))
    LookWaits(node.loop, wake).wait(60.0, ended=lambda: len(waits) == 3)
    assert len(waits) == 3 and max(waits) <= 0.1
