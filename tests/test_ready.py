"""A node that is back makes itself ready before the others admit it, so they never wait for it. Real daemons."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import FAST, Cluster

from fsbarrier.protocol.membership import PREPARING

UNREADY = str(Path(__file__).parent / "programs" / "unready.py")


def comes_back(cluster: Cluster, incarnation: int) -> None:
    cluster.kill(1)
    cluster.start(1)
    cluster.beating(1, lambda beat: (beat.incarnation, beat.state) == (incarnation, PREPARING))


def takes_part(cluster: Cluster, incarnation: int) -> None:
    """Node 1 is a member, and in the first row of an iteration."""
    began = cluster.wait_for(
        lambda e: (
            (e["event"], e["node_rank"]) == ("generation_started", 1) and e["incarnation"] == incarnation
        )
    )
    assert began["members"] == [0, 1] and began["phase"] == 0


@pytest.mark.slow
def test_the_others_wait_for_no_node_that_is_not_ready(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with Cluster(tmp_path, 2, *FAST, program=UNREADY) as cluster:
        cluster.start()
        cluster.in_phase(1, 1)
        comes_back(cluster, 2)
        shrunk = cluster.wait_for(lambda e: e["event"] == "generation_started" and e["members"] == [0])
        later = shrunk["iteration"] + 2
        cluster.wait_for(lambda e: (e["event"], e["iteration"]) == ("iteration_finished", later))
        cluster.beating(1, lambda beat: beat.state == PREPARING)
        ready.touch()
        takes_part(cluster, 2)
        # If nobody is left to go on without it, it stops that and begins with whoever comes.
        ready.unlink()
        comes_back(cluster, 3)
        cluster.kill(0)
        cluster.start(0)
        begun = cluster.wait_for(
            lambda e: e["event"] == "generation_started" and e["reason"] == "start again"
        )
        assert begun["members"] == [0, 1]
        ready.touch()
        cluster.stop()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said_by_all()
