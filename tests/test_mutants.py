"""scripts/lab/mutants.py: a deliberate fault is put in wherever the code lies, one that cannot is an error, and what finds it is told.

A slow test judges all faults of scripts/lab/faults.txt, and takes hours.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import REPO

sys.path.insert(0, str(REPO / "scripts" / "lab"))
import mutants
import mutation
from mutation import DoesNotApply, Edit, Mutant

SOURCE = """
class Pair:
    def sum(self, first, second):  # both
        if (first is None
                and second is None and not self.empty):
            return 0
        total = add(first,
                    second, start=0)
        try:
            return total
        except OSError:
            return None

def sum(first, second):
    return first + second
"""


def put_in(folder: Path, where: str, old: str, new: str) -> str:
    """The mutated source."""
    (folder / "fsbarrier" / "anywhere").mkdir(parents=True, exist_ok=True)
    (folder / "fsbarrier" / "anywhere" / "numbers.py").write_text(SOURCE)
    [text] = mutation.mutate(Mutant(0, "", (Edit(where, old, new),)), folder).values()
    return text


@pytest.mark.parametrize(
    ("where", "old", "new", "expected"),
    [
        ("Pair.sum", "first is None and second is None", "True", "if True and (not self.empty):"),
        ("Pair.sum", "first, second", "second, first", "add(second, first, start=0)"),
        ("Pair.sum", "start=0", "start=1", "add(first, second, start=1)"),
        ("Pair.sum", "add(first, second, start=0)", "0", "total = 0"),
        ("Pair.sum", "except OSError:\n    return None", "except OSError:\n    raise", "except OSError:\n            raise"),
        ("Pair.sum", "if first is None and second is None and not self.empty:\n    return 0", "pass", "pass\n        total"),
        ("numbers/sum", "first + second", "first - second", "return first - second"),
    ],
)  # fmt: skip
def test_code_is_found_whatever_its_layout(
    tmp_path: Path, where: str, old: str, new: str, expected: str
) -> None:
    assert expected in put_in(tmp_path, where, old, new)


@pytest.mark.parametrize(
    ("where", "old", "problem"),
    [
        ("Pair.sum", "first + second", "is not in Pair.sum"),
        ("Pair.product", "first", "is not in Pair.product"),
        ("Pair.sum", "None", "is 3 times in Pair.sum"),
    ],
)
def test_a_fault_that_does_not_apply_is_an_error(tmp_path: Path, where: str, old: str, problem: str) -> None:
    with pytest.raises(DoesNotApply, match=problem):
        put_in(tmp_path, where, old, "True")


def test_a_block_that_is_no_mutant_is_named(tmp_path: Path) -> None:
    table = tmp_path / "some.txt"
    table.write_text("# a comment\n\n@ sum: a promise\n! first\n")
    with pytest.raises(ValueError, match=r"some\.txt, line 4"):
        mutation.read_table(table)


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
