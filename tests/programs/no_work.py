"""The toy program with one row whose function does what none should: `custom.does` says what (a key of DOES)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsbarrier.loader import load_module
from fsbarrier.node import Node

toy = load_module("toy")
DOES: dict[str, Callable[[Node], Any]] = {
    "returns_a_number": lambda node: 3,
    "returns_a_set": lambda node: {"tasks": {1, 2}},
    "tells_of_a_decision": lambda node: node.event("decision", {"value": 3}),
    "leaves": lambda node: sys.exit("enough"),
}


def misbehave(node: Node) -> Any:
    return DOES[str(node.context.settings.custom["does"])](node)


rows = (replace(row, each=misbehave) if row.name == "train_rollout" else row for row in toy.PROGRAM.rows)
PROGRAM = replace(toy.PROGRAM, name="no_work", rows=tuple(rows))
