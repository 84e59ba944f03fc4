"""Whole runs of the toy program over real mounts: each node its own client of one directory, with real kernel caches and faults.

The nodes live in mount namespaces of their own, so that all have the same path and none sees through another's caches. Needs root and
FUSE; the NFS part its server, and a kernel that has it. What is asserted: every task exactly once, whatever was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster
from fuse import mounting, nfs, real
from test_toy_run import assert_exactly_once

INSIDE = Path(__file__).parent / "fuse" / "inside.py"

needs_fuse = pytest.mark.skipif(bool(mounting.missing()), reason=mounting.missing() or "")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace for each node needs root")


class MountedCluster(Cluster):
    """A run whose node R sees `mounts[R]` under the one path that all have; `backing` is what all of them show."""

    def __init__(self, folder: Path, backing: Path, mounts: list[Path], *flags: str) -> None:
        super().__init__(folder, len(mounts), *flags)
        self.mounts, self.at = mounts, folder / "at"
        self.at.mkdir()
        self.log_path = backing / "run"

    def start(self, *ranks: int) -> None:
        for rank in ranks or range(self.nodes):
            master = ("--master", "--num-nodes", str(self.nodes), *self.flags)
            who = master if rank == 0 else ("--worker", str(rank))
            inside = [sys.executable, str(INSIDE), str(self.mounts[rank]), str(self.at)]
            argv = [
                *inside,
                sys.executable,
                "-m",
                "fsbarrier",
                "run",
                "--log-path",
                str(self.at / "run"),
                *who,
            ]
            env = {k: v for k, v in os.environ.items() if "RANK" not in k} | {"PYTHONPATH": str(REPO)}
            with (self.output / f"node_{rank}.txt").open("ab") as out:
                self.processes[rank] = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
                )


@contextlib.contextmanager
def fuse_cluster(folder: Path, flags: str, *settings: str) -> Iterator[MountedCluster]:
    """Three nodes, each with a mount of its own of one directory."""
    with (
        mounting.nodes(folder, 3, flags.split()) as mounts,
        MountedCluster(folder, folder / "shared", mounts, *FAST, *settings) as cluster,
    ):
        yield cluster


def waits_for(stale_s: float) -> tuple[str, ...]:
    """Timeouts as `fsbarrier doctor` derives them, over the tests' quick ones."""
    return (f"coordination.dead_s={2 + 4 * stale_s}",)


#: what each mount believes, and for how long its view of a replaced file may be old
CACHES = {
    "none": ("", 0),
    "a second": ("--entry-s 1 --attr-s 1 --negative-s 1", 1),
    "absences and attributes for 30 s": ("--attr-s 30 --negative-s 30", 0),
    "listings a second old": ("--listing-s 1 --entry-s 1 --attr-s 1 --negative-s 1", 2),
    "lost replies and errors": (
        "--fault lookup:ESTALE:0.002 --fault link:EIO:0.05:after --fault link:EIO:0.05 "
        "--fault rename2:EIO:0.005:after --fault create:EIO:0.005:after --fault opendir:ESTALE:0.002",
        0.5,
    ),
}


def kill_two_and_finish(cluster: MountedCluster) -> None:
    """A node dies in a rollout, comes back, then the leader dies in an evaluation: every task exactly once."""
    cluster.start()
    cluster.in_phase(2, 2)
    cluster.kill(2)
    cluster.wait_for(lambda e: e["event"] == "node_lost" and e["node_rank"] != 2)
    cluster.start(2)
    cluster.in_phase(0, 6, iteration=2)
    cluster.kill(0)
    cluster.start(0)
    assert cluster.wait() == {0: 0, 1: 0, 2: 0}, "".join(map(cluster.said, range(3)))
    assert_exactly_once(cluster.log_path, 3)


@needs_fuse
@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_kills_on_a_mount_lose_and_double_nothing(tmp_path: Path, name: str) -> None:
    flags, stale_s = CACHES[name]
    with fuse_cluster(
        tmp_path, flags, "--iterations", "3", *waits_for(stale_s), "toy.phase_s=0.2"
    ) as cluster:
        kill_two_and_finish(cluster)


ESTALE = " ".join(
    f"--fault {request}:ESTALE:0.02" for request in ("read", "open", "lookup", "getattr", "opendir")
)
LOST = " ".join(f"--fault {request}:EIO:0.1:after" for request in ("mkdir", "link", "rename2", "create"))
WRITES = " ".join(f"--fault {request}:EIO:0.01" for request in ("write", "fsync", "fsyncdir", "readdir"))
#: what each mount does, and what a run's timeouts must be there
ADVERSARIAL = {
    "others' directories appear 5 s late": ("--dirs-late-s 5", 2.0),
    "others' data can be read 2 s late": ("--data-late-s 2", 5.0),
    "each name has an identity of its own": ("--path-inodes", 0.0),
    "one read in fifty is stale": (ESTALE, 0.5),
    "one reply in ten is lost": (LOST, 0.5),
    "one write in a hundred fails": (WRITES, 0.5),
}


@needs_fuse
@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_a_hostile_mount_makes_a_run_slow_and_never_wrong(tmp_path: Path, name: str) -> None:
    """No node is lost, no attempt of a phase is used up, every task is there once."""
    flags, stale_s = ADVERSARIAL[name]
    with fuse_cluster(tmp_path, flags, "--iterations", "1", *waits_for(stale_s)) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, "".join(map(cluster.said, range(3)))
        unusual = [
            e for e in cluster.events() if e["event"] in ("node_lost", "work_failed", "left_generation")
        ]
        assert not unusual, unusual
        assert_exactly_once(cluster.log_path, 1)


MEMBER = """
import sys, fsbarrier
rank = int(sys.argv[1])
with fsbarrier.join(sys.argv[2], node_rank=rank, num_nodes=3, timeout_s=60) as group:
    assert group.all_gather(rank) == [0, 1, 2]
    assert group.broadcast(rank, src=1) == 1
"""


@needs_fuse
@pytest.mark.slow
def test_a_group_meets_where_data_can_be_read_only_late(tmp_path: Path) -> None:
    """Heartbeats that are replaced before anybody can read them would never be seen."""
    with mounting.nodes(tmp_path, 3, ["--data-late-s", "2"]) as mounts:
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        members = [
            subprocess.Popen([sys.executable, "-c", MEMBER, str(rank), str(mount / "group")], env=env)
            for rank, mount in enumerate(mounts)
        ]
        assert [member.wait(150) for member in members] == [0, 0, 0]


@needs_fuse
@pytest.mark.slow
def test_doctors_meet_where_data_can_be_read_only_late(tmp_path: Path) -> None:
    with mounting.nodes(tmp_path, 2, ["--data-late-s", "2"]) as mounts:
        codes, report = doctors(mounts)
        assert codes == {0} and report["fit"] and report["staleness_s"] >= 2, report
    assert os.listdir(tmp_path / "shared") == []


@needs_fuse
@needs_root
@pytest.mark.slow
def test_an_outage_in_any_phase_uses_up_no_attempt(tmp_path: Path) -> None:
    """Programs that the outage ends are started again; their logs lie on the same mount."""
    dead, phases = tmp_path / "dead", (2, 4, 6, 10, 11)
    flags = ("--iterations", str(len(phases)), "toy.phase_s=0.5")
    with fuse_cluster(tmp_path, f"--dead-while {dead}", *flags) as cluster:
        cluster.start()
        for iteration, phase in enumerate(phases, 1):
            cluster.in_phase(0, phase, iteration=iteration)
            dead.touch()
            begin = time.monotonic()
            seconds_until(lambda begin=begin: time.monotonic() > begin + 4)  # type: ignore[misc]
            dead.unlink()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, "".join(map(cluster.said, range(3)))
        unusual = [
            e for e in cluster.events() if e["event"] in ("node_lost", "work_failed", "left_generation")
        ]
        assert not unusual, unusual
        assert_exactly_once(cluster.log_path, len(phases))


@needs_fuse
@needs_root
@pytest.mark.slow
def test_a_mount_that_dies_ends_everything_with_one_line_and_code_3(tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    flags = ("--iterations", "3", "coordination.dead_s=1")
    with fuse_cluster(tmp_path, f"--dead-while {dead}", *flags) as cluster:
        cluster.start()
        cluster.in_phase(0, 2)
        dead.touch()
        assert cluster.wait() == {0: 3, 1: 3, 2: 3}, "".join(map(cluster.said, range(3)))
        assert "has failed for 12 s" in cluster.said(0) and "internal error" not in cluster.said(0)
        mount, run = cluster.mounts[0], str(cluster.mounts[0] / "run")
        commands = [[word, "--log-path", run] for word in ("status", "stop", "logs", "report")]
        commands += [["run", "--worker", "1", "--log-path", run], ["doctor", str(mount)]]
        commands += [["run", "--program", "ping", "--log-path", str(mount / "new")]]
        for command in commands:
            words = [sys.executable, "-m", "fsbarrier", *command]
            env = {**os.environ, "PYTHONPATH": str(REPO)}
            done = subprocess.run(words, capture_output=True, text=True, env=env)
            assert done.returncode == 3 and done.stderr.count("\n") == 1, done


@pytest.mark.skipif(bool(nfs.missing()), reason=nfs.missing() or "")
@pytest.mark.slow
@pytest.mark.parametrize("options", ["vers=4.2", "vers=4.2,lookupcache=none", "vers=3,nolock"])
def test_kills_on_nfs_lose_and_double_nothing(tmp_path: Path, options: str) -> None:
    settings = ("--iterations", "3", *FAST, *waits_for(2), "toy.phase_s=0.2")
    with (
        nfs.nodes(tmp_path, 3, options) as mounts,
        MountedCluster(tmp_path, tmp_path / "shared", mounts, *settings) as cluster,
    ):
        kill_two_and_finish(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sshfs", "glusterfs", "juicefs", "nfs"])
def test_a_killed_leader_on_a_real_mount_with_the_timeouts_that_ship(tmp_path: Path, kind: str) -> None:
    """The leader and all that it runs end at once, as with its machine: it is lost by its silence, in `dead_s` on every mount."""
    if why := nfs.missing() if kind == "nfs" else real.missing(kind):
        pytest.skip(why)
    mounted = nfs.nodes(tmp_path, 3, "vers=4.2") if kind == "nfs" else real.nodes(kind, tmp_path, 3)
    settings = ("--iterations", "3", "toy.tasks=24", "toy.phase_s=0.5")
    with (
        mounted as mounts,
        # What JuiceFS stores is no directory of files: the test looks through a survivor's mount.
        MountedCluster(
            tmp_path, mounts[1] if kind == "juicefs" else tmp_path / "shared", mounts, *settings
        ) as cluster,
    ):
        cluster.start()
        cluster.in_phase(0, 6, iteration=2)
        tree = cluster.tree(0)
        begin = time.monotonic()
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.wait_for(lambda e: e["event"] == "generation_started" and e["members"] == [1, 2])
        print(f"{kind}: the others go on after {time.monotonic() - begin:.1f} s")
        assert cluster.wait(1, 2) == {1: 0, 2: 0}, "".join(map(cluster.said, range(3)))
        assert_exactly_once(cluster.log_path, 3)


# --- the test's own filesystem does what it says ----------------------------------------------------------------------------


def seconds_until(what: Callable[[], bool], deadline_s: float = 20.0) -> float:
    begin, pause = time.monotonic(), threading.Event()
    while not what():
        assert time.monotonic() < begin + deadline_s, "it is never seen"
        pause.wait(0.005)
    return time.monotonic() - begin


# --- what doctor says of bad ones ---------------------------------------------------------------------------------------------


def doctors(mounts: list[Path], *words: str) -> tuple[set[int], dict[str, Any]]:
    """`fsbarrier doctor` on all of the mounts at once: the exit codes, and what the first that could tell found."""
    base = [sys.executable, "-m", "fsbarrier", "doctor", "--json", "--num-nodes", str(len(mounts)), *words]
    running = [
        subprocess.Popen(
            [*base, "--worker", str(rank), str(mount)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            text=True,
        )
        for rank, mount in enumerate(mounts)
    ]
    ended = [process.communicate(timeout=200) for process in running]
    told = [out for out, _ in ended if out]
    assert told, ended
    return {process.returncode for process in running}, json.loads(told[0])


def levels(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["level"] for check in report["checks"]}


@needs_fuse
@pytest.mark.slow
def test_two_winners_are_caught_and_refused(tmp_path: Path) -> None:
    with mounting.nodes(tmp_path, 2, ["--two-winners", "--negative-s", "1"]) as mounts:
        codes, report = doctors(mounts)
        assert codes == {3} and not report["fit"], report
        assert levels(report)["exclusive-create races"] == "refused"
        assert "more than one winner" in json.dumps(report)
    assert os.listdir(tmp_path / "shared") == []


@needs_fuse
@pytest.mark.slow
def test_a_mount_without_hard_links_is_refused(tmp_path: Path) -> None:
    with mounting.nodes(tmp_path, 2, ["--no-links"]) as mounts:
        codes, report = doctors(mounts)
        assert codes == {3} and not report["fit"], report
        assert "hard links" in json.dumps(report)


@needs_fuse
@pytest.mark.slow
def test_listings_that_only_an_own_change_refreshes_are_measured_as_nodes_look(tmp_path: Path) -> None:
    """Nodes list a folder after a change of their own in it, which drops the cached listing: no age of listings makes a mount unfit."""
    with mounting.nodes(tmp_path, 2, ["--listing-s", "600", "--negative-s", "30"]) as mounts:
        codes, report = doctors(mounts)
        assert codes == {0} and report["fit"], report
        assert levels(report)["new name listed after"] == "ok"
    assert os.listdir(tmp_path / "shared") == []


@needs_fuse
def test_an_object_store_is_refused_by_its_mount(tmp_path: Path) -> None:
    """By its type alone: `run` makes nothing there, and ends with the code for a filesystem that fails."""
    with mounting.mounted(tmp_path / "b", tmp_path / "m", ["--kind", "blobfuse2"]) as mount:
        run = ["run", "--program", "ping", "--iterations", "1", "--log-path", str(mount / "run")]
        for words in (["doctor", str(mount)], run):
            env = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "500"}
            done = subprocess.run(
                [sys.executable, "-m", "fsbarrier", *words], capture_output=True, text=True, env=env
            )
            said = done.stdout + done.stderr
            assert done.returncode == 3 and "object store" in said, done
            assert "mount the bucket with JuiceFS" in said, done
        assert os.listdir(mount) == []
