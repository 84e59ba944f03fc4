"""Heartbeats as others read them: of each rank its newest start's, and nothing that is torn, foreign or under another's name."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat
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
