"""Every way in which a node can fail is found, named and acted on within 20 s at default settings; and nobody is buried alive."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster, Event, all_gone, assert_exactly_once, leftovers
from commands import typed
from fuse import mounting
from process_tree import kill_at_once
from waiting import DEADLINE_S, slowness, until

WITHIN_S = 20.0 * slowness()
VICTIM = 1
PROGRAMS = Path(__file__).parent / "programs"
HELD = str(
    PROGRAMS / "held.py"
)  # with the setting custom.hold=2 the first generation's rollout takes long, and nothing else
INSIDE = Path(mounting.__file__).with_name("inside.py")
needs_mounts = pytest.mark.skipif(
    mounting.missing() is not None or os.geteuid() != 0, reason="needs FUSE, as root"
)


def without_the_victim(event: Event) -> bool:
    return event["event"] == "generation_started" and VICTIM not in event["members"]


def assert_found(cluster: Cluster, struck_at: float) -> None:
    """By its silence, within the time promised."""
    assert_told(cluster, "no heartbeat for")
    for event in cluster.events():
        if event["event"] == "node_lost":
            assert event["lost"][0]["beat_age_s"] >= 5
        if without_the_victim(event):
            assert event["mono_s"] - struck_at < WITHIN_S


def assert_told(cluster: Cluster, what: str) -> None:
    """Both others go on without it, and say who is lost, where it was, since when, and its last log lines."""
    for other in (0, 2):
        cluster.wait_for(lambda e, other=other: without_the_victim(e) and e["node_rank"] == other)
        lost = cluster.wait_for(lambda e, other=other: e["event"] == "node_lost" and e["node_rank"] == other)
        (item,) = lost["lost"]
        assert item["node_rank"] == VICTIM and item["host"] and item["phase_name"] == "train_rollout"
        assert item["log"]
    said = cluster.said(0) + cluster.said(2)
    assert what in said and "phase 2 train_rollout" in said and f"| node {VICTIM}: daemon.log: " in said


@contextlib.contextmanager
def rolling_out(folder: Path, prepare: Callable[[Cluster], None] = lambda _: None) -> Iterator[Cluster]:
    """Three nodes with default timings in the middle of a long rollout; a failing directory is not waited for as long."""
    with Cluster(folder, 3, "toy.phase_s=120", "toy.tasks=600", real=True) as cluster:
        prepare(cluster)
        cluster.start()
        for rank in range(3):
            cluster.beating(rank, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 2)
        yield cluster


def test_a_killed_daemon_is_named_by_its_death_notice(tmp_path: Path) -> None:
    """Its death notice names it, and nobody waits for its silence."""
    with rolling_out(tmp_path) as cluster:
        tree = cluster.tree(VICTIM)
        cluster.kill(VICTIM)
        assert all_gone(tree)
        assert_told(cluster, "its daemon was killed")


@pytest.mark.slow
def test_a_daemon_killed_with_all_its_processes_is_found_by_its_silence(tmp_path: Path) -> None:
    """As if its host were lost."""
    with rolling_out(tmp_path) as cluster:
        tree, struck_at = cluster.tree(VICTIM), time.monotonic()
        kill_at_once(cluster.processes[VICTIM].pid, *tree)
        assert_found(cluster, struck_at)


@pytest.mark.slow
def test_a_stopped_daemon_is_found_by_its_silence_and_learns_of_it(tmp_path: Path) -> None:
    with rolling_out(tmp_path) as cluster:
        struck_at = time.monotonic()
        cluster.signal(VICTIM, signal.SIGSTOP)
        assert_found(cluster, struck_at)
        cluster.signal(VICTIM, signal.SIGCONT)
        cluster.wait_for(lambda e: e["event"] == "left_generation" and e["node_rank"] == VICTIM)


@pytest.mark.slow
def test_a_node_that_cannot_write(tmp_path: Path) -> None:
    """A file size limit of nothing, for all that the node runs: every write fails, as past a quota of its own. It lives and looks, so it
    is not found by its silence: it gives up after the time of an outage, and says so."""
    with rolling_out(tmp_path) as cluster:
        for pid in cluster.tree(VICTIM):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        cluster.beating(VICTIM, lambda beat: beat.state == "unwritable")
        assert_told(cluster, "it was stopped by hand or ended in an error")
        assert cluster.wait(VICTIM) == {VICTIM: 3}


@pytest.mark.slow
def test_a_daemon_whose_reads_hang(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"

    def prepare(cluster: Cluster) -> None:
        path = os.pathsep.join((str(PROGRAMS / "stuck"), str(REPO)))
        cluster.env[VICTIM] = {"PYTHONPATH": path, "STUCK": str(stuck)}

    with rolling_out(tmp_path, prepare) as cluster:
        struck_at = time.monotonic()
        stuck.touch()
        assert_found(cluster, struck_at)
        stuck.unlink()
        cluster.wait_for(lambda e: e["event"] == "left_generation" and e["node_rank"] == VICTIM)


@pytest.mark.slow
@needs_mounts
def test_a_node_whose_mount_hangs_is_found_by_its_silence(tmp_path: Path) -> None:
    """One node sees the run directory through a filesystem of its own, whose server is stopped."""
    mount, shared = tmp_path / "mount", tmp_path / "run"

    def prepare(cluster: Cluster) -> None:
        cluster.prefix[VICTIM] = (sys.executable, str(INSIDE), str(mount), str(shared))

    with mounting.mounted(shared, mount), rolling_out(tmp_path, prepare) as cluster:
        (server,) = [pid for pid in leftovers(mount) if pid not in cluster.tree(VICTIM)]
        struck_at = time.monotonic()
        os.kill(server, signal.SIGSTOP)
        try:
            assert_found(cluster, struck_at)
        finally:
            os.kill(server, signal.SIGCONT)
        cluster.wait_for(lambda e: e["event"] == "left_generation" and e["node_rank"] == VICTIM)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a filesystem of its own, as root")
def test_a_full_disk_of_its_own_makes_a_node_leave(tmp_path: Path) -> None:
    """Where its programs' private files go nothing can be written: the program fails, the next cannot begin, the others go on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False)
    if mount.returncode:
        pytest.skip("cannot mount here")
    try:
        flags = ("--iterations", "1", "--rl-phase", "rollout", *FAST, "custom.hold=2")
        with Cluster(tmp_path, 2, *flags, program=HELD, real=True) as cluster:
            cluster.env[VICTIM] = {"TMPDIR": str(disk)}
            cluster.start()
            cluster.beating(VICTIM, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 2)
            with contextlib.suppress(OSError):
                (disk / "full").write_bytes(b"x" * (1 << 20))
            assert cluster.wait() == {0: 0, VICTIM: 3}, cluster.said(VICTIM)
            assert f"temporary folder {disk}" in cluster.said(VICTIM)
            assert f"| node {VICTIM}: daemon.log: " in cluster.said(0)
            assert "cannot be written to: No space left on device" in cluster.said(0)
            assert_exactly_once(cluster.log_path, 1)
            assert leftovers(cluster.log_path) == {}
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["shrink", "abort"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a filesystem of its own, as root")
def test_a_full_shared_disk_makes_nobody_lost(tmp_path: Path, policy: str) -> None:
    """It is full, also of inodes, for twice as long as a node may be silent. Meanwhile node 0 works, and the others cannot publish their
    facts: they live and look, and say so by a name that changes. When there is room again, the run goes on as if nothing had been."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=64m,nr_inodes=4000"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        hold = ("custom.hold=10", "custom.hold_s=45", "custom.others_s=5", "toy.phase_s=0.1", "toy.tasks=24")
        flags = ("--iterations", "1", "--on-node-failure", policy, *hold)
        with Cluster(disk, 3, *flags, program=HELD) as cluster:
            cluster.start()
            for rank in range(3):
                cluster.in_phase(rank, 10)
            fill(disk)
            until(lambda: "No space left on device; make room there" in cluster.said(1), cluster.said_by_all)
            full_since = time.monotonic()
            until(lambda: time.monotonic() - full_since > 25, cluster.said_by_all)
            shown = " ".join(typed("status", "--log-path", cluster.log_path, code=None).out.split())
            assert "is full" in shown and "suspected" not in shown and "lost" not in shown, shown
            shutil.rmtree(disk / "much")
            assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
            assert not [e for e in cluster.events() if e["event"] in ("node_lost", "node_suspected")]
            assert all("can use the shared directory again" in cluster.said(rank) for rank in range(3))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Until there is neither room nor an inode."""
    (disk / "much").mkdir()
    with contextlib.suppress(OSError), (disk / "much" / "bytes").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (disk / "much" / str(number)).touch()


def test_a_program_without_progress_is_a_failed_attempt(tmp_path: Path) -> None:
    # The rollout takes a minute, of which the test sees the first seconds: the program still runs when a busy machine gets to stop it.
    hold = ("custom.hold=2", "custom.hold_s=60", "toy.tasks=96")
    flags = ("--iterations", "1", "--rl-phase", "rollout", *FAST, *hold, "coordination.stall_timeout_s=12")
    with Cluster(tmp_path, 2, *flags, program=HELD, real=True) as cluster:
        cluster.start()
        cluster.beating(VICTIM, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 1)
        (worker,) = [
            pid
            for pid in cluster.tree(VICTIM)
            if b"-m\0fsbarrier.workers.toy\0" in (line := command_line(pid)) and b"guard.py" not in line
        ]
        os.kill(worker, signal.SIGSTOP)
        assert cluster.wait() == {0: 0, VICTIM: 0}, cluster.said(VICTIM)
        failed = cluster.wait_for(lambda e: e["event"] == "work_failed")
        assert (failed["node_rank"], failed["phase"]) == (VICTIM, 2)
        assert "no progress for 12 s (coordination.stall_timeout_s)" in failed["error"]
        assert f"| node {VICTIM} (" in cluster.said(0) and "no progress for 12 s" in cluster.said(0)
        assert not [e for e in cluster.events() if e["event"] == "node_lost"]
        assert_exactly_once(cluster.log_path, 1, tasks=96)
        assert leftovers(cluster.log_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("stale_s", [0, pytest.param(3, marks=needs_mounts)])
def test_nobody_is_taken_for_dead_under_load_and_pauses(tmp_path: Path, stale_s: int) -> None:
    """All CPUs busy twice over, and now and then daemons are paused for 5 s, for a minute and a half; then with stale mounts too."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path, 3, "toy.phase_s=1", "toy.tasks=24"))
        if stale_s:
            flags = [
                word for cache in ("listing", "entry", "attr") for word in (f"--{cache}-s", str(stale_s))
            ]
            for rank in range(3):
                mount = stack.enter_context(
                    mounting.mounted(cluster.log_path, tmp_path / f"mount-{rank}", flags)
                )
                cluster.prefix[rank] = (sys.executable, str(INSIDE), str(mount), str(cluster.log_path))
        stack.enter_context(all_cpus_busy())
        cluster.start()
        cluster.in_phase(0, 2)
        pause_now_and_then(cluster, 90.0)
        events = cluster.events()
        for process in cluster.processes.values():  # before its mount goes
            process.kill()
            process.wait()
    assert not [e for e in events if e["event"] in ("node_lost", "left_generation")]
    assert max(e["iteration"] for e in events) >= 2


def pause_now_and_then(cluster: Cluster, seconds: float) -> None:
    generator, pause = random.Random(1), threading.Event()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chosen = generator.sample(range(3), generator.choice((1, 1, 2, 3)))
        for rank in chosen:
            cluster.signal(rank, signal.SIGSTOP)
        pause.wait(5.0)
        for rank in chosen:
            cluster.signal(rank, signal.SIGCONT)
        pause.wait(generator.uniform(0.0, 3.0))


@contextlib.contextmanager
def all_cpus_busy() -> Iterator[None]:
    burn = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burn) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_a_terminal_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    run = [sys.executable, "-m", "fsbarrier", "run", "--master", "--log-path", str(tmp_path / "run")]
    what = ["--program", "ping", "--iterations", "1", *FAST]
    process = subprocess.Popen([*run, *what], stdout=writer, stderr=subprocess.DEVNULL, cwd=REPO)
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
