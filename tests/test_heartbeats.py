"""Heartbeats as others read them: of each rank its newest start's, and nothing that is torn, foreign or under another's name."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from fsbarrier.group.collective import CollectiveWork
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.observer import Observer
from fsbarrier.node.paces import Paces
from fsbarrier.program import Phase, Program, Value
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Join, Record
from fsbarrier.protocol.state import Rules
from fsbarrier.rundir.heartbeats import HeartbeatReader, live_nodes, read_beats
from fsbarrier.rundir.names import StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore


def beat(rank: int, incarnation: int, counter: int = 1, state: str = "running") -> Beat:
    return Beat(rank, incarnation, counter, "host", 1, state)


def written(root: Path, *beats: Beat) -> RunPaths:
    paths, store = RunPaths(root), PosixStore()
    store.make_dir(paths.beats)
    for one in beats:
        store.put(paths.beat(one.rank, one.incarnation), one)
    return paths


def test_of_each_rank_the_newest_start_that_can_be_read(tmp_path: Path) -> None:
    paths = written(tmp_path, beat(0, 1), beat(0, 2), beat(1, 1))
    reader = HeartbeatReader(PosixStore(), paths.beats)
    assert dict(reader.read()) == {StartName(0, 2): beat(0, 2), StartName(1, 1): beat(1, 1)}
    paths.beat(0, 3).write_bytes(encode(beat(0, 3))[:-5])
    paths.beat(2, 1).write_bytes(encode(beat(7, 1)))
    (paths.beats / "node-0001.inc-0002.json~").write_bytes(encode(beat(1, 2)))
    assert dict(reader.read()) == {
        StartName(0, 3): beat(0, 2),
        StartName(1, 1): beat(1, 1),
        StartName(2, 1): None,
    }
    assert read_beats(tmp_path) == {0: beat(0, 2), 1: beat(1, 1)}
    assert read_beats(tmp_path, 1) == {1: beat(1, 1)} and read_beats(tmp_path, 2) == {}


def test_what_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    paths = written(tmp_path, beat(0, 1), beat(0, 2), beat(1, 1))
    reader = HeartbeatReader(PosixStore(), paths.beats)
    assert [start for start, _ in reader.read(lambda newest: newest.incarnation > 1)] == [StartName(0, 2)]
    paths.beat(0, 2).unlink()
    assert dict(reader.read())[StartName(0, 1)] == beat(0, 1)


def test_a_node_that_does_not_beat_is_not_alive(tmp_path: Path) -> None:
    written(tmp_path, beat(0, 1), beat(1, 1, state="finished"))
    assert live_nodes(tmp_path, 0.2) == [] and live_nodes(tmp_path / "nowhere", 0.2) == []


class FullDisk(PosixStore):
    """A shared directory in which nothing can be written while `full`."""

    full = False

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(path, record, durable=durable)

    def create(self, path: Path, record: Record) -> bool:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path, record)


@pytest.mark.parametrize("full_s, lost", [(60, False), (200, True)])
def test_whoever_cannot_write_a_heartbeat_takes_nobody_for_dead(
    tmp_path: Path, full_s: int, lost: bool
) -> None:
    """A shared disk is full for a while: the first node that can write again must not go on without the others. But each wait ends."""
    paths, store, events = RunPaths(tmp_path), FullDisk(), list[str]()
    rules = Rules(Program("one", (Phase(0, "work", each=lambda context: Value({})),)), 2)

    def start(rank: int) -> NodeLoop:
        observer = Observer(store, paths, rules.table, Paces(0.0, 0.0))
        join = Join(rank, 0, f"host{rank}", rank, "boot", until=1)
        loop = NodeLoop(
            store, observer, rules, CollectiveWork(), join, lambda event, node, fields: events.append(event)
        )
        observer.prepare()
        loop.start(0.0)
        return loop

    loops = [start(0), start(1)]
    for second in range(10 + full_s + 20):
        store.full = 10 <= second < 10 + full_s
        for loop in loops:
            loop.write_beat(loop.beat(), store, float(second))
            with contextlib.suppress(OSError):
                loop.tick(float(second))
    assert ("node_lost" in events) == lost
    assert (tmp_path / "coordination" / "generations" / "gen-000002.json").exists() == lost
