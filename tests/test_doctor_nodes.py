"""Several doctors at once: they answer alike, name who is missing, leave nothing, and remove nothing of anybody else's. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from fsbarrier.doctor.examine import FOLDER

REPO = Path(__file__).resolve().parent.parent
DEADLINE_S = 120.0


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
        return any((self.path / FOLDER).glob("session-*/changes/content-*"))


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
    for lags in (found["measured"][rank]["lags"] for rank in "012"):
        assert set(lags) == {"content", "listing"}
        assert all(0 < item["median"] <= item["p99"] <= item["most"] < 2 for item in lags.values())
    assert os.listdir(doctors.path) == []


def test_a_node_that_never_comes_is_named(doctors: Doctors) -> None:
    begin = time.monotonic()
    known = [
        doctors.start("--num-nodes", "3", *rank, "--wait", "4") for rank in (("--worker", "1"), ("--master",))
    ]
    for process in known:
        code, out, err = doctors.end(process)
        assert (code, out) == (5, "")
        said = err.splitlines()[-1]
        assert "node 2" in said and str(doctors.path) in said and "/proc/" not in said
        assert "a local filesystem" in said, "a local disk is the likely reason"
    assert time.monotonic() - begin < 50


def test_without_a_rank_and_with_contradictions_it_is_refused(doctors: Doctors) -> None:
    code, _, err = doctors.end(doctors.start("--num-nodes", "2"))
    assert code == 2 and "--worker R" in err
    pair = [
        doctors.start("--num-nodes", number, "--worker", rank, "--wait", "20")
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


def test_nothing_of_anybody_else_is_ever_removed(doctors: Doctors, tmp_path: Path) -> None:
    """The folder where doctors meet is a link to the user's own files, planted by whoever may write there."""
    precious = tmp_path / "precious"
    (precious / "letters" / "group").mkdir(parents=True)
    (precious / "group").mkdir()
    (precious / "letters" / "one").write_text("dear")
    (doctors.path / FOLDER).symlink_to(precious)
    pair = [doctors.start("--num-nodes", "2", "--worker", "1"), doctors.start("--num-nodes", "2", "--master")]
    for process in pair:
        code, _, err = doctors.end(process)
        assert code == 2 and "it is a link" in err.splitlines()[-1], err
    assert doctors.end(doctors.start())[0] == 0
    assert (precious / "letters" / "one").read_text() == "dear" and (precious / "group").is_dir()
    (doctors.path / FOLDER).unlink()
    (doctors.path / FOLDER).mkdir()
    (doctors.path / FOLDER).chmod(0o777)
    code, _, err = doctors.end(doctors.start("--num-nodes", "2", "--master"))
    assert code == 2 and "others may write to it" in err
    if os.geteuid() == 0:
        (doctors.path / FOLDER).chmod(0o700)
        os.chown(doctors.path / FOLDER, 65534, 65534)
        code, _, err = doctors.end(doctors.start("--num-nodes", "2", "--master"))
        assert code == 2 and "belongs to nobody" in err
