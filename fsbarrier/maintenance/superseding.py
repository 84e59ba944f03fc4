"""Where the newest generation, or what it decided, cannot be read: lets the run go on all the same, because a person asks for it.

Nodes never do this by themselves, for to them an unreadable record is never an absent one. What is damaged stays where it is. A new
generation is recorded behind it, which has ended already and says where the run goes on: the next session starts from there.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.decisions import NeededVersions, PublishDecision
from fsbarrier.errors import EXIT_DONE, UsageError
from fsbarrier.host.identity import user_at_host
from fsbarrier.loader import load_program
from fsbarrier.node.observer import Observer
from fsbarrier.node.resume import LastGeneration
from fsbarrier.node.run_rules import make_rules
from fsbarrier.protocol.facts import Generation, Member, Payload, Position, Verdict
from fsbarrier.protocol.state import Rules
from fsbarrier.protocol.succession import leader_of
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.names import GENERATION, START
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord


@dataclass(frozen=True, slots=True)
class Superseding:
    """The generation that lets a run go on, and `because`: what cannot be read, and why."""

    because: str
    generation: Generation

    @property
    def policy(self) -> str:
        """The policy with which it goes on."""
        published: Payload = self.generation.decisions.get("weights_publish", {})
        return Path(published["value"]["folder"]).name if published else "the run's first model"

    def as_json(self) -> dict[str, object]:
        start = self.generation.start
        where = {"generation": self.generation.number, "iteration": start.iteration, "policy": self.policy}
        return {"unreadable": self.because, **where}


def needed(record: RunRecord, iteration: int) -> Superseding | None:
    """What would let the run go on at `iteration` with the policy that model.pt names; None where nodes can read all that they need.

    Raises OSError, ProgramFailed (that policy is not complete).
    """
    store, paths = PosixStore(), record.paths
    numbers = GENERATION.parse_all(store.names(paths.generations))
    if not numbers:
        return None
    program = load_program(record.settings.program)
    observer = Observer(store, paths, program)
    observer.prepare()
    rules = make_rules(record.settings, program)
    because = _unreadable(observer, LastGeneration(observer), max(numbers), rules)
    if not because:
        return None
    # Of each rank its last start, by the names alone: that is what the next session's are newer than.
    starts = {start.rank: start.incarnation for start in sorted(START.parse_all(store.names(paths.joins)))}
    members = tuple(Member(rank, incarnation) for rank, incarnation in starts.items())
    why = f"recovered by {user_at_host()}: the run goes on at iteration {iteration}"
    generation = Generation(
        number=max(numbers) + 1,
        members=members,
        leader=leader_of(members),
        start=Position(iteration, rules.span({})[0]),
        reason=why,
        decisions=_served(record.log_path, iteration),
        verdict=Verdict(EXIT_DONE, why),
        revisions=observer.newest.revisions if observer.newest is not None else (),
    )
    return Superseding(because, generation)


def record_generation(record: RunRecord, superseding: Superseding) -> None:
    """Record it. Raises OSError, UsageError where somebody else was first."""
    generation = superseding.generation
    path = record.paths.generation(generation.number)
    if not PosixStore().create(path, generation):
        raise UsageError(f"{path} was made meanwhile: is the run at work?")


def _unreadable(observer: Observer, last: LastGeneration, newest: int, rules: Rules) -> str:
    """What of the newest generation nodes need and cannot read; "" where they can."""
    if observer.newest is None or observer.newest.number < newest:
        path = observer.paths.generation(newest)
        return f"{path}: {observer.store.fault(path, Generation).why}"
    try:
        last.resume_point(rules, 0.0)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
        return f"{error.filename}: {error.strerror}"
    return ""


def _served(log_path: Path, iteration: int) -> dict[str, Payload]:
    """The decision that published what model.pt names now; none before the first."""
    made = checkpoints.served_policy(log_path)
    if made is None:
        return {}
    folder = RunPaths(log_path).checkpoint(made.number, made.generation)
    digest = checkpoints.read_manifest(folder).digest
    decision = PublishDecision(made.number, str(folder), digest, _needed_beside(log_path, folder.name))
    return {"weights_publish": {"iteration": iteration - 1, "value": decision.as_json()}}


def _needed_beside(log_path: Path, folder: str) -> NeededVersions:
    """The older versions that the publication of `folder` named, as the journal has it: the best one and the reference policy.

    Without them clean-up would remove the best version, and a reference policy that had moved would be the run's first model again.
    """
    lines = (event.fields for event in read_events(log_path) if event.name == "weights_published")
    published = [line for line in lines if Path(str(line.get("folder"))).name == folder]
    return NeededVersions.from_json(published[-1]) if published else NeededVersions()
