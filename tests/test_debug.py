"""`fsbarrier debug`: what hangs, where, in one archive; and nothing in it that is nobody's business."""

from __future__ import annotations

import os
import signal
import stat
import tarfile
from pathlib import Path

from cluster import Cluster
from commands import typed
from fake_run import FakeRun

from fsbarrier.rundir.paths import RunPaths

SECRET = "a canary that nobody may copy"


def unpacked(archive: Path) -> dict[str, str]:
    """The files of an archive by name, less the folder that all are in."""
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as tar:
        found = {}
        for member in tar.getmembers():
            stream = tar.extractfile(member)
            assert member.isreg() and stream is not None
            found[member.name.partition("/")[2]] = stream.read().decode()
    return found


def hostile_files(paths: RunPaths, outside: Path) -> None:
    """What does not belong to a run, under the names of what is collected."""
    outside.write_text(SECRET)
    logs = paths.node_logs(1, 0)
    (logs / "link.log").symlink_to(outside)
    os.link(outside, logs / "hard.log")
    os.mkfifo(logs / "fifo.log")
    (logs / "device.log").symlink_to("/dev/zero")
    (paths.logs / "attempt_1" / "node_7").symlink_to(outside.parent)
    paths.journal(7, 1).symlink_to(outside)


def test_every_program_writes_its_stack_into_its_own_log(tmp_path: Path) -> None:
    timing = ("coordination.beat_s=0.2", "coordination.dead_s=16")
    flags = (*timing, "toy.phase_s=600", "toy.tasks=3000", f"custom.secret.word={SECRET}")
    with Cluster(tmp_path, 2, *flags, real=True) as cluster:
        paths, out = RunPaths(cluster.log_path), tmp_path / "out.tar.gz"
        for rank in range(2):
            cluster.env[rank] = {"OF_NO_CONCERN": SECRET, "SOME_API_KEY": SECRET}
        cluster.start()
        for rank in range(2):
            cluster.beating(rank, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 1, 200)
        hostile_files(paths, tmp_path / "outside.log")

        def collected() -> tuple[dict[str, str], str]:
            said = typed("debug", "--log-path", cluster.log_path, "--out", out)
            return unpacked(out), said.out

        files, said = collected()
        for rank in range(2):
            logs = f"logs/attempt_1/node_{rank}"
            assert "in pause" in files[f"{logs}/rollout.log"] and "/toy.py" in files[f"{logs}/rollout.log"]
            # All threads of the daemon: its loop, and its heartbeat.
            assert "in _loop" in files[f"{logs}/daemon.log"]
            assert "in _write_heartbeats" in files[f"{logs}/daemon.log"]
            assert f"(pid {cluster.processes[rank].pid}): " in files["nodes.txt"]
        assert "node_joined" in files["events/node_0.inc-0001.jsonl"]
        assert files["logs/attempt_1/node_0/link.log"].startswith("(not collected: ")
        assert files["logs/attempt_1/node_0/fifo.log"].startswith("(not collected: ")
        assert SECRET not in "".join(files.values())
        assert "did not" not in said

        cluster.signal(1, signal.SIGSTOP)
        stopped = f"process {cluster.processes[1].pid} did not: it is stopped, or hangs"
        files, said = collected()
        assert stopped in files["nodes.txt"] and stopped in said

        for rank in range(2):
            cluster.signal(rank, signal.SIGTERM)
            cluster.signal(rank, signal.SIGCONT)
        assert cluster.wait() == {0: 143, 1: 143}
        assert "train_rollout" in collected()[0]["events/node_0.inc-0001.jsonl"]
        assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_the_archive_has_the_ends_of_the_newest_logs(tmp_path: Path) -> None:
    run, out = FakeRun(tmp_path / "run", nodes=1), tmp_path / "out.tar.gz"
    for start in ("first", "second"):
        run.join(0)
        log = run.paths.node_logs(run.incarnations[0], 0) / "daemon.log"
        log.write_text(f"{start} began\n" + "it went on and on\n" * 30_000 + f"{start} ended\n")
    typed("debug", "--log-path", run.log_path, "--out", out)
    files = unpacked(out)
    assert [name for name in files if name.endswith("daemon.log")] == ["logs/attempt_2/node_0/daemon.log"]
    text = files["logs/attempt_2/node_0/daemon.log"]
    assert text.endswith("\nsecond ended\n") and "began" not in text and len(text) > 100_000


def test_a_program_without_progress_shows_where_it_hung(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, 1, "toy.phase_s=600", "toy.tasks=2", "coordination.stall_timeout_s=8", real=True
    ) as cluster:
        cluster.start()
        failed = cluster.wait_for(lambda e: e["event"] == "work_failed")
        assert "no progress for 8 s" in failed["error"]
        assert "/toy.py" in "".join(failed["log"]) and "in pause" in "".join(failed["log"])
