"""What waiting costs the shared directory, in virtual time: real loops and real files, each operation counted."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from core_builders import generation
from test_collection import PING

from fsbarrier.group.collective import CollectiveWork
from fsbarrier.node.daemon import make_paces
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.observer import Observer
from fsbarrier.node.polling import FIRST_PAUSE_S, Polling
from fsbarrier.protocol.facts import Fact, Join, Position, R, Record
from fsbarrier.protocol.state import Part, Rules
from fsbarrier.retry import Backoff
from fsbarrier.rundir.names import fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.settings.sections import Settings

#: how many files each verb opens or names
COST = {"make_dir": 1, "names": 1, "read": 1, "put": 2, "mark": 1, "create": 3, "remove": 1}


class CountingStore(PosixStore):
    """Counts operations by verb and the folder that they are about."""

    def __init__(self) -> None:
        self.done: Counter[tuple[str, str]] = Counter()

    def _count(self, verb: str, folder: Path) -> None:
        self.done[verb, folder.name] += COST[verb]

    def make_dir(self, path: Path, *, durable: bool = False) -> None:
        self._count("make_dir", path)
        super().make_dir(path, durable=durable)

    def names(self, directory: Path) -> list[str]:
        self._count("names", directory)
        return super().names(directory)

    def read(self, path: Path, cls: type[R]) -> R | None:
        self._count("read", path.parent)
        return super().read(path, cls)

    def put(self, path: Path, record: Record) -> None:
        self._count("put", path.parent)
        super().put(path, record)

    def mark(self, path: Path, record: Record) -> None:
        self._count("mark", path.parent)
        super().mark(path, record)

    def create(self, path: Path, record: Record) -> bool:
        self._count("create", path.parent)
        return super().create(path, record)

    def remove(self, path: Path) -> None:
        self._count("remove", path.parent)
        super().remove(path)


class Waiting:
    """One node of a run whose other members live and do not come to its row, at its own pace, in virtual time."""

    def __init__(self, folder: Path, nodes: int, rank: int) -> None:
        self.paths, self.store, self.others = RunPaths(folder), CountingStore(), PosixStore()
        self.ranks = [other for other in range(nodes) if other != rank]
        self.now = self.beaten_at = 0.0
        rules = Rules(PING.table, nodes)
        observer = Observer(self.store, self.paths, PING.table, make_paces(Settings(num_nodes=nodes)))
        join = Join(rank, 0, f"host{rank}", rank, "boot")
        self.agent = NodeLoop(
            self.store, observer, rules, CollectiveWork(), join, lambda event, node, fields: None
        )
        observer.prepare()
        self.agents = {
            other: NodeLoop(
                self.others,
                Observer(self.others, self.paths, PING.table),
                rules,
                CollectiveWork(),
                Join(other, 0, f"host{other}", other, "boot"),
                lambda event, node, fields: None,
            )
            for other in self.ranks
        }
        for agent in self.agents.values():
            agent.start(0.0)
        self.beat()
        self.agent.start(0.0)
        self.others.create(self.paths.generation(1), generation(1, tuple(range(nodes)), (1, 0)))
        self.polling = Polling(self.agent, threading.Event())
        self.pauses = Backoff(FIRST_PAUSE_S, 0.05)
        #: the times of the looks
        self.looks: list[float] = []

    def beat(self) -> None:
        for agent in self.agents.values():
            beat = agent.beat()
            self.others.put(self.paths.beat(beat.rank, 1), beat)

    def until(self, end: float) -> None:
        while self.now < end:
            if self.now - self.beaten_at >= 2.0:
                self.beaten_at = self.now
                self.beat()
            busy = self.polling.look(self.now)
            self.looks.append(self.now)
            self.now += self.polling.next_pause(self.pauses, busy=busy)

    def finish_row(self, iteration: int, phase: int) -> None:
        """All the others publish that they are done with a row."""
        row = self.paths.phase(1, phase, PING.table.rows[phase].name)
        self.others.make_dir(row)
        for rank in self.ranks:
            self.others.put(row / fact_name(iteration, rank), Fact(rank, 1, "done"))


def test_a_long_wait_costs_little_and_ends_in_time(tmp_path: Path) -> None:
    node = Waiting(tmp_path, 3, rank=1)
    node.until(60.0)
    assert node.agent.node.part is Part.ANNOUNCED
    node.store.done.clear()
    node.until(180.0)
    # 4 looks a second less its own heartbeat, which a thread of the daemon writes: one open in two seconds.
    assert sum(node.store.done.values()) <= 4.5 * 120.0
    # It came to its row at once, so that each look comes when the wait has become 1 % longer, or a beat later.
    for before, after in zip(node.looks, node.looks[1:], strict=False):
        assert after - before <= max(0.05, 0.01 * after) + 1e-9
    assert all(after - before <= 2.0 for before, after in zip(node.looks, node.looks[1:], strict=False))


def test_a_short_wait_is_looked_at_as_often_as_ever(tmp_path: Path) -> None:
    node = Waiting(tmp_path, 3, rank=1)
    node.until(1.0)
    assert len(node.looks) >= 25
    node.finish_row(1, 0)
    node.until(1.2)
    assert node.agent.node.position == Position(1, 1)
    assert len([look for look in node.looks if look >= 1.0]) >= 10, "fast again, since a new wait has begun"


@pytest.mark.parametrize(("rank", "most"), [(0, 4.5), (1, 3.2)])
def test_a_barrier_costs_four_operations_at_most(tmp_path: Path, rank: int, most: float) -> None:
    """Beside the listings by which it waits. Of the leader's 4.5: create, link and unlink its fact, remove its old one, and two for an
    `open-` folder an iteration."""
    node = Waiting(tmp_path, 3, rank)
    phases = len(PING.table.rows)
    for number in range(4 * phases):
        if number == phases:
            node.store.done.clear()
        node.finish_row(1 + number // phases, number % phases)
        node.until(node.now + 0.01)
    assert node.agent.node.position == Position(5, 0)
    verbs = Counter[str]()
    for (verb, folder), count in node.store.done.items():
        verbs[verb] += count if folder.startswith(("p", "open-")) else 0
    del verbs["names"]
    assert sum(verbs.values()) / (3 * phases) <= most, verbs
