"""The last policy of a run is evaluated too: whoever dies meanwhile, and once only."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from cluster import FAST, Cluster

from fsbarrier.trajectories import load

PROGRAM = Path(__file__).parent / "programs" / "closing.py"


def final_evaluations(cluster: Cluster) -> list[dict[str, Any]]:
    return [event for event in cluster.events() if event["event"] == "evaluated" and event.get("final")]


def assert_evaluated(cluster: Cluster, iteration: int) -> None:
    """The policy that iteration `iteration` has made was evaluated on every task."""
    event = final_evaluations(cluster)[-1]
    assert (event["iteration"], event["phase"], event["policy_version"]) == (iteration, 13, iteration)
    merged = load(cluster.paths.merged("test", iteration + 1))
    assert sorted(one["task_index"] for one in merged["trajectories"]) == list(range(24))
    assert {one["policy_version"] for one in merged["trajectories"]} == {iteration}


def test_the_final_evaluation_is_done_although_the_leader_dies_in_it(tmp_path: Path) -> None:
    # Nodes that start together on a busy machine may come seconds apart, and node 0 that has nothing to do stays for `dead_s`.
    flags = (*FAST, "coordination.dead_s=10", "--iterations", "1", "toy.phase_s=0.01", "custom.hold_s=60")
    with Cluster(tmp_path, 2, *flags, program=str(PROGRAM)) as cluster:
        cluster.start()
        closing = ("phase_started", 0, 13)
        cluster.wait_for(lambda e: (e["event"], e["node_rank"], e["phase"]) == closing)
        cluster.kill(0)
        assert cluster.wait(1) == {1: 0}, cluster.said(1)
        assert_evaluated(cluster, 1)
        # Whoever comes later finds nothing left to do.
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}
        assert len(final_evaluations(cluster)) == 1


def test_a_run_whose_iterations_are_done_makes_up_for_a_missing_evaluation(tmp_path: Path) -> None:
    """Its program did not evaluate at the end when it did them."""
    program = tmp_path / "mine.py"
    program.write_text('from fsbarrier.loader import load_module\nPROGRAM = load_module("toy").PROGRAM\n')
    with Cluster(
        tmp_path, 1, *FAST, "toy.phase_s=0.01", "--iterations", "2", program=str(program)
    ) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert not final_evaluations(cluster)
        program.write_text(PROGRAM.read_text())
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert_evaluated(cluster, 2)
        assert [e["phase"] for e in cluster.events() if e["event"] == "phase_started"][-2:] == [12, 13]
        # The run goes on from there: what was sampled then is iteration 3's evaluation, and is not done again.
        cluster.flags = (*cluster.flags[:-1], "3")
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert_evaluated(cluster, 3)
        parts = cluster.paths.trajectories("test").glob("*iteration3_rank_*.part")
        assert len([*parts]) == 1


def test_a_run_that_was_stopped_in_row_13_and_is_to_end_there_evaluates(tmp_path: Path) -> None:
    """The iteration was not to be the last one when the run was stopped."""
    flags = (*FAST, "toy.phase_s=0.01", "custom.hold_s=60", "--iterations")
    with Cluster(tmp_path, 1, *flags, "3", program=str(PROGRAM)) as cluster:
        cluster.start()
        cluster.in_phase(0, 13)
        cluster.signal(0, signal.SIGTERM)
        assert cluster.wait() == {0: 143}
        cluster.flags = (*cluster.flags[:-1], "1")
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert_evaluated(cluster, 1)
        begun = [e["phase"] for e in cluster.events() if e["event"] == "phase_started"]
        assert begun == [*range(14), 12, 13]
