"""What a filesystem can do, as fsbarrier doctor and each start find out: alone, and between nodes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from other_user import UID, needs_root
from waiting import DEADLINE_S, until

from fsbarrier.doctor import between, examine, machine
from fsbarrier.doctor.between import ROUNDS, NodeFindings
from fsbarrier.doctor.examine import FOLDER
from fsbarrier.doctor.findings import Check
from fsbarrier.rundir import runrecord
from fsbarrier.store import mounts
from fsbarrier.store.mounts import Mount, claims_unsafe

# --- mounts ---------------------------------------------------------------------------------------------------------------


def judged(kind: str, *options: str, source: str = "somewhere") -> list[Check]:
    return machine.judge(Mount(kind, source, ("rw", *options)))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("fuse.blobfuse2", "blobfuse2"),
        ("fuse", "blobfuse2"),
        ("fuse.rclone", "remote:bucket"),
        ("fuse.s3fs", "s3fs"),
        ("fuse.gcsfuse", "bucket"),
        ("fuse", "mountpoint-s3"),
    ],
)
def test_object_stores_are_refused(kind: str, source: str) -> None:
    check = judged(kind, source=source)[0]
    assert check.level == "refused" and "NFS" in check.advice


@pytest.mark.parametrize(
    ("kind", "option", "level", "word"),
    [
        ("nfs4", "soft", "warning", "hard"),
        ("nfs", "nocto", "warning", "without nocto"),
        ("nfs", "nolock", "", ""),
        ("nfs4", "acdirmax=600", "warning", "actimeo=3"),
        ("nfs4", "noac", "note", "actimeo=1"),
        ("nfs", "proto=udp", "warning", "tcp"),
        ("nfs", "vers=2", "refused", "4.2"),
        ("9p", "cache=loose", "warning", "cache=none"),
        ("cifs", "cache=loose", "warning", "cache=strict"),
        ("cifs", "noserverino", "warning", "serverino"),
        ("nfs4", "lookupcache=all", "", ""),
        ("nfs4", "actimeo=3", "", ""),
    ],
)
def test_options_that_do_harm_are_named_with_what_helps(
    kind: str, option: str, level: str, word: str
) -> None:
    said = [check for check in judged(kind, option) if check.name == "mount option"]
    assert [check.level for check in said] == ([level] if level else [])
    assert all(option.split("=")[0] in check.finding and word in check.advice for check in said)


def test_filesystems_have_their_class_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "ext4": "local",
        "nfs4": "close-to-open",
        "ceph": "coherent",
        "fuse.ceph-fuse": "coherent",
        "gpfs": "coherent",
    }
    kinds |= {
        "fuse.glusterfs": "close-to-open",
        "fuse.JuiceFS": "close-to-open",
        "fuse.new": "unknown",
        "xfs": "local",
    }
    assert {kind: Mount(kind, "", ()).family.category for kind in kinds} == kinds
    assert judged("tmpfs")[0].level == judged("overlay")[0].level == "warning"
    assert machine.judge(Mount("nfs", "s:/", ("ro",)))[0].level == "refused"
    monkeypatch.setattr(mounts, "mount_of", lambda path: Mount("fuse.s3fs", "s3fs", ()))
    assert "NFS" in claims_unsafe(Path("/x"))


# --- conclusions ----------------------------------------------------------------------------------------------------------


def said(rank: int, **changes: Any) -> dict[str, Any]:
    """What a healthy node of two says; it won every second round."""
    races = {
        "won": list(range(rank, ROUNDS, 2)),
        "errors": {},
        "records": [f"node-{number % 2}" for number in range(ROUNDS)],
    }
    return {
        **{"host": "somewhere", "boot_id": f"host{rank}", "checks": [], "races": races},
        **{"mount": "nfs4 from server:/export", "fresher": "actimeo=1"},
        "delays": {"samples": 50, "median": 0.002, "most": 0.005, "open": False},
        "reached": {str(1 - rank): ["10.0.0.1"]},
        **changes,
    }


def nodes(*messages: dict[str, Any]) -> dict[int, NodeFindings]:
    return {rank: NodeFindings.of(message) for rank, message in enumerate(messages)}


def concluded(*messages: dict[str, Any]) -> dict[str, Check]:
    return {check.name: check for check in between.between_nodes(nodes(*messages))}


def test_two_healthy_nodes_are_fit() -> None:
    checks = concluded(said(0), said(1))
    assert {check.level for check in checks.values()} == {"ok"}, checks
    assert between.category_of(nodes(said(0), said(1))) == mounts.COHERENT


def test_two_winners_of_one_round_are_refused() -> None:
    races = said(1)["races"]
    races["won"] = [*races["won"], 0]
    check = concluded(said(0), said(1, races=races))["exclusive-create races"]
    assert check.level == "refused" and "1 of" in check.finding


@pytest.mark.parametrize(("lost", "level"), [(1, "note"), (10, "note"), (11, "refused")])
def test_a_race_that_nobody_wins_is_told_and_more_than_a_tenth_is_refused(lost: int, level: str) -> None:
    """The server created the name and told of an error: nobody decides then, and the protocol tries again."""
    races = said(1)["races"]
    races["won"] = races["won"][lost:]
    check = concluded(said(0), said(1, races=races))[between.RACES]
    assert check.level == level and check.finding.startswith(f"{lost} of 100 races of 2 nodes had no winner")
    assert ("hard links" in check.advice) == (level == "refused")


def late(most: float, *, unfinished: bool = False) -> dict[str, Any]:
    return {"samples": 9, "median": most, "most": most, "open": unfinished}


def test_what_is_shown_late_is_named_and_what_never_is_refused() -> None:
    check = concluded(said(0, delays=late(5.0)), said(1))[between.LISTED]
    assert check.level == "warning" and "actimeo=1" in check.advice
    check = concluded(said(0, delays=late(11.0, unfinished=True)), said(1))[between.LISTED]
    assert check.level == "refused" and check.advice == "actimeo=1"
    assert concluded(said(0, delays=None), said(1, delays=None))[between.LISTED].level == "refused"
    both = nodes(said(0, delays=late(3.0)), said(1))
    assert between.stale_s(both) == 6.0 and between.category_of(both) == mounts.CLOSE_TO_OPEN


def test_a_node_that_another_cannot_reach_is_named() -> None:
    check = concluded(said(0), said(1, reached={"0": []}))["ports"]
    assert check.level == "warning" and "node 1 cannot connect to node 0" in check.finding


def test_what_one_node_finds_is_said_of_it_and_the_worst_counts() -> None:
    fit, unfit = Check("free space", "ok", "80 GB"), Check("free space", "refused", "1 MB", "make room")
    (check,) = between.merged({0: [fit], 1: [unfit], 2: [fit]})
    assert (check.level, check.advice) == ("refused", "make room")
    assert check.finding.splitlines() == ["node 0: 80 GB", "node 1: 1 MB", "node 2: 80 GB"]
    (check,) = between.merged({0: [fit], 1: [fit]})
    assert (check.level, check.finding) == ("ok", "80 GB")


def test_races_with_errors_or_another_ones_record_are_told() -> None:
    races = said(1)["races"]
    checks = concluded(said(0), said(1, races={**races, "errors": {"EIO": 3}}))
    assert checks[between.RACES].level == "warning" and "3 x EIO" in checks[between.RACES].finding
    records = ["node-1", *races["records"][1:]]
    check = concluded(said(0), said(1, races={**races, "records": records}))[between.RACES]
    assert check.level == "refused" and check.finding.startswith("1 of ")


# --- one node, for real ---------------------------------------------------------------------------------------------------


def test_one_node_finds_its_disk_fit_and_leaves_nothing(tmp_path: Path) -> None:
    report = json.loads(typed("doctor", tmp_path, "--json").out)
    assert report["fit"] and "this node only" in report["proven"]
    names = {check["name"] for check in report["checks"]}
    assert {"mount", "exclusive create", "free space", "open files"} <= names
    assert os.listdir(tmp_path) == []
    assert "can support a run" in typed("doctor", tmp_path).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "not an existing directory"),
        ([".", "--worker", "1"], "--num-nodes"),
        ([".", "--num-nodes", "0"], "1 or more"),
        ([".", "--num-nodes", "2", "--worker", "2"], "out of range"),
        ([".", "--wait", "0"], "--wait"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = typed("doctor", *words, code=2).err
    assert message in error and error.count("\n") == 1


# --- the start of a run ---------------------------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(examine, "mount_of", lambda path: Mount(kind, "elsewhere", ("rw",)))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_takes_no_files_is_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), f"{path}/.fsbarrier-doctor-1")

    monkeypatch.setattr(examine, "alone", refuse)
    said = typed("doctor", tmp_path, code=2)
    assert said.err == f"fsbarrier: error: {tmp_path}: not writable ({os.strerror(number)})\n"


def test_a_start_on_an_object_store_is_refused_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "fuse.blobfuse2")
    words = ["run", "--log-path", str(tmp_path / "run"), "--program", "ping", "--iterations", "1"]
    for more in ([], ["--dry-run"]):
        error = typed(*words, *more, code=3).err
        assert "cannot support a run" in error and "NFS" in error
    assert "cannot support a run" in typed("doctor", tmp_path, code=3).out
    typed("doctor", tmp_path, "--json", code=3)
    assert os.listdir(tmp_path) == []


def test_a_start_waits_as_long_on_every_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "fuse.sshfs")
    words = ["run", "--program", "ping", "--iterations", "1", "--log-path"]
    typed(*words, tmp_path / "run")
    coordination = runrecord.load(tmp_path / "run").settings.coordination
    assert coordination.dead_s == 10
    assert os.listdir(tmp_path) == ["run"]


def test_a_mount_without_any_exclusive_create_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EOPNOTSUPP, "Operation not supported")

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("fsbarrier.store.files.create_exclusive", refuse)
    report = examine.short(tmp_path)
    assert [check.name for check in report.refused] == ["exclusive create"]
    error = OSError(errno.ENOSPC, "No space left on device")
    assert [check.advice for check in examine.short(tmp_path).refused] == ["make room"]


@pytest.mark.parametrize("name", ["link", "symlink"])
def test_a_filesystem_without_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, name, refuse)
    (check,) = examine.short(tmp_path).refused
    assert "not supported" in check.finding and "hard links and symbolic links" in check.advice


# --- between nodes --------------------------------------------------------------------------------------------------------------

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
        assert 0 < delays["median"] <= delays["most"] < DEADLINE_S
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
