"""Builds the Context that a program's functions see, from what this node knows and what is on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsbarrier import trajectories
from fsbarrier.coordination.observer import Observer
from fsbarrier.program import Context, PartOnDisk, Program
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.names import PART
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force
from fsbarrier.store.reading import NotPlain, check_plain


@dataclass(frozen=True, slots=True)
class ContextMaker:
    """Called with a node that is about to work, in the work's thread, where a slow disk does not hold up the loop. Raises OSError."""

    record: RunRecord
    program: Program
    observer: Observer
    parts_of: Callable[[str, int], tuple[PartOnDisk, ...]]
    claims_unsafe: Callable[[], str]
    accelerators: int
    cpus: int
    # The name of the program that this node has kept in an era (Workplace.kept_in).
    kept_in: Callable[[int], str]

    def __call__(self, node: Node) -> Context:
        generation, position = node.place
        # Not those that the run was made with: a session may go on to a later iteration.
        choices = {**generation.choices, "iterations": generation.until}
        settings = replace(in_force(self.record.settings, generation.settings), **choices)
        return Context(
            run_id=self.record.run_id,
            paths=self.record.paths,
            settings=settings,
            tasks=self.record.tasks,
            model=Path(self.record.model) if self.record.model else None,
            node_rank=node.rank,
            incarnation=node.incarnation,
            members=generation.members,
            leader=generation.leader,
            generation=generation.number,
            iteration=position.iteration,
            attempt=generation.attempt,
            phase=self.program.row(position, generation.until, settings.rl_phase),
            decisions=node.decisions,
            python=sys.executable,
            joins=self.observer.registry.joins_of(generation),
            reports=partial(self.observer.row.reports, node),
            newest=self.observer.registry.newest_number,
            parts_of=self.parts_of,
            claims_unsafe=self.claims_unsafe,
            accelerators=self.accelerators,
            cpus=self.cpus,
            kept=self.kept_in(generation.era),
        )


def parts_on_disk(paths: RunPaths, split: str, iteration: int) -> tuple[PartOnDisk, ...]:
    """The part files of one iteration and their durable groups, by name (oldest generation first within a rank)."""
    found, folder = [], paths.trajectories(split)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        part = PART.parse(path.name)
        if part is None or (part.split, part.iteration) != (split, iteration):
            continue
        try:
            check_plain(path.lstat(), path)
        except (NotPlain, IsADirectoryError):
            # No node made this, so it is ignored.
            continue
        there = trajectories.scan_rank_file(path)
        if there.groups:
            policy = str(there.header.get("policy", ""))
            tasks = tuple(group.task_index for group in there.groups)
            unjudged = frozenset(group.task_index for group in there.groups if group.stats.unjudged)
            signal = frozenset(group.task_index for group in there.groups if group.stats.signal)
            how = str(there.header.get("sampled_how", ""))
            found.append(PartOnDisk(path.name, policy, there.valid_bytes, tasks, unjudged, signal, how))
    return tuple(found)
