"""Writes docs/state-machine.md from the rules of protocol/machine.py: `python scripts/state_diagram.py` (`--check`: is it up to date?).

What a rule leads to is read from its source, and from the helpers in machine.py that it calls: the stage that it gives the
node, and the actions that it asks for. tests/test_machine.py compares that with what the rules answer.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "state-machine.md"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from generated_page import write_or_check  # noqa: E402

from fsbarrier.protocol import machine  # noqa: E402
from fsbarrier.protocol.machine import RULES, Rule  # noqa: E402
from fsbarrier.protocol.state import Action, Stage  # noqa: E402

HEAD = """# The state machine

<!-- Made by scripts/state_diagram.py from fsbarrier/protocol/machine.py. Do not edit by hand. -->

A node is JOINING, RUNNING or ENDED. At every look it evaluates the rules of its stage in this order. The first rule that applies
decides what it does next. If none applies, it stays as it is and looks again. [The protocol](protocol.md) defines the terms.
"""

ACTIONS = {action.__name__ for action in get_args(Action)}
FUNCTIONS = {
    node.name: node
    for node in ast.parse(inspect.getsource(machine)).body
    if isinstance(node, ast.FunctionDef)
}


def calls(name: str, known: set[str]) -> Iterator[ast.Call]:
    """The calls that a function of machine.py makes, itself and in the helpers that it uses."""
    known.add(name)
    for node in ast.walk(FUNCTIONS[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node
            if node.func.id in FUNCTIONS.keys() - known:
                yield from calls(node.func.id, known)


def named(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def stages(rule: Rule) -> set[Stage]:
    """The stages that a rule gives a node. One that is made without a stage is joining."""
    found = set()
    for call in calls(rule.__name__, set()):
        given = [item.value for item in call.keywords if item.arg == "stage"]
        found |= {Stage[value.attr] for value in given if isinstance(value, ast.Attribute)}
        if named(call) == "Node" and not given:
            found.add(Stage.JOINING)
    return found


def actions(rule: Rule) -> list[str]:
    """The actions that a rule may ask for."""
    return sorted({named(call) for call in calls(rule.__name__, set())} & ACTIONS)


def first_sentence(rule: Rule) -> str:
    text = " ".join((rule.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def page() -> str:
    """The whole document."""
    told: set[Rule] = set()
    return "\n".join([HEAD, *(table(stage, told) for stage in RULES if RULES[stage])])


def table(stage: Stage, told: set[Rule]) -> str:
    """The rules of one stage in their order. A rule in `told`, those of the tables before, is only named; this adds its own."""
    lines = [
        f"## {stage.name}",
        "",
        "| | rule | when | leads to |",
        "| --- | --- | --- | --- |",
    ]
    for number, rule in enumerate(RULES[stage], 1):
        name = f"| {number} | `{rule.__name__}` |"
        leads_to = ", ".join(sorted(other.name for other in stages(rule)))
        lines.append(f"{name} {'as above |' if rule in told else f'{first_sentence(rule)} | {leads_to}'} |")
    told.update(RULES[stage])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), __doc__, "state_diagram.py"))
