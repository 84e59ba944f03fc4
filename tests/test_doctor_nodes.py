"""Several doctors at once: they answer alike, name who is missing, leave nothing, and remove nothing of anybody else's. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_user import UID, needs_root
from waiting import DEADLINE_S, until

from fsbarrier.doctor.examine import FOLDER

REPO = Path(__file__).resolve().parent.parent


class Doctors:
    """`fsbarrier doctor` processes on one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "fsbarrier", "doctor", str(self.path), "--json", *words]
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

    def measuring(self) -> bool:
        return any((self.path / FOLDER).glob("session-*/changes/name-*"))


@pytest.fixture
def doctors(tmp_path: Path) -> Iterator[Doctors]:
    group = Doctors(tmp_path / "shared")
    group.path.mkdir()
    yield group
    for process in group.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def report(out: str) -> dict[str, Any]:
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_three_nodes_give_one_answer_after_two_that_were_killed(doctors: Doctors) -> None:
    killed = [doctors.start("--num-nodes", "3", "--worker", rank) for rank in "012"[1:]]
    killed.append(doctors.start("--num-nodes", "3", "--master"))
    until(doctors.measuring)
    for process in killed:
        process.kill()
        process.communicate()
    ended = [doctors.end(each) for each in [doctors.start("--num-nodes", "3", "--worker", r) for r in "201"]]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    reports = [report(out) for _, out, _ in ended]
    assert reports[0] == reports[1] == reports[2]
    found = reports[0]
    assert found["fit"] and "3 nodes" in found["proven"]
    assert [node["node_rank"] for node in found["nodes"]] == [0, 1, 2]
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert levels["exclusive-create races"] == levels["ports"] == "ok"
    assert levels["hosts"] == "note", "one host is not several"
    for delays in (node["delays"] for node in found["nodes"]):
        assert 0 < delays["median"] <= delays["p99"] <= delays["most"] < DEADLINE_S
    assert os.listdir(doctors.path) == []


def test_a_node_that_never_comes_is_named(doctors: Doctors) -> None:
    known = [
        doctors.start("--num-nodes", "3", *rank, "--wait", "4") for rank in (("--worker", "1"), ("--master",))
    ]
    for process in known:
        code, out, err = doctors.end(process)
        assert (code, out) == (5, "")
        said = err.splitlines()[-1]
        assert "node 2" in said and str(doctors.path) in said and "/proc/" not in said
        assert "a local filesystem" in said, "a local disk is the likely reason"


def test_without_a_rank_and_with_contradictions_it_is_refused(doctors: Doctors) -> None:
    code, _, err = doctors.end(doctors.start("--num-nodes", "2"))
    assert code == 2 and "--worker R" in err
    pair = [
        doctors.start("--num-nodes", number, "--worker", rank, "--wait", "120")
        for number, rank in ("21", "32")
    ]
    ended = [doctors.end(process) for process in pair]
    assert 2 in [code for code, _, _ in ended] and any("same --num-nodes" in err for _, _, err in ended), (
        ended
    )


@pytest.mark.slow
def test_one_that_is_interrupted_is_named_by_the_other(doctors: Doctors) -> None:
    staying = doctors.start("--num-nodes", "2", "--master")
    leaving = doctors.start("--num-nodes", "2", "--worker", "1")
    until(doctors.measuring)
    leaving.send_signal(signal.SIGTERM)
    left = doctors.end(leaving)
    assert left[0] == 143 and "Traceback" not in left[2], left
    ended, out, err = doctors.end(staying)
    assert (ended, out) == (5, "") and "node 1" in err.splitlines()[-1] and "Traceback" not in err


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o755])
def test_doctors_meet_only_where_nobody_else_decides_what_is_there(
    mode: int, doctors: Doctors, tmp_path: Path
) -> None:
    """Another user has planted a link to the user's own files, a folder, or owns the directory. One doctor alone meets nobody."""
    precious, place = tmp_path / "precious", doctors.path / FOLDER
    (precious / "group").mkdir(parents=True)
    doctors.path.chmod(mode)
    place.symlink_to(precious)
    os.chown(doctors.path if mode == 0o755 else place, UID, UID, follow_symlinks=False)
    for words in (("--worker", "1"), ("--master",)):
        code, _, err = doctors.end(doctors.start("--num-nodes", "2", *words))
        assert code == 2 and ("everybody may write" if mode == 0o777 else f"belongs to user id {UID}") in err
    assert (precious / "group").is_dir()
    assert doctors.end(doctors.start())[0] == 0
    place.unlink()
    if mode == 0o1777:
        place.mkdir(mode=0o700)
        os.chown(place, UID, UID)
        code, _, err = doctors.end(doctors.start("--num-nodes", "2", "--master"))
        assert code == 2 and f"{place} belongs to user id {UID}" in err


@needs_root
def test_a_folder_that_is_exchanged_while_doctors_meet_costs_nothing_behind_the_link(
    doctors: Doctors, tmp_path: Path
) -> None:
    """By a member of the group that --shared-group trusts."""
    precious, place = tmp_path / "precious", doctors.path / FOLDER
    doctors.path.chmod(0o770)
    words = ("--shared-group", "--num-nodes", "2")
    pair = [doctors.start(*words, "--worker", "1"), doctors.start(*words, "--master")]
    until(doctors.measuring)
    os.rename(place, precious)
    place.symlink_to(precious)
    for process in pair:
        doctors.end(process)
    assert (precious / "group").is_dir() and place.is_symlink()
