"""scripts/mutants.py: a deliberate fault is put in wherever the code lies, one that cannot is an error, and what finds it is told.

A slow test puts in all of them (scripts/mutant_tables/), and takes hours.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import REPO

sys.path.insert(0, str(REPO / "scripts"))
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
    [text] = mutation.mutate(Mutant("", 0, "", (Edit(where, old, new),)), folder).values()
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
    (tmp_path / "area.txt").write_text("# a comment\n\n@ sum: a promise\n? first\n")
    with pytest.raises(ValueError, match=r"area\.txt, line 4"):
        mutation.read_tables(tmp_path)


# Not every day: whoever changes code need not know the list of faults. The script says which ones no longer apply.
@pytest.mark.slow
def test_every_fault_can_be_put_in() -> None:
    found = mutation.read_tables()
    assert len(found) >= 400
    for mutant in found:
        mutation.check(mutant)


@pytest.mark.parametrize(
    ("name", "tests", "how"),
    [
        ("retry: what does not pass", "retry", "tests: test_retry"),
        ("machine/<module>: a node that the newest generation", "machine", "tests: test_machine"),
        ("machine/<module>: a node that the newest generation", "assign | machine", "schedules: "),
    ],
)
def test_what_finds_a_fault_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tests: str, how: str
) -> None:
    monkeypatch.setattr(mutants, "TESTS", (("", tests),))
    [mutant] = [mutant for mutant in mutation.read_tables() if name in mutant.name]
    copy = mutants.Copy(tmp_path, seeds=100)
    verdict = copy.judge(mutant)
    copy.close()
    assert verdict.line.partition("\n    ")[2].startswith(how)


def test_the_table_of_the_proof_names_what_is_harmless() -> None:
    harmless = {mutant.harmless for mutant in mutation.read_tables() if mutant.harmless}
    page = mutants.PAGE.read_text()
    assert [why for why in harmless if why not in page] == []


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_fault_that_breaks_a_promise_survives() -> None:
    argv = [sys.executable, str(REPO / "scripts" / "mutants.py"), "--keep-page"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
