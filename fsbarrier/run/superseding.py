"""Lets a run continue although its newest generation, or the decisions of that generation, are unreadable. Only at a user's request.

Nodes never do this themselves, because an unreadable record must not be treated as an absent one. The damaged record stays in place. This
module adds a newer generation that has already ended and that names the point at which the next session resumes.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.resume import LastGeneration
from fsbarrier.coordination.run_rules import make_rules
from fsbarrier.decisions import BestPolicy, PublishDecision
from fsbarrier.errors import EXIT_DONE, UsageError
from fsbarrier.loader import load_program
from fsbarrier.protocol.facts import Generation, Member, Payload, Position, Verdict
from fsbarrier.protocol.state import Rules
from fsbarrier.protocol.succession import leader_of
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.names import GENERATION, START
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.store.identity import user_at_host


@dataclass(frozen=True, slots=True)
class Superseding:
    """The new generation, and in `because` the unreadable file and the reason."""

    because: str
    generation: Generation

    @property
    def policy(self) -> str:
        """The policy with which the run continues."""
        published: Payload = self.generation.decisions.get("weights_publish", {})
        return str(published["value"]["folder"]) if published else "the run's first model"

    def as_json(self) -> dict[str, object]:
        start = self.generation.start
        where = {"generation": self.generation.number, "iteration": start.iteration, "policy": self.policy}
        return {"unreadable": self.because, **where}


def needed(record: RunRecord, iteration: int) -> Superseding | None:
    """The generation with which the run can continue at `iteration` from the policy in model.pt; None if nothing is unreadable.

    Raises OSError, ProgramFailed (that policy is incomplete).
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
    # Each rank's last start, taken from the file names. The next session uses higher incarnations.
    starts = {start.rank: start.incarnation for start in sorted(START.parse_all(store.names(paths.joins)))}
    members = tuple(Member(rank, incarnation) for rank, incarnation in starts.items())
    why = f"recovered by {user_at_host()}: the run continues at iteration {iteration}"
    generation = Generation(
        number=max(numbers) + 1,
        members=members,
        leader=leader_of(members),
        start=Position(iteration, rules.span({})[0]),
        reason=why,
        decisions=_served(record.log_path, iteration),
        verdict=Verdict(EXIT_DONE, why),
        settings=observer.newest.settings if observer.newest is not None else {},
    )
    return Superseding(because, generation)


def record_generation(record: RunRecord, superseding: Superseding) -> None:
    """Write the record. Raises OSError, and UsageError if the file exists by now."""
    generation = superseding.generation
    path = record.paths.generation(generation.number)
    if not PosixStore().create(path, generation):
        raise UsageError(
            f"{path} was created in the meantime; check with `fsbarrier status` whether the run is active"
        )


def _unreadable(observer: Observer, last: LastGeneration, newest: int, rules: Rules) -> str:
    """The unreadable record of the newest generation that nodes need; "" if all are readable."""
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
    """The decision that published the current model.pt; {} before the first publication."""
    made = checkpoints.served_policy(log_path)
    if made is None:
        return {}
    folder = RunPaths(log_path).checkpoint(made.number, made.generation)
    digest = checkpoints.read_manifest(folder).digest
    decision = PublishDecision(made.number, folder.name, digest, _best_at(log_path, folder.name))
    return {"weights_publish": {"iteration": iteration - 1, "value": decision.as_json()}}


def _best_at(log_path: Path, folder: str) -> BestPolicy | None:
    """The best version that the journal records for the publication of `folder`. Without it, clean-up would remove that version."""
    lines = (event.fields for event in read_events(log_path) if event.name == "weights_published")
    published = [line for line in lines if line.get("folder") == folder]
    return BestPolicy.from_json(published[-1]) if published else None
