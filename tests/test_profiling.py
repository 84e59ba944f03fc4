"""The profile of one process of one update is where the documentation says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from complete_runs import Bench

pytestmark = pytest.mark.torch


def test_one_process_of_one_update_is_profiled(bench: Bench, tmp_path: Path) -> None:
    words = ("--iterations", "2", "--eval-interval", "0", "trainer.processes_per_node=2", "rollout.tasks=4")
    bench.run(tmp_path, *words, "trainer.profile=2", "trainer.profile_rank=1").check()
    (found,) = tmp_path.rglob("profile.*")
    assert found == tmp_path / "logs" / "attempt_1" / "node_0" / "profile.iteration2.rank1.json.gz"
    assert found.stat().st_mode & 0o077 == 0 and (found.parent / "update.log").exists()
    names = {event["name"] for event in json.loads(gzip.decompress(found.read_bytes()))["traceEvents"]}
    assert any("aten::mm" in name for name in names) and any("backward" in name.lower() for name in names)
