"""Whole runs of the toy program over real mounts: each node its own client of one directory, with real kernel caches and faults.

The nodes live in mount namespaces of their own, so that all have the same path and none sees through another's caches. Needs root and
FUSE; the GlusterFS part its server. What is asserted: every task exactly once, whatever was killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster
from fuse import mounting
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
    return f"coordination.suspect_s={1 + stale_s}", f"coordination.dead_s={2 + 4 * stale_s}"


#: what each mount believes, and for how long its view of a replaced file may be old
CACHES = {
    "none": ("", 0),
    "a second": ("--entry-s 1 --attr-s 1 --negative-s 1", 1),
    "absences and attributes for 30 s": ("--attr-s 30 --negative-s 30", 0),
    "listings a second old": ("--listing-s 1 --entry-s 1 --attr-s 1 --negative-s 1", 2),
    "no hard links, no exchange": ("--no-links --no-exchange --negative-s 1", 0),
    "lost replies and errors": (
        "--fault lookup:ESTALE:0.002 --fault link:EIO:0.05:after --fault link:EIO:0.05 "
        "--fault rename2:EIO:0.005:after --fault create:EIO:0.005:after --fault opendir:ESTALE:0.002",
        0.5,
    ),
}


@needs_fuse
@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_kills_on_a_mount_lose_and_double_nothing(tmp_path: Path, name: str) -> None:
    flags, stale_s = CACHES[name]
    with fuse_cluster(
        tmp_path, flags, "--iterations", "3", *waits_for(stale_s), "toy.phase_s=0.2"
    ) as cluster:
        cluster.start()
        cluster.in_phase(2, 2)
        cluster.kill(2)
        cluster.wait_for(lambda e: e["event"] == "node_lost" and e["node_rank"] != 2)
        cluster.start(2)
        cluster.in_phase(0, 6, iteration=2)
        cluster.kill(0)
        cluster.start(0)
        assert cluster.wait(deadline_s=200) == {0: 0, 1: 0, 2: 0}, "".join(map(cluster.said, range(3)))
        assert_exactly_once(cluster.log_path, 3)
