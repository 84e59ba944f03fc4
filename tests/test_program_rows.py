"""A program owns its rows: which tables can be walked, and a run of three rows with names of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster
from waiting import DEADLINE_S

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Position
from fsbarrier.protocol.rows import Row, Slice, Table

ROWS: tuple[Row[object], ...] = (
    Row(0, "a"),
    Row(1, "b", each="work", resume="a"),
    Row(2, "c", leader="work"),
)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (Row(1, "a"), Row(2, "b")),
        (Row(0, "a"), Row(2, "b")),
        (Row(1, "a"), Row(0, "b")),
        (Row(0, "a"), Row(0, "b")),
        (Row(0, "a"), Row(1, "a")),
    ],
)
def test_rows_that_cannot_be_walked_are_refused(rows: tuple[Row[object], ...]) -> None:
    with pytest.raises(
        UsageError, match="program mine: its rows must have different names and be numbered from 0"
    ):
        Table("mine", rows)


@pytest.mark.parametrize("resume", ["c", "nowhere"])
def test_a_generation_cannot_go_on_in_a_later_row(resume: str) -> None:
    rows = (Row(0, "a"), Row(1, "b", resume=resume), Row(2, "c"))
    with pytest.raises(
        UsageError, match=f"program mine, b: resume='{resume}' is not this or an earlier phase"
    ):
        Table("mine", rows)


@pytest.mark.parametrize(
    ("row", "last"),
    [
        (Row(1, "b", made_by="placement.update"), "c"),
        (Row(1, "b", each="work", leader="work", made_by="placement.update"), "c"),
        (Row(1, "b", each="work", made_by="placement.update"), "b"),
    ],
    ids=["without work for each", "with work for the leader", "the last of a slice"],
)
def test_a_row_with_makers_has_work_for_each_and_a_row_behind_it(row: Row[str], last: str) -> None:
    rows = (Row(0, "a"), row, Row(2, "c"))
    said = "program mine, b: made_by='placement.update' needs a phase with work for each member"
    with pytest.raises(UsageError, match=said):
        Table("mine", rows, (Slice("part", "a", last, result="a"),))


@pytest.mark.parametrize("names", [("x", "b", "b"), ("a", "x", "b"), ("a", "b", "x"), ("x", "b", "y")])
def test_a_slice_names_rows(names: tuple[str, str, str]) -> None:
    with pytest.raises(UsageError, match="program mine, slice part: no row is called 'x'"):
        Table("mine", ROWS, (Slice("part", *names),))


def test_a_table_knows_its_rows() -> None:
    table = Table("mine", (*ROWS, Row(3, "d", resume="d")), (Slice("part", "b", "c", result="c"),))
    assert [table.index(name) for name in "abcd"] == [0, 1, 2, 3]
    assert [table.resume_index(row) for row in table.rows] == [0, 0, 2, 3]
    assert (table.span("part"), table.span(), table.span("other")) == ((1, 2), (0, 3), (0, 3))
    with pytest.raises(KeyError):
        table.index("e")


def test_only_the_last_iteration_of_a_session_is_closed_and_only_a_whole_one() -> None:
    closing: tuple[Row[object], ...] = (
        Row(1, "b", each="more work"),
        Row(2, "c", leader="work", resume="b"),
    )
    table = Table("mine", ROWS, (Slice("part", "b", "c", result="c"),), closing)

    def rows(iteration: int, until: int | None, choice: str = "") -> list[Row[object]]:
        return [table.row(Position(iteration, phase), until, choice) for phase in range(3)]

    assert rows(3, 3) == rows(3, 3, "whole") == [ROWS[0], *closing]
    assert rows(2, 3) == rows(3, None) == rows(3, 3, "part") == list(ROWS)
    assert [table.resume_index(row) for row in rows(3, 3)] == [0, 1, 1]


@pytest.mark.parametrize("closing", [ROWS[:2], (ROWS[2], ROWS[1]), (Row(2, "d"),), (Row(0, "x"), *ROWS)])
def test_closing_rows_stand_in_the_place_of_the_last(closing: tuple[Row[object], ...]) -> None:
    with pytest.raises(
        UsageError, match=f"program mine: its closing rows .*{closing[-1].name}.* are not its last"
    ):
        Table("mine", ROWS, closing=closing)


@pytest.mark.parametrize(
    ("row", "decides"),
    [
        (Row(0, "a"), False),
        (Row(0, "a", each="work"), True),
        (Row(0, "a", leader="work"), True),
    ],
)
def test_whether_later_generations_need_what_a_row_decides(row: Row[object], decides: bool) -> None:
    assert row.decides is decides


THREE = '''"""Three rows of its own."""

from dataclasses import dataclass

from fsbarrier.decisions import JsonRecord
from fsbarrier.node import Node
from fsbarrier.program import Phase, Program


@dataclass(frozen=True)
class Load(JsonRecord):
    node: int


def dig(node: Node) -> Load:
    return Load(node.context.node_rank)


def weigh(node: Node) -> dict[str, int]:
    return {"loads": len(node.context.reports_of("dig", Load))}


PROGRAM = Program("three", (Phase(0, "dig", each=dig), Phase(1, "weigh", leader=weigh), Phase(2, "rest")))
'''

NO_SUCH_PART = "fsbarrier: error: --rl-phase {}: not supported by program three; drop it\n"


def test_a_program_of_three_rows_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "three.py"
    program.write_text(THREE)
    with Cluster(tmp_path, 2, "--iterations", "2", *FAST, program=str(program)) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        passed = [
            (e["iteration"], e["phase"], e["phase_name"])
            for e in cluster.events()
            if e["event"] == "phase_finished" and e["node_rank"] == 1
        ]
        assert passed == [(i, p, name) for i in (1, 2) for p, name in enumerate(("dig", "weigh", "rest"))]
        (decision, _) = [e["value"] for e in cluster.events() if e["event"] == "decision" and e["phase"] == 1]
        assert decision == {"loads": 2}
        shown = json.loads(command(["status", "--json", "--log-path", str(cluster.log_path)]).stdout)
        assert (shown["state"], shown["iteration"], shown["phase"]) == (
            "finished",
            2,
            {"index": 2, "name": "rest"},
        )
        assert {node["phase"]["name"] for node in shown["nodes"]} == {"rest"}
        assert sorted(shown["phases_s"]) == ["dig", "rest", "weigh"]
        assert [one["iteration"] for one in shown["coordination"]] == [1, 2]
        # A start that chooses a slice for a run that is there is refused like the first.
        again = command(["run", "--master", "--log-path", str(cluster.log_path), "--rl-phase", "update"])
        assert (again.returncode, again.stderr) == (2, NO_SUCH_PART.format("update"))


def test_a_slice_that_a_program_does_not_have_is_refused(tmp_path: Path) -> None:
    """In one line, and before anything is made."""
    program, log_path = tmp_path / "three.py", tmp_path / "run"
    program.write_text(THREE)
    words = ["run", "--master", "--num-nodes", "1", "--log-path", str(log_path), "--program", str(program)]
    refused = command([*words, "--rl-phase", "rollout"])
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", NO_SUCH_PART.format("rollout"))
    assert not log_path.exists()


def command(words: list[str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "fsbarrier", *words]
    return subprocess.run(
        argv, capture_output=True, text=True, cwd=REPO, stdin=subprocess.DEVNULL, timeout=DEADLINE_S
    )
