"""What a daemon's journal has of a row: how its time is told, once, and what is left out because another line has it."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from core_builders import MERGE, OPEN, ROLL_OUT, RULES, at_row

from fsbarrier.protocol.state import Node
from fsbarrier.run import event_log, tracking
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import OWN
from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.settings.resolve import resolve


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Log:
    """An event log whose clock the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.clock = Clock()
        monkeypatch.setattr(event_log, "time", self.clock)
        settings = resolve((), {"program": "toy", "num_nodes": 3, **more}, cross_checks=False)
        self.record = runrecord.new(folder, settings, tasks={}, model=None)
        self.log = event_log.EventLog(self.record, RULES, folder / "daemon.log", folder)

    def at(self, now: float, event: str, node: Node, **fields: Any) -> None:
        self.clock.now = now
        self.log.write(event, node, fields)

    def worked(self, now: float, time: PhaseTime) -> None:
        self.clock.now = now
        self.log.note_work(time)

    def lines(self) -> list[dict[str, Any]]:
        """Without when and where."""
        (journal,) = self.record.paths.events.iterdir()
        about = {"time", "mono_s", "run_id", "node_rank", "generation", "iteration", "phase", "phase_name"}
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        assert all(about <= line.keys() for line in lines)
        return [{k: v for k, v in line.items() if k not in about} for line in lines]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(tmp_path, monkeypatch)


def test_a_row_s_end_says_where_its_time_went(log: Log) -> None:
    node = at_row(1, ROLL_OUT)
    log.at(100.0, "phase_started", node)
    log.worked(107.0, PhaseTime(start_s=2.0, work_s=4.5))
    log.at(107.0, "decision", node, value={"loss": 1 / 3})
    log.at(110.0, "phase_finished", node)
    started, decided, finished = log.lines()
    assert started == {"event": "phase_started"}
    # Half a second was the daemon's own, before the work and after it.
    parts = {"start_s": 2.0, "work_s": 5.0, "wait_s": 3.0}
    assert finished == {"event": "phase_finished", "seconds": 10.0, **parts}
    assert decided == {"event": "decision", "value": {"loss": 0.333333}}, (
        "digits that say nothing are left out"
    )


def test_a_line_that_a_full_disk_takes_only_in_part_does_not_spoil_the_next(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, write = at_row(1, ROLL_OUT), os.write
    log.at(100.0, "first", node)
    answers = iter([lambda fd, data: write(fd, data[:20])])

    def full(fd: int, data: bytes) -> int:
        answer = next(answers, None)
        if answer is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return answer(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        log.at(101.0, "second", node)
    monkeypatch.setattr(os, "write", write)
    log.at(102.0, "second", node)
    log.at(103.0, "third", node)
    assert [line["event"] for line in log.lines()] == ["first", "second", "third"]


def test_all_events_that_daemons_write_themselves_are_known(log: Log) -> None:
    """A program's result may contain none of them (`_check_result`)."""
    source = Path(event_log.__file__).parents[1]
    calls = re.compile(r'(?:Note|write_event|events\.write|self\.write|yield )\(?\s*"(\w+)"')
    folders = (source / "coordination", source / "run", source / "protocol")
    found = {
        name for folder in folders for path in folder.glob("*.py") for name in calls.findall(path.read_text())
    }
    assert found == OWN, found ^ OWN


def test_a_leader_has_also_waited_between_its_two_pieces_of_work(log: Log) -> None:
    node = at_row(0, MERGE)
    log.at(100.0, "phase_started", node)
    log.worked(109.0, PhaseTime(work_s=5.0))
    log.at(110.0, "phase_finished", node)
    _, finished = log.lines()
    assert finished == {
        "event": "phase_finished",
        "seconds": 10.0,
        "work_s": 5.0,
        "wait_s": 5.0,
        "waited_s": 1.0,
    }


def test_work_is_told_before_the_row_ends_where_that_takes_long(log: Log) -> None:
    node = at_row(1, ROLL_OUT)
    log.at(100.0, "phase_started", node)
    log.worked(103.0, PhaseTime(work_s=3.0))
    log.at(108.0, "work_finished", node, work_s=3.0)
    log.at(113.0, "phase_finished", node)
    _, worked, finished = log.lines()
    assert worked == {"event": "work_finished", "work_s": 3.0, "waited_s": 5.0}
    assert (finished["work_s"], finished["wait_s"]) == (3.0, 10.0)


def test_trackers_that_hang_are_ended_with_the_node_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(tracking, "own_program", lambda *words: hang)
    monkeypatch.setattr(tracking, "LAST_S", 1.0)
    log = Log(tmp_path, monkeypatch, **{"tracker.names": ["tensorboard"]})
    log.at(100.0, "generation_started", at_row(0, OPEN))
    log.log.close()
    last = log.lines()[-1]
    said = "had not told everything after 1 s, and was ended; a start that goes on tells the rest"
    assert (last["event"], last["why"]) == ("tracker_failed", said)
