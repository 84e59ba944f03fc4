"""What is told of a run: what the journal says of rows and times, and what a user's command hears (`notify.command`)."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, Cluster
from commands import typed
from core_builders import MERGE, OPEN, ROLL_OUT, RULES, at_row

from fsbarrier.protocol.facts import Generation, Member, Position
from fsbarrier.protocol.state import Node
from fsbarrier.run import event_log, tracking
from fsbarrier.run.notifier import Notifier
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import OWN, Event, parse
from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.settings.resolve import resolve
from fsbarrier.view.timings import OPEN as STILL_OPEN
from fsbarrier.view.timings import goodput, iteration_times, read_spans, row_times, together


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


# --- times ----------------------------------------------------------------------------------------------------------------------

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
NAMES = {0: "iteration_start", 2: "train_rollout", 13: "iteration_end"}


def line(
    rank: int,
    event: str,
    t: float,
    at: tuple[int, int, int],
    *,
    clock: str = "one",
    skew: float = 0.0,
    **more: Any,
) -> Event:
    """A line at `t`; `skew`: how far the writer's wall clock is ahead. Each clock has an origin of its own."""
    generation, iteration, phase = at
    raw = {
        "time": (BEGIN + timedelta(seconds=t + skew)).isoformat(),
        "mono_s": t + sum(map(ord, clock)),
        "run_id": "r",
        "node_rank": rank,
        "generation": generation,
        "iteration": iteration,
        "phase": phase,
        "phase_name": NAMES.get(phase, ""),
        "event": event,
        **more,
    }
    parsed = parse(raw)
    assert parsed is not None
    return parsed


def passage(
    rank: int, at: tuple[int, int, int], begin: float, done: float, end: float, **more: Any
) -> list[Event]:
    """A row gone through: entered, work done, released."""
    work = {"work_s": done - begin}
    return [
        line(rank, "phase_started", begin, at, **more),
        line(rank, "work_finished", done, at, **more, **work),
        line(rank, "phase_finished", end, at, **more, seconds=end - begin),
    ]


def test_coordination_runs_from_the_last_work_done_to_the_last_entry_of_the_next_row() -> None:
    node0 = [*passage(0, (1, 1, 0), 0.0, 0.0, 1.0), *passage(0, (1, 1, 2), 1.0, 5.0, 9.25)]
    node1 = [*passage(1, (1, 1, 0), 0.5, 0.5, 1.1), *passage(1, (1, 1, 2), 1.2, 9.0, 9.5)]
    first, second = row_times(read_spans([node0, node1]))
    assert (first.phase, first.last_rank) == (0, 1)
    assert first.seconds == pytest.approx(0.7)  # 0.5 (the last one in) to 1.2 (the last one in the next)
    assert first.coordination_s == pytest.approx(0.7)  # nobody had work: done when they entered
    assert second.last_rank == 1
    assert second.coordination_s == pytest.approx(0.5)  # the last row ends when its last member was released
    assert second.seconds == pytest.approx(8.3)


def test_rows_of_an_iteration_add_up_to_its_time() -> None:
    journal: list[Event] = []
    t = 100.0
    for iteration in (1, 2):
        for phase in (0, 2, 13):
            journal += passage(0, (1, iteration, phase), t, t + 0.3 * phase, t + 0.3 * phase + 0.01)
            t += 0.3 * phase + 0.01
    one, two = iteration_times(row_times(read_spans([journal])))
    assert one.complete and two.complete
    assert one.seconds == pytest.approx(4.53)
    assert one.coordination_s == pytest.approx(0.03)
    assert one.share == pytest.approx(0.03 / 4.53)
    assert sum(one.phases.values()) == pytest.approx(one.seconds)
    assert together([one, two]).phases[2, "train_rollout"] == pytest.approx(2 * 0.61)


def test_clocks_that_disagree_never_give_a_negative_time() -> None:
    near = passage(0, (1, 1, 0), 0.0, 0.0, 1.0, clock="near") + passage(
        0, (1, 1, 2), 1.0, 2.0, 3.0, clock="near"
    )
    far = [
        *passage(1, (1, 1, 0), 0.0, 0.9, 1.0, clock="far", skew=-40.0),
        *passage(1, (1, 1, 2), 1.0, 2.0, 3.0, clock="far", skew=-40.0),
    ]
    for row in row_times(read_spans([near, far])):
        assert row.seconds >= 0 and 0 <= (row.coordination_s or 0.0) <= row.seconds


def test_a_row_whose_work_failed_is_open_until_it_ends() -> None:
    journal = [
        line(0, "phase_started", 0.0, (1, 1, 2)),
        line(0, "work_failed", 3.0, (1, 1, 2), work_s=3.0, error="no"),
    ]
    (span,) = read_spans([journal])
    assert span.outcome == STILL_OPEN and span.seconds == pytest.approx(3.0)
    (iteration,) = iteration_times(row_times([span]), last_phase=13)
    assert not iteration.complete and iteration.coordination_s == 0


def test_goodput_is_the_time_of_what_counted_and_a_failure_costs_what_it_repeats() -> None:
    journal = [
        *passage(0, (1, 1, 0), 0.0, 0.0, 1.0),
        *passage(0, (1, 1, 2), 1.0, 10.9, 11.0),  # repeated by generation 2
        line(0, "phase_started", 11.0, (1, 1, 13)),
        line(0, "left_generation", 15.0, (1, 1, 13)),
        *passage(0, (2, 1, 2), 17.0, 26.9, 27.0),
        *passage(0, (2, 1, 13), 27.0, 27.0, 28.0),
    ]
    found = goodput(row_times(read_spans([journal])))
    assert found is not None
    assert found.share == pytest.approx(11 / 28)
    assert found.costs_s == pytest.approx({1: 0.0, 2: 10 + 4 + 2})
    assert goodput([]) is None


def test_goodput_counts_what_an_older_generation_did_and_nobody_repeated() -> None:
    """Two nodes and three generations, against sums by hand. The second generation goes on behind what the first one passed, and ends in a
    row that nobody has repeated yet; the third repeats one row of each."""
    first = [
        *passage(0, (1, 1, 0), 0.0, 0.0, 2.0),
        *passage(0, (1, 1, 1), 2.0, 4.0, 5.0),
        *passage(0, (1, 1, 2), 5.0, 9.0, 12.0),
        line(0, "phase_started", 12.0, (1, 1, 3)),
        line(0, "left_generation", 13.0, (1, 1, 3)),
        *passage(0, (2, 1, 3), 14.0, 14.0, 15.0),
        *passage(0, (2, 1, 4), 15.0, 18.0, 20.0),
        line(0, "phase_started", 20.0, (2, 1, 5)),
        line(0, "left_generation", 26.0, (2, 1, 5)),
        *passage(0, (3, 1, 4), 30.0, 33.0, 34.0),
        line(0, "phase_started", 34.0, (3, 1, 5)),
        line(0, "work_finished", 37.0, (3, 1, 5), work_s=3.0),
    ]
    # The other node enters each row of the first generation half a second later, and then is lost.
    other = [
        *passage(1, (1, 1, 0), 0.5, 0.5, 2.5, clock="other"),
        *passage(1, (1, 1, 1), 2.5, 3.0, 5.5, clock="other"),
        line(1, "phase_started", 5.5, (1, 1, 2), clock="other"),
    ]
    found = goodput(row_times(read_spans([first, other])))
    assert found is not None
    # Rows last from the last member's entry to the last one's next: row 1 of the first generation from 2.5, row 2 from 5.5.
    counted = (5.5 - 2.5) + (12.0 - 5.5) + (15.0 - 14.0) + (34.0 - 30.0)
    assert found.share == pytest.approx(counted / (37.0 - 0.5))
    # Before the second: the row that was cut short, and the pause. Before the third: a row that it repeats, one cut short, the pause.
    assert found.costs_s == pytest.approx({1: 0.0, 2: 1.0 + 1.0, 3: 5.0 + 6.0 + 4.0})


# --- what a user's command hears: notify.command ------------------------------------------------------------------------------


ABOUT = {"run_id": "r", "log_path": "/r"}


def listener(folder: Path) -> str:
    """A command that adds what it hears to `heard`."""
    script = folder / "my listener.py"
    script.write_text(
        "import json, os, sys\n"
        "event = json.load(sys.stdin)\n"
        "assert event == json.loads(os.environ['FSBARRIER_EVENT'])\n"
        "open(sys.argv[1], 'a').write(json.dumps(event) + '\\n')\n"
    )
    return f"'{sys.executable}' '{script}' '{folder}/heard'"


def heard(folder: Path) -> list[dict[str, object]]:
    path = folder / "heard"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_tells_how_it_goes_once(tmp_path: Path) -> None:
    small = (*FAST, "toy.tasks=4", "toy.phase_s=0", "--iterations", "2")
    with Cluster(tmp_path, 2, *small, f"notify.command={listener(tmp_path)}") as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said_by_all()
    events = heard(tmp_path)
    assert [event["event"] for event in events] == ["started", "evaluated", "evaluated", "finished"]
    assert {event["node_rank"] for event in events} == {0}
    assert {event["log_path"] for event in events} == {str(tmp_path / "run")}
    assert [event["iteration"] for event in events[1:3]] == [1, 2] and isinstance(
        events[1]["reward_mean"], float
    )


def test_the_loss_of_node_0_is_told_and_its_return_is_no_start(tmp_path: Path) -> None:
    small = (*FAST, "toy.tasks=4", "toy.phase_s=0", "--rl-phase", "rollout")
    with Cluster(tmp_path, 2, *small, f"notify.command={listener(tmp_path)}") as cluster:
        cluster.start()
        cluster.wait_for(lambda event: event["event"] == "iteration_finished")
        cluster.kill(0)
        lost = cluster.wait_for(lambda event: event["event"] == "node_lost")
        cluster.start(0)
        back = cluster.wait_for(
            lambda event: event["event"] == "generation_started" and event["reason"].startswith("joined")
        )
        cluster.wait_for(
            lambda event: event["event"] == "evaluated" and event["generation"] == back["number"]
        )
        cluster.stop()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said_by_all()
    events = [event for event in heard(tmp_path) if event["event"] != "evaluated"]
    assert [(event["event"], event["node_rank"]) for event in events] == [
        ("started", 0),
        ("node_lost", 1),
        ("stopped", 0),
    ]
    assert [one["node_rank"] for one in lost["lost"]] == [0]
    assert events[1]["lost"][0]["why"] == lost["lost"][0]["why"]


def node(rank: int) -> Node:
    members = tuple(Member(rank, 1) for rank in range(3))
    return Node(
        rank,
        1,
        0.0,
        "host",
        generation=Generation(number=1, members=members, leader=0, start=Position(1, 0), reason=""),
    )


def test_the_command_is_told_no_password(tmp_path: Path) -> None:
    notifier = Notifier(listener(tmp_path), tmp_path / "notify.log", ABOUT)
    notifier.tell(
        "node_ended", node(0), {"state": "broken", "reason": "no answer from https://me:hunter2@host/v1"}
    )
    notifier.close()
    (event,) = heard(tmp_path)
    assert event["reason"] == "no answer from https://me:***@host/v1"


def test_a_command_that_fails_or_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsbarrier.run.notifier.COMMAND_S", 0.2)
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    for command in ("false", f"cat '{fifo}'", "/nowhere/program"):
        notifier = Notifier(command, tmp_path / "notify.log", ABOUT)
        told = threading.Thread(target=notifier.tell, args=("evaluated", node(0), {}))
        told.start()
        told.join(60)
        assert not told.is_alive()
        notifier.close()
    assert (
        str(fifo)
        not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )


def test_a_command_that_cannot_be_is_refused(tmp_path: Path) -> None:
    words = ["run", "--program", "ping", "--log-path", str(tmp_path / "run")]
    for command, says in (("/nowhere/program x", "not found on this node"), ("'x", "No closing quotation")):
        said = typed(*words, f"notify.command={command}", code=2)
        assert f"notify.command={command}: " in said.err and says in said.err
