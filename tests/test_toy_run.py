"""Whole runs of the toy program with real daemons: the clean path, a node that comes back, stops, signals."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path

import pytest
from cluster import FAST, Cluster, assert_exactly_once, leftovers
from commands import typed
from waiting import until

from fsbarrier.program import PHASE_NAMES

HELD = str(Path(__file__).parent / "programs" / "held.py")


def test_clean_run_shows_every_phase_in_order(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, "--iterations", "1", "--shared-group", *FAST, real=True) as cluster:
        cluster.start(1, 0)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        for rank in range(2):
            started = [
                (e["iteration"], e["phase"], e["phase_name"])
                for e in cluster.events()
                if e["event"] == "phase_started" and e["node_rank"] == rank
            ]
            assert started == [(1, p, name) for p, name in enumerate(PHASE_NAMES)]
        assert_exactly_once(cluster.log_path, 1)
        assert leftovers(cluster.log_path) == {}
        written = [path for path in cluster.log_path.rglob("*") if not path.is_symlink()]
        assert [str(path) for path in written if path.stat().st_mode & 0o067 != 0o060] == []


def test_a_killed_node_comes_back_at_the_next_iteration(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, "--iterations", "3", *FAST, "toy.phase_s=0.2") as cluster:
        cluster.start()
        cluster.in_phase(1, 2)
        cluster.kill(1)
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said(1)
        back = [e for e in cluster.events() if e["event"] == "generation_started" and e["node_rank"] == 1]
        assert back[-1]["members"] == [0, 1, 2] and back[-1]["phase"] == 0
        assert_exactly_once(cluster.log_path, 3)


@pytest.mark.slow
def test_a_run_that_is_moved_away_is_not_begun_again_in_its_old_place(tmp_path: Path) -> None:
    """As when a disk is unmounted: nothing must be written into the mount point, and the run can be moved back."""
    with Cluster(tmp_path, 2, *FAST, "coordination.dead_s=1", "toy.phase_s=0.5") as cluster:
        cluster.start()
        # In the first iteration each row still makes its folder.
        cluster.in_phase(0, 2)
        cluster.log_path.rename(tmp_path / "away")
        assert cluster.wait() == {0: 3, 1: 3}, cluster.said(0)
        assert not cluster.log_path.exists(), [*cluster.log_path.rglob("*")]


def test_two_runs_on_the_same_node_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each has its own accelerators. One of them is killed in the middle of its rollout, and started again meanwhile."""
    flags = ("--iterations", "1", "--rl-phase", "rollout", *FAST, "custom.hold=2")
    with (
        Cluster(tmp_path / "a", 1, *flags, program=HELD, real=True) as killed,
        Cluster(tmp_path / "b", 1, *flags, program=HELD, real=True) as other,
    ):
        for cluster, devices in ((killed, "0,1"), (other, "2,3")):
            cluster.env[0] = {"CUDA_VISIBLE_DEVICES": devices}
            cluster.start()
        for cluster, devices in ((killed, "0,1"), (other, "2,3")):
            cluster.in_phase(0, 2)
            seen = set()
            for pid in cluster.running(0, "fsbarrier.workers.toy"):
                # It may have ended since.
                with contextlib.suppress(OSError):
                    seen |= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            assert {v for v in seen if v.startswith(b"CUDA_VISIBLE")} == {
                f"CUDA_VISIBLE_DEVICES={devices}".encode()
            }
        killed.kill(0)
        killed.start()
        assert (killed.wait(), other.wait()) == ({0: 0}, {0: 0}), other.said(0)
        assert {event["generation"] for event in other.events()} <= {0, 1}
        for cluster in (killed, other):
            assert_exactly_once(cluster.log_path, 1)
            assert leftovers(cluster.log_path) == {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_node_completely(tmp_path: Path, number: int, code: int) -> None:
    with Cluster(tmp_path, 1, *FAST, "toy.phase_s=30", real=True) as cluster:
        cluster.start()
        cluster.wait_for(lambda e: e["event"] == "phase_started" and e["phase"] == 2)
        cluster.signal(0, number)
        assert cluster.wait() == {0: code}
        assert leftovers(cluster.log_path) == {}
        # Whoever else is there goes on at once, and the next start waits for nothing.
        shown = json.loads(typed("status", "--json", "--no-watch", "--log-path", cluster.log_path).out)
        assert shown["nodes"][0]["state"] == "left"


def test_a_second_daemon_of_a_rank_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, *FAST, "toy.phase_s=30") as cluster:
        cluster.start()
        cluster.in_phase(1, 2)
        first = cluster.processes[1]
        cluster.start(1)
        assert cluster.wait(1) == {1: 2}
        assert "already running" in cluster.said(1)
        assert first.poll() is None
        first.kill()
        first.wait()


def test_a_start_that_cannot_join_says_so_in_one_line(tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, "--iterations", "1", *FAST) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        for name in ("joins", "beats"):  # not directories any more
            folder, kept = cluster.paths.coordination / name, tmp_path / name
            folder.rename(kept)
            folder.touch()
            before = cluster.said(0)
            cluster.start()
            assert cluster.wait() == {0: 3}, cluster.said(0)
            line = cluster.said(0).removeprefix(before)
            assert re.fullmatch(
                rf"fsbarrier: error: cannot join the run at .*{re.escape(str(folder))}'\n", line
            )
            folder.unlink()
            kept.rename(folder)


@pytest.mark.slow
def test_a_start_removes_what_a_killed_one_left_in_the_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with Cluster(tmp_path, 1, "--iterations", "1", *FAST, "toy.phase_s=1") as cluster:
        cluster.env[0] = {"TMPDIR": str(temporary)}
        cluster.start()
        cluster.in_phase(0, 2)
        cluster.kill(0)
        (left,) = temporary.glob("fsbarrier-*/*-n0-*")
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert not left.exists() and not list(temporary.glob("fsbarrier-*/*-n0-*"))


@pytest.mark.slow
def test_two_daemons_of_one_rank_that_do_not_see_each_other(tmp_path: Path) -> None:
    """As in two containers, where no lock tells them apart. One that beats is left alone; one that does not beat has lost its rank: the
    newer incarnation stays, and the older one ends with code 6 when it wakes."""
    # A busy machine must not make the first one look silent.
    patient = ("coordination.beat_s=0.2", "coordination.dead_s=10")
    with Cluster(tmp_path, 2, "--iterations", "2", *patient, "toy.phase_s=0.5", "toy.tasks=24") as cluster:
        cluster.start()
        cluster.in_phase(1, 2)
        first = cluster.processes[1]
        (tmp_path / "elsewhere").mkdir()
        cluster.env[1] = {"TMPDIR": str(tmp_path / "elsewhere")}
        cluster.start(1)
        assert cluster.wait(1) == {1: 2} and "node 1 of" in cluster.said(1) and first.poll() is None
        first.send_signal(signal.SIGSTOP)
        cluster.start(1)
        cluster.wait_for(lambda e: e["event"] == "node_joined" and e["incarnation"] == 2)
        first.send_signal(signal.SIGCONT)
        assert first.wait(60) == 6, cluster.said(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(1)
        assert "node 1 was started again on " in cluster.said(1)
        assert_exactly_once(cluster.log_path, 2)


def test_rollouts_and_updates_can_be_started_apart(tmp_path: Path) -> None:
    def phases(cluster: Cluster, generation: int) -> list[tuple[int, int]]:
        events = [e for e in cluster.events() if e["event"] == "phase_started" and e["node_rank"] == 0]
        return [(e["iteration"], e["phase"]) for e in events if e["generation"] == generation]

    with Cluster(tmp_path, 2, "--rl-phase", "rollout", "--iterations", "2", *FAST) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        assert phases(cluster, 1) == [(i, p) for i in (1, 2) for p in range(7)]
        cluster.flags = ("--rl-phase", "update", "--iterations", "2")
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        assert phases(cluster, 2) == [(i, p) for i in (1, 2) for p in range(7, 14)]
        cluster.flags = ("--rl-phase", "both", "--iterations", "3")
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        assert phases(cluster, 3) == [(3, p) for p in range(14)]


@pytest.mark.parametrize("begun", [True, False], ids=["in a phase", "about to join"])
def test_stop_names_all_nodes_that_it_ends(tmp_path: Path, begun: bool) -> None:
    """Also those that end while it looks whom it reaches, and those that appear only then."""
    nodes = 3 if begun else 1
    with Cluster(tmp_path, nodes, *FAST, "toy.phase_s=30") as cluster:
        cluster.start()
        record = cluster.paths.record
        if begun:
            for rank in range(nodes):
                cluster.in_phase(rank, 2)
        else:
            until(record.exists, cluster.said_by_all)
        said = typed("stop", "--now", "--log-path", cluster.log_path)
        who = "nodes 0, 1, 2" if begun else "node 0"
        assert f"asked {who} of run" in said.out
        assert cluster.wait() == dict.fromkeys(range(nodes), 0)
