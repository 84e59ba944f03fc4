"""The rounds of a rollout phase. The tasks of a round share sampling parameters and start after those of the previous round.

A training rollout has one round, plus one per possible refill. An evaluation has a round for each evaluation set, with that set's task file
and sampling parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.errors import UsageError
from fsbarrier.rollouts.rollout_spec import RolloutRound
from fsbarrier.rollouts.samples import Sampling
from fsbarrier.rollouts.sharing import file_of


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `tasks`: its task numbers on all nodes; `known`: the tasks that this node may have to do."""

    tasks: frozenset[int]
    known: Mapping[int, Task]
    sampling: Sampling

    @property
    def samples(self) -> int:
        return self.sampling.samples


def read_rounds(rounds: Sequence[RolloutRound], within_reach: Collection[int]) -> list[Round]:
    """The rounds of a spec with their tasks. Raises UsageError."""
    here = frozenset(within_reach)
    places = {task: file_of(task, one.files) for one in rounds for task in here.intersection(one.tasks)}
    indices = defaultdict[str, set[int]](set)
    for task, (path, first) in places.items():
        indices[path].add(task - first)
    # Read each file only once, because ten rounds may share a large one.
    found = {path: read_tasks(Path(path), wanted).tasks for path, wanted in indices.items()}
    known = {task: replace(found[path][task - first], index=task) for task, (path, first) in places.items()}
    return [_round(one, known) for one in rounds]


def _round(one: RolloutRound, known: Mapping[int, Task]) -> Round:
    sampling = one.sampling
    if sampling.samples > 1 and sampling.temperature == 0:
        raise UsageError(
            f"{sampling.samples} samples per task at temperature 0 would be identical; use 1 sample or a temperature above 0"
        )
    own = {task: replace(known[task], eval_set=one.eval_set) for task in one.tasks if task in known}
    return Round(frozenset(one.tasks), own, sampling)
