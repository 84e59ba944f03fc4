"""Deliberate faults in what is done with the work: sharing out, adopting, merging, publishing, clearing up (see mutant_faults.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutant_faults import Patch

from fsbarrier.node.observer import Observer
from fsbarrier.program import PartOnDisk
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.sim import setup as setup_module
from fsbarrier.sim.artifacts import Artifacts
from fsbarrier.sim.history import Entry
from fsbarrier.sim.work import SimWork


def merge_whatever_is_there(patch: Patch) -> None:
    """nothing is adopted by name: whatever parts lie about are merged"""
    original = SimWork._aggregate

    def aggregate(self: Any, command: Any, context: Any, piece: Any) -> Any:
        wanted = command.spec["metadata"]["split"], context.iteration
        parts = {
            path: {"path": path, "valid_bytes": None, "tasks": [task for task, _ in part.groups]}
            for path, part in self.artifacts.parts.items()
            if (part.split, part.iteration) == wanted
        }
        parts |= {part["path"]: part for part in command.spec["parts"]}
        spec = {**command.spec, "parts": [*parts.values()]}
        return (yield from original(self, replace(command, spec=spec), context, piece))

    patch.setattr(SimWork, "_aggregate", aggregate)
    patch.setattr(SimWork, "_inventory", lambda self, split, iteration: ())


def no_generation_at_the_merge(patch: Patch) -> None:
    """all generations merge into one file, whoever comes last"""
    patch.setattr(
        RunPaths, "merged_by", lambda self, split, iteration, generation: self.merged(split, iteration)
    )


def stale_knowledge_trusted_for_absence(patch: Patch) -> None:
    """before something is published nobody looks afresh whether there is a newer generation"""
    patch.setattr(Observer, "newest_number", lambda self: self.newest.number)


def adopt_any_policy(patch: Patch) -> None:
    """parts are adopted whichever policy rolled them out"""

    class AnyPolicy(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    def inventory(self: Any, split: str, iteration: int) -> Any:
        return tuple(
            PartOnDisk(path, AnyPolicy(part.policy), 100, (part.groups[0][0],))
            for path, part in sorted(self.artifacts.parts.items())
            if part.split == split and part.groups
        )

    patch.setattr(SimWork, "_inventory", inventory)


def a_task_too_few(patch: Patch) -> None:
    """one of the tasks that were shared out is not expected in the merge"""
    rl = setup_module.program().rows[1].leader.__globals__  # type: ignore[union-attr]
    share_out = rl["share_out"]

    def generous(*args: Any, **more: Any) -> Any:
        shared = share_out(*args, **more)
        return {**shared, "wanted": shared["wanted"][:-1]}

    patch.setitem(rl, "share_out", generous)


def a_task_is_not_shared_out(patch: Patch) -> None:
    """the last task of an iteration is not shared out, and not missed either"""
    rl = setup_module.program().rows[1].leader.__globals__  # type: ignore[union-attr]
    share_out = rl["share_out"]
    patch.setitem(rl, "share_out", lambda ctx, split, wanted: share_out(ctx, split, wanted[:-1]))


def merge_all_that_parts_hold(patch: Patch) -> None:
    """the merge takes from each part that it is given all that is there, whoever else gave it"""

    def taken(self: SimWork, sources: Any) -> list[Entry]:
        found = []
        for path in (source["path"] for source in sources):
            part = self.artifacts.parts[path]
            for at, (task, _) in enumerate(part.groups):
                found.append(Entry(task, path, at, part.generation, part.policy))
        return found

    patch.setattr(SimWork, "_taken", taken)


def keep_one_checkpoint(patch: Patch) -> None:
    """clean-up leaves nothing but what was just published"""
    patch.setattr(Artifacts, "retain", lambda self, keep, current: self.checkpoints.clear())
