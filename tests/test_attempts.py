"""What follows when programs have failed: by the failures of an iteration so far, and those of the present row. No files, no clocks."""

from __future__ import annotations

from typing import Any

import pytest
from core_builders import (
    FIRST,
    MERGE,
    NOW,
    ROLL_OUT,
    at_row,
    failures,
    generation,
    rules,
    sees,
)

from fsbarrier.protocol.attempts import after_a_failure
from fsbarrier.protocol.facts import Fact, FailedProgram, Generation
from fsbarrier.protocol.situation import Situation

NOTICED = "!"


def after(
    now: dict[int, str],
    before: tuple[FailedProgram, ...] = (),
    *,
    code: int | None = None,
    members: tuple[int, ...] = (0, 1, 2),
    **changes: Any,
) -> Generation:
    """The next generation. `now`: rank -> the message of its failure, with `NOTICED` if it is another node's."""
    known = generation(ranks=members, failures=before)
    facts = {}
    for rank, said in now.items():
        value: dict[str, Any] = {"error": said.strip(NOTICED), "log": ["last words"]}
        value |= {"noticed": True} if NOTICED in said else {}
        facts[rank] = Fact(rank, 1, "failed", value if code is None else {**value, "exit_code": code})
    node = at_row(0, ROLL_OUT, generation=known)
    return after_a_failure(Situation(node, sees(known, failed=facts), NOW, rules(**changes)))


def once(
    *ranks: int, said: str = "no kernel", attempt: int = 1, noticed: bool = False
) -> tuple[FailedProgram, ...]:
    return tuple(FailedProgram(attempt, rank, ROLL_OUT, said, noticed) for rank in ranks)


@pytest.mark.parametrize(
    ("retries", "tried", "tried_again"),
    [(2, 0, True), (2, 1, True), (2, 2, False), (1, 1, False), (0, 0, False)],
)
def test_a_program_is_tried_again_as_often_as_allowed(retries: int, tried: int, tried_again: bool) -> None:
    made = after(
        {1: "another", 2: "no kernel"}, failures(tried, rank=0), retries=retries, on_node_failure="wait"
    )
    assert made.members == FIRST.members and (made.attempt == tried + 1 if tried_again else made.verdict)


HOW_IT_GOES_ON: list[tuple[str, dict[int, str], tuple[FailedProgram, ...], dict[str, Any], str]] = [
    ("the first failure is tried again", {1: "no kernel"}, (), {}, "again"),
    ("another one too", {1: "no memory"}, once(1), {}, "again"),
    ("the same in another row too", {1: "no kernel"}, (FailedProgram(1, 1, MERGE, "no kernel"),), {}, "again"),
    ("the same on the same node: it leaves", {1: "no kernel"}, once(1), {}, "without 1"),
    ("numbers do not count", {1: "no kernel 7 at 0xa1"}, once(1, said="no kernel # at #"), {}, "without 1"),
    ("each of three times in other ways", {1: "c"}, (*once(1, said="a"), *once(1, said="b", attempt=2)), {}, "without 1"),
    ("two nodes of three that fail alike leave together", {0: "x", 1: "x"}, once(0, 1, said="x"), {}, "without 0, 1"),
    ("a node that failed only once stays", {0: "x", 1: "y"}, once(1, said="y"), {}, "without 1"),
    ("the same on all nodes ends the run", {0: "x", 1: "x", 2: "x"}, once(0, 1, 2, said="x"), {}, "end"),
    ("the same on another node ends the run", {1: "x"}, once(2, said="x"), {}, "end"),
    ("also if that one was cancelled when the first failed", {1: "x"}, (*once(1, said="x"), *once(2, said="x")), {}, "end"),
    ("as one failed that has left", {1: "x"}, once(2, said="x", attempt=0), {"members": (0, 1)}, "end"),
    ("what has left does not count as an attempt", {1: "y"}, once(2, said="x", attempt=0), {"members": (0, 1)}, "again"),
    ("one node alone ends", {0: "x"}, once(0, said="x"), {"members": (0,)}, "end"),
    ("--min-nodes", {1: "x"}, once(1, said="x"), {"min_nodes": 3}, "end"),
    ("wait", {1: "x"}, once(1, said="x"), {"on_node_failure": "wait"}, "end"),
    ("abort", {1: "x"}, once(1, said="x"), {"on_node_failure": "abort"}, "end"),
    ("its partners are not blamed", {0: "lost!", 1: "x"}, (*once(0, noticed=True), *once(1, said="x")), {}, "without 1"),
    ("nobody is, if all only noticed it; that is tried to the end", {0: "lost!"}, once(0, said="lost", noticed=True), {}, "again"),
    ("and ends the run", {0: "lost!"}, (*once(0, noticed=True), *once(0, attempt=2, noticed=True)), {}, "end"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("now", "before", "changes", "then"),
    [row[1:] for row in HOW_IT_GOES_ON],
    ids=[row[0] for row in HOW_IT_GOES_ON],
)
def test_after_a_failure_the_run_tries_again_or_goes_on_without_nodes_or_ends(
    now: dict[int, str], before: tuple[FailedProgram, ...], changes: dict[str, Any], then: str
) -> None:
    made = after(now, before, **changes)
    out = ", ".join(str(member.rank) for member in made.dismissed)
    assert ("end" if made.verdict else f"without {out}" if out else "again") == then
    assert {member.rank for member in made.members}.isdisjoint(member.rank for member in made.dismissed)
    if made.dismissed:
        assert made.attempt == 0 and made.leader == min(made.ranks), (
            "those that are left have all their attempts"
        )


def test_what_is_said_of_it() -> None:
    first = after({1: "lost!", 2: "no kernel"})
    where = "node 2 (host2), iteration 1, phase 2 roll_out: no kernel"
    assert first.reason == f"again: {where}", "not what only followed from it"
    assert first.failures == (
        FailedProgram(1, 1, ROLL_OUT, "lost", True),
        FailedProgram(1, 2, ROLL_OUT, "no kernel"),
    )
    last = after({2: "no kernel"}, once(2), on_node_failure="abort")
    assert last.verdict is not None and (last.verdict.exit_code, last.reason) == (4, "program failed")
    assert (
        last.verdict.reason
        == f"{where}; given up after 2 attempts, as it failed in the same way before\n  | last words"
    )
    full = after(
        {2: "/data: Permission denied"}, once(2, said="/data: Permission denied"), members=(2,), code=3
    )
    assert full.verdict is not None and full.verdict.exit_code == 3
    left = after({2: "no kernel"}, once(2))
    assert left.reason.startswith(
        f"node 2 (host2) cannot work and leaves: {where}; given up after 2 attempts"
    )


def test_a_run_that_is_refused_is_not_tried_again() -> None:
    fact = Fact(1, 1, "failed", {"error": "too few", "log": ["a table"], "refused": True})
    made = after_a_failure(Situation(at_row(0, ROLL_OUT), sees(failed={1: fact}), NOW, rules()))
    assert made.verdict is not None and (made.verdict.exit_code, made.reason) == (2, "refused")
    assert made.verdict.reason == "node 1 (host1), iteration 1, phase 2 roll_out: too few\n  | a table"
