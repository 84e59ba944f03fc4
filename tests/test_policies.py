"""What becomes of a run when a node is lost, a program fails or somebody asks it to end: as --on-node-failure says. Real daemons."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster, assert_exactly_once, rolled_out_twice

PROGRAMS = Path(__file__).parent / "programs"
HELD = str(PROGRAMS / "held.py")
FAILING = str(PROGRAMS / "failing.py")
ROLLOUT = (*FAST, "custom.hold=2", "--iterations", "1")


def roll_out(cluster: Cluster) -> None:
    cluster.start()
    for rank in range(3):
        cluster.beating(rank, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 2)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_wait_holds_the_phase_until_the_node_is_back(tmp_path: Path, victim: int) -> None:
    with Cluster(tmp_path, 3, "--on-node-failure", "wait", *ROLLOUT, program=HELD) as cluster:
        roll_out(cluster)
        cluster.kill(victim)
        others = [rank for rank in range(3) if rank != victim]
        for other in others:
            lost = cluster.wait_for(
                lambda e, other=other: (e["event"], e["node_rank"]) == ("node_lost", other)
            )
            assert lost["waiting"] is True and lost["lost"][0]["node_rank"] == victim
        cluster.start(victim)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said(others[0])
        for other in others:
            assert f"node {victim} (" in cluster.said(other) and "waits for its return" in cluster.said(other)
        second = [e for e in cluster.events() if e["event"] == "generation_started" and e["generation"] == 2]
        assert {e["node_rank"] for e in second} == {0, 1, 2}
        assert all(e["members"] == [0, 1, 2] and (e["iteration"], e["phase"]) == (1, 1) for e in second)
        assert_exactly_once(cluster.log_path, 1)
        assert rolled_out_twice(cluster.log_path, 1, "train") == []


@pytest.mark.slow
def test_wait_goes_on_as_it_was_with_a_node_that_only_slept(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, "--on-node-failure", "wait", *ROLLOUT, program=HELD) as cluster:
        roll_out(cluster)
        cluster.signal(0, signal.SIGSTOP)
        cluster.wait_for(lambda e: e["event"] == "node_lost")
        cluster.signal(0, signal.SIGCONT)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said(1)
        assert {e["generation"] for e in cluster.events() if e["event"] == "generation_started"} == {1}
        assert_exactly_once(cluster.log_path, 1)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--on-node-failure", "abort"), "--on-node-failure abort ends the run"),
        pytest.param(("--min-nodes", "3"), "2 left, --min-nodes is 3", marks=pytest.mark.slow),
    ],
)
def test_the_leaders_loss_ends_the_run_where_that_is_asked_for(
    tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    with Cluster(tmp_path, 3, *flags, *ROLLOUT, program=HELD) as cluster:
        roll_out(cluster)
        cluster.kill(0)
        assert cluster.wait(1, 2) == {1: 5, 2: 5}
        for other in (1, 2):
            assert "node 0 (" in cluster.said(other) and why in cluster.said(other)
            assert "phase 2 train_rollout" in cluster.said(other)


@pytest.mark.parametrize(
    ("rank", "row"),
    [(1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 4), (2, 10), (0, 11)])],
)
def test_a_node_whose_program_cannot_work_leaves_and_the_others_go_on(
    tmp_path: Path, rank: int, row: int
) -> None:
    where = (f"custom.fails={rank}", f"custom.row={row}", "--iterations", "2")
    with Cluster(tmp_path / "twice", 3, *FAST, *where, "custom.times=9", program=FAILING) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0} | {rank: 4}, cluster.said(0)
        failed = [e for e in cluster.events() if e["event"] == "work_failed"]
        assert [(e["node_rank"], e["phase"]) for e in failed] == [(rank, row)] * 2
        for node in range(3):
            said = cluster.said(node)
            assert "cannot work and leaves" in said and "ended with exit code 3" in said
        assert f"| row {row} comes to its bad end" in cluster.said(rank)
        assert_exactly_once(cluster.log_path, 2)


@pytest.mark.parametrize(
    ("fails", "flags", "attempts"),
    [("all", (), 2), ("1", ("--on-node-failure", "abort"), 2), ("1", ("--min-nodes", "2"), 2)],
)
def test_a_program_that_cannot_work_ends_the_run_where_nobody_is_left(
    tmp_path: Path, fails: str, flags: tuple[str, ...], attempts: int
) -> None:
    where = (f"custom.fails={fails}", "custom.row=2", "--iterations", "1", *flags)
    with Cluster(tmp_path, 2, *FAST, *where, "custom.times=9", program=FAILING) as cluster:
        cluster.start()
        codes = cluster.wait()
        assert codes == {0: 4, 1: 4}, cluster.said(0)
        # What fails twice in the same way is not tried again, whichever node it fails on.
        for node in range(2):
            assert f"given up after {attempts} attempts" in cluster.said(node)
            assert "ended with exit code 3" in cluster.said(node)
            assert "| row 2 comes to its bad end" in cluster.said(node)


@pytest.mark.parametrize(
    ("rank", "row"),
    [(0, 11), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 1), (2, 10), (1, 6)])],
)
def test_a_program_that_fails_once_does_no_harm(tmp_path: Path, rank: int, row: int) -> None:
    where = (f"custom.fails={rank}", f"custom.row={row}", "--iterations", "1")
    with Cluster(tmp_path / "once", 3, *FAST, *where, "custom.times=1", program=FAILING) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said(0)
        assert_exactly_once(cluster.log_path, 1)
        for node in range(3):
            assert "ended with exit code 3" in cluster.said(node), "all hear why there is another try"


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("returns_a_number", "TypeError: misbehave returned int; a row returns a record, a mapping or None"),
        ("returns_a_set", "TypeError: Object of type set is not JSON serializable"),
        ("tells_of_a_decision", "TypeError: the event 'decision' is one that daemons write themselves"),
        ("leaves", "SystemExit: enough"),
    ],
)
def test_a_function_without_usable_work_is_a_failed_program(tmp_path: Path, does: str, says: str) -> None:
    flags = (*FAST, f"custom.does={does}")
    with Cluster(tmp_path, 1, *flags, program=str(PROGRAMS / "no_work.py")) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 4}, cluster.said(0)
        assert f"phase 2 train_rollout: {says}" in cluster.said(0)


def test_stop_ends_a_run_from_elsewhere(tmp_path: Path) -> None:
    """At the next start of an iteration; at once; and a later start knows nothing of it."""

    def stop(cluster: Cluster, *flags: str) -> set[tuple[str, int, int]]:
        argv = [sys.executable, "-m", "fsbarrier", "stop", "--log-path", str(cluster.log_path), *flags]
        subprocess.run(argv, check=True, cwd=REPO)
        assert cluster.wait() == {0: 0, 1: 0}
        ended = [e for e in cluster.events() if e["event"] == "node_ended"][-2:]
        return {(e["state"], e["iteration"], e["phase"]) for e in ended}

    with Cluster(tmp_path, 2, *FAST, "custom.hold=2", program=HELD) as cluster:
        cluster.start()
        for rank in range(2):
            cluster.in_phase(rank, 2)
        assert stop(cluster, "--now") == {("stopped", 1, 2)}
        cluster.start()
        cluster.wait_for(lambda e: (e["event"], e["generation"], e["phase"]) == ("phase_started", 3, 2))
        assert stop(cluster) == {("stopped", 2, 0)}
