"""scripts/lab/soak.py: what a long run leaves and holds is bounded, and the script says what is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cluster import REPO


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
