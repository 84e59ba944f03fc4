"""`fsbarrier debug`: what hangs, where, on every node, in one archive; and nothing in it that is nobody's business."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from cluster import Cluster
from waiting import until

from fsbarrier import cli
from fsbarrier.node.debug_report import DebugReports
from fsbarrier.rundir import debug_requests
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.stack_signal import SIGNAL
from fsbarrier.supervision import processes
from fsbarrier.supervision.stacks import stacks_of
from fsbarrier.supervision.supervisor import Child, with_this_package

SECRET = "a canary that nobody may copy"
HANGS = """
import os, sys, threading
{imports}
def hangs_here():
    print("ready", flush=True)
    threading.Event().wait()
hangs_here()
"""


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


def answers(files: dict[str, str]) -> dict[str, str]:
    return {Path(name).name: text for name, text in files.items() if name.startswith("logs/debug/")}


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
    paths.debug.mkdir(exist_ok=True)
    paths.debug_answer("000001", 7).symlink_to(outside)
    os.mkfifo(paths.debug_answer("000001", 8))
    (paths.stops / "debug-not a key.json").write_text("{}")


def test_what_every_node_does_is_in_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timing = ("coordination.beat_s=0.2", "coordination.suspect_s=8", "coordination.dead_s=16")
    flags = (*timing, "toy.phase_s=600", "toy.tasks=3000", f"custom.secret.word={SECRET}")
    with Cluster(tmp_path, 2, *flags) as cluster:
        log_path, paths = str(cluster.log_path), RunPaths(cluster.log_path)
        for rank in range(2):
            cluster.env[rank] = {"OF_NO_CONCERN": SECRET, "SOME_API_KEY": SECRET}
        cluster.start()
        for rank in range(2):
            cluster.beating(rank, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 1, 200)
        hostile_files(paths, tmp_path / "outside.log")

        assert cli.main(["debug", "--log-path", log_path]) == 0
        files = unpacked(paths.debug_archive("000001"))
        found = answers(files)
        for rank in range(2):
            text = found[f"000001.node-{rank:04d}.txt"]
            assert "train_rollout" in text and "fsbarrier.workers.toy" in text
            # The program, and the loop of the daemon.
            assert '/workers/toy.py"' in text and "in pause" in text
            assert '/node/polling.py"' in text and "in _loop" in text
            assert "GiB free" in text and ": parent " in text and "(not done" not in text
            assert f"  {cluster.log_path}/logs/attempt_1/node_{rank}/daemon.log" in text
        assert "node_joined" in files["events/node_0.inc-0001.jsonl"]
        assert (
            "logs/attempt_1/node_1/daemon.log" in files
            and "coordination/beats/node-0000.inc-0001.json" in files
        )
        assert files["logs/attempt_1/node_0/link.log"].startswith("(not collected: ")
        assert files["logs/attempt_1/node_0/fifo.log"].startswith("(not collected: ")
        assert SECRET not in "".join(files.values())
        assert "did not answer" not in capsys.readouterr().out

        # One daemon is stopped: the other answers.
        cluster.signal(1, signal.SIGSTOP)
        out = tmp_path / "out.tar.gz"
        assert cli.main(["debug", "--log-path", log_path, "--out", str(out)]) == 0
        said = capsys.readouterr().out
        assert f"(pid {cluster.processes[1].pid}) did not answer" in said and "node 0 on" not in said
        files = unpacked(out)
        assert set(answers(files)) == {"000002.node-0000.txt"}
        assert "node 0 answered" in files["nodes.txt"] and "did not answer" in files["nodes.txt"]

        for rank in range(2):
            cluster.signal(rank, signal.SIGTERM)
            cluster.signal(rank, signal.SIGCONT)
        assert cluster.wait() == {0: 143, 1: 143}
        assert cli.main(["debug", "--log-path", log_path, "--out", str(out)]) == 0
        files = unpacked(out)
        assert not answers(files) and "train_rollout" in files["events/node_0.inc-0001.jsonl"]
        assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def running(code: str, folder: Path, env: dict[str, str]) -> Child:
    """A Python program that has said that it is ready."""
    child = Child.start([sys.executable, "-c", code], env=env, log_file=folder / "log", name="hangs")
    until(lambda: "ready" in (folder / "log").read_text().splitlines())
    return child


def tree_of(child: Child) -> dict[int, int]:
    return {pid: processes.Stat(pid).start for pid in child.pids()}


def test_only_programs_that_can_tell_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other would be ended by the signal: a program that is not ours, and a fork of one that is."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for number, imports in enumerate(["", "import fsbarrier", "import fsbarrier; os.fork()"]):
        folder = tmp_path / str(number)
        with running(HANGS.format(imports=imports), folder, with_this_package(os.environ)) as child:
            tree = tree_of(child)
            for _ in range(2):
                found = stacks_of(tree)
                assert ["in hangs_here" in text for text in found.values()] == [True] * bool(imports)
            assert tree_of(child) == tree


def test_a_stopped_program_is_said_to_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with running(HANGS.format(imports="import fsbarrier"), tmp_path, with_this_package(os.environ)) as child:
        os.kill(child.pid, signal.SIGSTOP)
        assert "it is stopped, or hangs" in stacks_of(tree_of(child))[child.pid]


@pytest.mark.parametrize(
    "undone",
    [
        # As Python does at its end.
        f"import faulthandler; faulthandler.unregister({SIGNAL})",
        # As a library might that sets all signals back.
        f"import signal; signal.signal({SIGNAL}, signal.SIG_DFL)",
    ],
)
def test_a_program_that_lost_its_handler_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undone: str
) -> None:
    """It still has the file by which it is known to tell its stacks."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with running(
        HANGS.format(imports=f"import fsbarrier; {undone}"), tmp_path, with_this_package(os.environ)
    ) as child:
        tree = tree_of(child)
        assert child.pid not in stacks_of(tree)
        assert tree_of(child) == tree


def test_a_signal_that_comes_while_a_program_ends_does_not_kill_it(tmp_path: Path) -> None:
    """Between the look at its handlers and the signal, Python may have let go of the handler."""
    undone = f"import fsbarrier, faulthandler; faulthandler.unregister({SIGNAL})"
    imports = f"{undone}; os.kill(os.getpid(), {SIGNAL})"
    with running(HANGS.format(imports=imports), tmp_path, with_this_package(os.environ)) as child:
        assert child.poll() is None


def test_py_spy_is_used_where_it_may_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees a program that cannot write its stacks itself; where it fails, the program is asked."""
    spy = tmp_path / "py-spy"
    spy.write_text(
        '#!/bin/sh\n[ -e "$0.refused" ] && exit 1\necho "Process $3: python SECRET"\necho "spied $1 $2"\n'
    )
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with running(HANGS.format(imports="import fsbarrier"), tmp_path, with_this_package(os.environ)) as child:
        assert stacks_of(tree_of(child)) == {child.pid: "spied dump --pid\n"}
        (tmp_path / "py-spy.refused").touch()
        assert "in hangs_here" in stacks_of(tree_of(child))[child.pid]


def test_a_part_that_hangs_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the node's loop waits for nothing."""
    goes_on, paths = threading.Event(), RunPaths(tmp_path)
    monkeypatch.setattr("fsbarrier.node.debug_report.PART_S", 0.5)
    monkeypatch.setattr("fsbarrier.node.debug_report.accelerators.in_use", lambda: goes_on.wait() and [])
    old, new = debug_requests.request(paths), debug_requests.request(paths)
    reports = DebugReports(paths, 3, 1.0, {old}, lambda: "state")
    try:
        reports.look({old})
        reports.look({old, new})
        until(lambda: paths.debug_answer(new, 3).exists())
    finally:
        goes_on.set()
    # What was asked before this node started concerns others.
    assert debug_requests.answered(paths, old) == set() and debug_requests.answered(paths, new) == {3}
    text = paths.debug_answer(new, 3).read_text()
    assert "=== accelerators\n(not done within 0.5 s)" in text and "GiB free" in text
