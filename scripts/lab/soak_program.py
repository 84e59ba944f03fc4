"""The toy program for scripts/lab/soak.py: a phase's work is done in the daemon itself, without a process for it.

An iteration of eight daemons of the toy program on two cores takes four seconds, nine tenths of which are the starts of 43 processes. Every
`PROCESSES_EVERY`-th iteration is the toy program's own, with all of them, so that what they leave in a daemon is seen too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from fsbarrier.data.merge import MergeRequest, merge
from fsbarrier.loader import load_module
from fsbarrier.processes.worker_contract import ProgressWriter
from fsbarrier.program import Command, Context, Program, Steps, Value, Work
from fsbarrier.store.typed import from_spec
from fsbarrier.workers import toy

PROCESSES_EVERY = 50


def without_processes(work: Work) -> Work:
    """The result of what a command would do, which is done now; other work as it is."""
    if isinstance(work, Steps):
        return Steps(tuple(without_processes(one) for one in work.works))
    if not isinstance(work, Command):
        return work
    if "do" in work.spec:
        do = {"rollout": toy.rollout, "update": toy.update, "wait": toy.wait}[work.spec["do"]]
        result = do({**work.spec, "seconds": 0.0}, ProgressWriter(None))
    else:
        result = asdict(merge(from_spec(work.spec, MergeRequest)))
    return Value({**work.extra, **result})


def quickly(build: Callable[[Context], Work] | None) -> Callable[[Context], Work] | None:
    """The same row, mostly without its processes."""
    if build is None:
        return None

    def quick(ctx: Context) -> Work:
        work = build(ctx)
        return work if ctx.iteration % PROCESSES_EVERY == 1 else without_processes(work)

    return quick


def quick_program(slow: Program) -> Program:
    return replace(
        slow,
        name="soak",
        rows=tuple(replace(row, each=quickly(row.each), leader=quickly(row.leader)) for row in slow.rows),
    )


PROGRAM = quick_program(load_module("toy").PROGRAM)
