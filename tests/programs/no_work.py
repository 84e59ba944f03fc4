"""The toy program with one row whose function does what none should: `custom.does` says what (a key of DOES)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsbarrier.loader import load_module
from fsbarrier.program import Context, Value

toy = load_module("toy")
DOES: dict[str, Callable[[], Any]] = {
    "returns_nothing": lambda: None,
    "returns_a_set": lambda: Value({"tasks": {1, 2}}),
    "returns_events": lambda: Value({}, 3),
    "leaves": lambda: sys.exit("enough"),
}


def build(ctx: Context) -> Any:
    return DOES[str(ctx.settings.custom["does"])]()


rows = (replace(row, each=build) if row.name == "train_rollout" else row for row in toy.PROGRAM.rows)
PROGRAM = replace(toy.PROGRAM, name="no_work", rows=tuple(rows))
