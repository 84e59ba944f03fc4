"""scripts/lab/mutants.py: a deliberate fault is put in wherever the code lies, one that cannot is an error, and what finds it is told.

A slow test judges all faults of scripts/lab/faults.txt, and takes hours.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from cluster import REPO

sys.path.insert(0, str(REPO / "scripts" / "lab"))
import mutants
import mutation


def test_every_fault_breaks_an_invariant_and_can_be_put_in() -> None:
    invariants = set(re.findall(r"^\| (I\d+) \|", (REPO / "docs" / "protocol.md").read_text(), re.MULTILINE))
    faults = mutation.read_table()
    assert 60 <= len(faults) <= 110
    assert [fault.name for fault in faults if fault.promise.partition(",")[0] not in invariants] == []
    asked = {*mutants.USUAL_TESTS, *(name for fault in faults for name in fault.tests)}
    assert [name for name in sorted(asked) if not (REPO / "tests" / f"test_{name}.py").exists()] == []
    for fault in faults:
        mutation.check(fault)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_fault_survives() -> None:
    argv = [sys.executable, str(REPO / "scripts" / "lab" / "mutants.py")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
