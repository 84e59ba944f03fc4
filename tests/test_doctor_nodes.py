"""Several doctors at once: they find each other in any order, answer alike, name who is missing, and leave nothing. Real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from fsbarrier.doctor import delays, examine
from fsbarrier.doctor.meeting import FOLDER, Interruption, Meeting
from fsbarrier.doctor.messages import pack
from fsbarrier.doctor.roll_call import Visitor
from fsbarrier.errors import StoreError, TooFewNodes
from fsbarrier.supervision.signals import ending_signals_handled

REPO = Path(__file__).resolve().parent.parent
DEADLINE_S = 120.0


class Doctors:
    """`fsbarrier doctor` processes on one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, path: Path | None = None) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "fsbarrier", "doctor", str(path or self.path), "--json", *words]
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
        )
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def in_lobby(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return sum(not name.startswith(".") for name in os.listdir(self.path / FOLDER / "lobby"))
        return 0

    def talking(self) -> bool:
        """Whether they have found each other."""
        return any((self.path / FOLDER).glob("*/content"))


@pytest.fixture
def doctors(tmp_path: Path) -> Iterator[Doctors]:
    group = Doctors(tmp_path / "shared")
    group.path.mkdir()
    yield group
    for process in group.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()


def report(out: str) -> dict[str, Any]:
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_three_nodes_in_any_order_give_one_answer(doctors: Doctors) -> None:
    lobby = doctors.path / FOLDER / "lobby"
    lobby.mkdir(parents=True)
    gone = Visitor("0" * 16, num_nodes=3, rank=1, met=("f" * 16,), host="gone", boot_id="")
    (lobby / gone.token).write_bytes(pack(asdict(gone)))  # of a doctor that was killed
    (doctors.path / FOLDER / gone.token / "group").mkdir(parents=True)
    (lobby / "torn").write_bytes(b"not a message")
    running = []
    for number, rank in enumerate((2, 0, 1)):
        running.append(doctors.start("--num-nodes", "3", "--node-rank", str(rank)))
        until(lambda number=number: doctors.in_lobby() >= 3 + number)
    ended = [doctors.end(process) for process in running]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    reports = [report(out) for _, out, _ in ended]
    assert reports[0] == reports[1] == reports[2]
    found = reports[0]
    assert found["fit"] and "3 nodes" in found["proven"]
    assert [node["node_rank"] for node in found["nodes"]] == [0, 1, 2]
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert levels["exclusive-create races"] == levels["ports"] == "ok"
    assert levels["hosts"] == "note", "one host is not several"
    for lags in (found["measured"][rank]["lags"] for rank in "012"):
        assert set(lags) == {"content", "listing", "absent"} and not any(
            item["open"] for item in lags.values()
        )
        assert all(0 < item["median"] <= item["p99"] <= item["most"] for item in lags.values())
    assert set(os.listdir(doctors.path)) <= {FOLDER}
    assert set(os.listdir(doctors.path / FOLDER / "lobby")) == {"torn"}, (
        "what is not a doctor's record is not touched"
    )


def test_what_a_killed_doctor_left_goes_although_another_is_still_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsbarrier.doctor.meeting.LEFTOVER_S", 0.0)
    lobby = tmp_path / FOLDER / "lobby"
    lobby.mkdir(parents=True)
    gone = Visitor("0" * 16, num_nodes=2, rank=1, met=("f" * 16,), host="gone", boot_id="")
    (lobby / gone.token).write_bytes(pack(asdict(gone)))
    (lobby.parent / gone.token / "group").mkdir(parents=True)
    second_left, found = threading.Event(), dict[int, list[str]]()

    def visit(rank: int) -> None:
        with Meeting(tmp_path, 2, rank, Interruption()) as meeting:
            meeting.meet(20.0, lambda line: None)
            meeting.exchange("that it is ready", None)
            if rank == 0:
                assert second_left.wait(DEADLINE_S)
                found[rank] = sorted(path.name for path in lobby.iterdir() if not path.name.startswith("."))

    threads = [threading.Thread(target=visit, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[1].join(DEADLINE_S)
    second_left.set()
    threads[0].join(DEADLINE_S)
    assert len(found[0]) == 1 and gone.token not in found[0], "only the first doctor's own record is left"
    assert os.listdir(tmp_path) == []


def test_a_node_that_never_comes_is_named(doctors: Doctors) -> None:
    known = doctors.start("--num-nodes", "3", "--worker", "1", "--wait", "3")
    other = doctors.start("--num-nodes", "3", "--master", "--wait", "3")
    for process in (known, other):
        code, out, err = doctors.end(process)
        assert (code, out) == (5, "")
        assert "node 2 did not arrive within 3 s" in err and str(doctors.path) in err
        assert "a local filesystem" in err, "a local disk is the likely reason"
    assert os.listdir(doctors.path) == []


def test_without_ranks_it_is_told_how_many_came(doctors: Doctors) -> None:
    code, _, err = doctors.end(doctors.start("--num-nodes", "2", "--wait", "0.5"))
    assert code == 5 and "1 of 2 nodes" in err
    assert os.listdir(doctors.path) == []


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            ("--num-nodes", "2", "--worker", "1"),
            ("--num-nodes", "2", "--worker", "1"),
            "two doctors have rank 1",
        ),
        (("--num-nodes", "2"), ("--num-nodes", "3"), "use the same value on all nodes"),
    ],
)
def test_contradictions_are_refused(
    doctors: Doctors, first: list[str], second: list[str], message: str
) -> None:
    ended = [
        doctors.end(process)
        for process in (doctors.start(*first, "--wait", "20"), doctors.start(*second, "--wait", "20"))
    ]
    assert [code for code, _, _ in ended] == [2, 2], ended
    assert all(message in err for _, _, err in ended)
    assert os.listdir(doctors.path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_that_is_interrupted_is_named_by_the_other(doctors: Doctors, number: int, code: int) -> None:
    staying = doctors.start("--num-nodes", "2", "--master")
    leaving = doctors.start("--num-nodes", "2", "--worker", "1")
    until(doctors.talking)
    leaving.send_signal(number)
    left = doctors.end(leaving)
    assert left == (code, "", ""), left
    ended, out, err = doctors.end(staying)
    assert (ended, out) == (5, "") and "node 1" in err.splitlines()[-1] and "Traceback" not in err
    assert os.listdir(doctors.path) == []


class Deserted(Meeting):
    """A meeting whose other member goes after some exchanges."""

    exchanges = 0

    def exchange(self, name: str, message: Any) -> dict[int, Any]:
        self.exchanges += 1
        if self.exchanges > 3:
            raise TooFewNodes("node 1 left")
        return {0: message, 1: message}


def test_measuring_ends_with_the_node_that_would_answer(tmp_path: Path) -> None:
    meeting = Deserted(tmp_path, 2, 0, Interruption())
    meeting.members = {0: meeting.lobby.me, 1: Visitor("b", 2, 1)}
    delays.prepare(meeting)
    before = set(threading.enumerate())
    with pytest.raises(TooFewNodes, match="node 1 left"):
        delays.measure(meeting)
    assert set(threading.enumerate()) <= before, "nobody asks on"


def test_a_signal_is_heeded_where_it_is_safe_and_a_second_one_at_once() -> None:
    interruption = Interruption()
    with ending_signals_handled(interruption.handle):
        interruption.heed()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            interruption.heed()
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGINT)
    waiting = Interruption()
    with ending_signals_handled(waiting.handle), pytest.raises(SystemExit, match="130"), waiting.at_once():
        signal.raise_signal(signal.SIGINT)


def test_one_alone_that_is_interrupted_leaves_nothing(doctors: Doctors) -> None:
    process = doctors.start("--num-nodes", "2", "--master")
    until(lambda: doctors.in_lobby() == 1)
    process.send_signal(signal.SIGINT)
    assert doctors.end(process)[0] == 130
    assert os.listdir(doctors.path) == []


def test_where_no_group_can_be_had_each_node_still_says_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise StoreError("no file can be created exclusively")

    monkeypatch.setattr("fsbarrier.doctor.meeting.join", refuse)
    found = []

    def examine_as(rank: int) -> None:
        found.append(examine.together(tmp_path, 2, rank, 20.0, lambda line: None, Interruption()))

    threads = [threading.Thread(target=examine_as, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(found) == 2 and os.listdir(tmp_path) == []
    for each in found:
        assert {"mount", "exclusive create", "free space"} < {check.name for check in each.checks}
        assert [check.name for check in each.refused] == ["meeting"]
        assert "created exclusively" in each.refused[0].finding


@pytest.mark.slow
def test_one_that_is_killed_is_named_and_tidied_up_after(doctors: Doctors) -> None:
    staying = doctors.start("--num-nodes", "2", "--master")
    killed = doctors.start("--num-nodes", "2", "--worker", "1")
    until(doctors.talking)
    killed.kill()
    code, _, err = doctors.end(staying)
    assert code == 5 and "node 1" in err
    assert os.listdir(doctors.path) == []
