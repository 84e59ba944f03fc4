"""Builds the Context that a program's functions see, from what this node knows and what is on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsbarrier.context import Context
from fsbarrier.coordination.observer import Observer
from fsbarrier.program import Program
from fsbarrier.protocol.state import Node
from fsbarrier.run.job import Workplace
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force


@dataclass(frozen=True, slots=True)
class ContextMaker:
    """Called with a node that is about to work, in the work's thread, where a slow disk does not hold up the loop. Raises OSError."""

    record: RunRecord
    program: Program
    observer: Observer
    workplace: Workplace

    def __call__(self, node: Node) -> Context:
        host, (generation, position) = self.workplace.host, node.place
        # Use the generation's last iteration, not the one given when the run was made: a later session may go further.
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
            joins=self.observer.registry.joins_of(generation),
            reports=partial(self.observer.row.reports, node),
            newest=self.observer.registry.newest_number,
            parts_of=partial(host.parts_on_disk, self.record.paths),
            claims_unsafe=partial(host.claims_unsafe, self.record.log_path),
            accelerators=len(self.workplace.devices),
            cpus=host.cpus(),
            kept=self.workplace.resident_name(generation.era),
        )
