"""scripts/lab/soak.py: what a long run leaves and holds is bounded, and the script says what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import REPO

sys.path.insert(0, str(REPO / "scripts" / "lab"))
import soak


def test_a_bound_that_was_exceeded_is_named() -> None:
    bound = soak.Bound("open files", "", 64.0)
    bound.see(64.0)
    assert bound.line.endswith("ok")
    bound.see(65.0)
    bound.see(3.0)
    assert bound.line.endswith("EXCEEDED") and "65.0" in bound.line


def test_files_and_folders_are_counted_also_while_others_remove_them(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    assert soak.count_below(tmp_path) == 3
    assert soak.count_below(tmp_path / "gone") == 0


@pytest.mark.slow
def test_two_hundred_iterations_of_three_struck_nodes() -> None:
    argv = [
        sys.executable,
        str(REPO / "scripts" / "lab" / "soak.py"),
        "--nodes",
        "3",
        "--iterations",
        "200",
        "--seed",
        "3",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
