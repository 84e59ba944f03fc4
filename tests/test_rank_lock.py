"""One daemon a rank: a second one is refused before it disturbs the first, and a dead one is in nobody's way."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
from cluster import Cluster

from fsbarrier.coordination.ranks import hold_rank
from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Beat
from fsbarrier.protocol.membership import GONE, epitaph
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.heartbeats import beats_of_newest_starts
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.resolve import resolve
from fsbarrier.store import reading
from fsbarrier.store.identity import host_name

FOREVER_S = 250.0


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run; its nodes see a temporary directory of their own, as in a container."""
    in_container(monkeypatch, tmp_path / "one")
    settings = resolve((), {"program": "ping"}, cross_checks=False)
    return runrecord.publish(runrecord.new(tmp_path / "run", settings, tasks={}, model=None))


def in_container(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


def beat(record: RunRecord, incarnation: int, counter: int, state: str = "running") -> None:
    PosixStore().make_dir(record.paths.status)
    written = Beat(2, incarnation, counter, host_name(), 1, state)
    PosixStore().put(record.paths.beat(2, incarnation), written)


def test_a_daemon_in_another_container_of_this_host_is_left_alone(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_rank(record.log_path, 2, FOREVER_S):
        ended = threading.Event()

        def beating() -> None:
            counter = 0
            while not ended.wait(0.01):
                beat(record, 1, counter := counter + 1)

        beat(record, 1, 0)
        thread = threading.Thread(target=beating)
        thread.start()
        in_container(monkeypatch, tmp_path / "two")
        try:
            with pytest.raises(UsageError, match=rf"already running on {host_name()}, process 1"):
                hold_rank(record.log_path, 2, FOREVER_S).__enter__()
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("older", [None, "left"])
def test_a_heartbeat_that_is_met_in_its_replacement_is_watched(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, older: str | None
) -> None:
    """It cannot be read in that moment, and belongs to a node that lives, whatever an older start of the rank said last."""
    if older is not None:
        beat(record, 3, 9, older)
    beat(record, 4, 1)
    path, ended, half, read = record.paths.beat(2, 4), threading.Event(), [True, True], reading.read_bytes

    def beating() -> None:
        counter = 1
        while not ended.wait(0.01):
            beat(record, 4, counter := counter + 1)

    def read_half(found: Path, most: int) -> bytes:
        data = read(found, most)
        return data[:-5] if found == path and half and half.pop() else data

    monkeypatch.setattr(reading, "read_bytes", read_half)
    thread = threading.Thread(target=beating)
    thread.start()
    try:
        with pytest.raises(UsageError, match="already running on"):
            hold_rank(record.log_path, 2, FOREVER_S).__enter__()
    finally:
        ended.set()
        thread.join()


def test_a_killed_node_starts_again_at_once(tmp_path: Path) -> None:
    """Its epitaph says that it is dead: it waits for no time-out, however long that is."""
    flags = ("coordination.dead_s=251",)
    with Cluster(tmp_path, 1, *flags, program="ping") as cluster:
        cluster.start()
        cluster.in_phase(0, 1)
        cluster.kill(0)
        cluster.start()
        cluster.wait_for(lambda e: e["event"] == "node_joined" and e["incarnation"] == 2)


def test_the_epitaph_of_an_earlier_start_proves_nothing(record: RunRecord) -> None:
    for incarnation in (3, 4):
        beat(record, incarnation, 9)
    PosixStore().make_dir(record.paths.beats)
    for incarnation, proven in ((3, False), (4, True)):
        last = Beat(2, incarnation, 9, host_name(), 1, "running")
        PosixStore().mark(record.paths.pulse(epitaph(last)), last)
        watched = beats_of_newest_starts(record.log_path, 2)[2]
        assert watched is not None and (watched.state in GONE) == proven
