"""The toy program for scripts/lab/soak.py: a phase's work is done in the daemon itself, without a process for it.

An iteration of eight daemons of the toy program on two cores takes four seconds, nine tenths of which are the starts of 43 processes. Every
`PROCESSES_EVERY`-th iteration is the toy program's own, with all of them, so that what they leave in a daemon is seen too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from fsbarrier import aggregate
from fsbarrier.decisions import JsonRecord
from fsbarrier.loader import load_module
from fsbarrier.node import Node, Weights
from fsbarrier.processes.worker_contract import Main, ProgressWriter
from fsbarrier.program import Program, Result, RowFunction
from fsbarrier.run.working_node import WorkingNode
from fsbarrier.specs import Launch, MergeSpec, Spec
from fsbarrier.workers import toy

PROCESSES_EVERY = 50
R = TypeVar("R", bound=JsonRecord)
PROGRAMS: dict[type[Spec[Any]], Main] = {
    toy.ToyRollout: toy.PROGRAMS["rollout"],
    toy.ToyUpdate: toy.PROGRAMS["update"],
    toy.ToyWait: toy.PROGRAMS["wait"],
    MergeSpec: aggregate.work,
}


class QuickNode(WorkingNode):
    """A node that does a program's work itself, and at once."""

    def run(
        self,
        spec: Spec[R],
        launch: Launch | None = None,
        *,
        in_flight: Weights | None = None,
        calls_engines: bool = False,
    ) -> R:
        told = spec.as_json()
        if "seconds" in told:
            told["seconds"] = 0.0
        result = PROGRAMS[type(spec)](told, self.context.settings, ProgressWriter(None))
        return spec.report_type().from_json(result or {})


def quickly(function: RowFunction | None) -> RowFunction | None:
    """The same row, mostly without its processes."""
    if function is None:
        return None

    def quick(node: Node) -> Result:
        if node.context.iteration % PROCESSES_EVERY != 1 and isinstance(node, WorkingNode):
            node = QuickNode(node.context, node.job, node.workplace)
        return function(node)

    return quick


def quick_program(slow: Program) -> Program:
    return replace(
        slow,
        name="soak",
        rows=tuple(replace(row, each=quickly(row.each), leader=quickly(row.leader)) for row in slow.rows),
    )


PROGRAM = quick_program(load_module("toy").PROGRAM)
