"""The state machine, row by row: a node, what it sees and the time give its next state and what it asks for.

Each row says in its name what happens, and names the rule that answers (None: none does). After the rows of a rule stand those in which
it nearly answers. The rows are in core_joining.py, core_running.py and core_settings.py; who the nodes are, and what they see where a
row says nothing, is in core_builders.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from core_builders import asked_to_stop
from core_cases import Case
from core_joining import ANY_STAGE, JOINING_ROWS
from core_running import HERE, RUNNING_ROWS, released
from core_settings import SETTINGS_ROWS

from fsbarrier.protocol import facts, machine, membership, rows, state
from fsbarrier.protocol.machine import Rule, step
from fsbarrier.protocol.situation import Situation
from fsbarrier.protocol.state import Stage
from scripts import state_diagram

ENDED_ROWS = [
    Case(
        "a node that has ended does nothing more",
        replace(HERE, stage=Stage.ENDED),
        released(stop=asked_to_stop()),
        None,
    )
]

CASES = [*ANY_STAGE, *JOINING_ROWS, *RUNNING_ROWS, *SETTINGS_ROWS, *ENDED_ROWS]


def who_answers(case: Case) -> Rule | None:
    """The rule that answers, and that it alone is what `step` is."""
    situation = Situation(case.node, case.view, case.now, case.rules)
    in_order = machine.RULES[case.node.stage]
    if case.answers is not None:
        in_order = (*machine.BEFORE_THE_ANSWERS, *case.answers, *machine.AFTER_THE_ANSWERS)
    return next((rule for rule in in_order if rule(situation) is not None), None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_is_answered_by_its_rule(case: Case) -> None:
    node, actions = step(case.node, case.view, case.now, case.rules, case.answers)
    assert who_answers(case) is case.rule
    assert tuple(actions) == case.asks
    assert node == case.then


def test_every_rule_answers_in_a_row() -> None:
    for stage, in_order in machine.RULES.items():
        answered = {case.rule for case in CASES if case.node.stage is stage}
        assert [rule.__name__ for rule in in_order if rule not in answered] == []


@pytest.mark.parametrize("case", JOINING_ROWS, ids=lambda case: case.name)
def test_whom_a_start_waits_for(case: Case) -> None:
    """Those who are missing, if this is all that it waits for: not where it waits to be admitted, or for a last call to end."""
    named = machine.awaited(case.node, case.view, case.now, case.rules)
    situation = Situation(case.node, case.view, case.now, case.rules)
    may_begin = case.rules.limits.last_call_s is not None and len(situation.starting) >= case.rules.min_nodes
    waits = case.rule is machine.wait_for_all_nodes and not may_begin
    assert list(named) == (list(situation.missing) if waits else [])


def test_no_two_rows_have_one_name() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_what_the_page_says_that_rules_lead_to_is_what_they_do() -> None:
    """The page reads it from the source; the rows show it."""
    for stage, in_order in machine.RULES.items():
        for rule in in_order:
            answered = [case for case in CASES if case.node.stage is stage and case.rule is rule]
            asked = {type(action).__name__ for case in answered for action in case.asks}
            assert sorted(asked) == state_diagram.actions(rule), rule.__name__
            reached = {case.then.stage for case in answered}
            assert state_diagram.stages(rule) - {stage} == reached - {stage}, rule.__name__


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(Path(state_diagram.__file__)), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


RECORDS = {
    kind
    for module in (facts, membership, rows, state)
    for kind in vars(module).values()
    if isinstance(kind, type) and is_dataclass(kind)
}


@pytest.mark.parametrize("kind", sorted(RECORDS, key=lambda kind: kind.__name__))
def test_what_the_core_remembers_is_never_changed_in_place(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen and "__slots__" in vars(kind)
