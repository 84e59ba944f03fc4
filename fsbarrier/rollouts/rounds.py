"""The rounds of a rollout phase. The tasks of a round share sampling parameters and start after those of the previous round.

A training rollout has one round, plus one per possible refill. An evaluation has a round for each evaluation set, with that set's task file
and sampling parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fsbarrier.data.tasks import Task, TaskFile, read_tasks
from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Payload
from fsbarrier.rollouts.samples import Sampling


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `tasks`: its task numbers on all nodes; `known`: the tasks that this node may have to do."""

    tasks: frozenset[int]
    known: Mapping[int, Task]
    path: Path
    sampling: Sampling

    @property
    def samples(self) -> int:
        return self.sampling.samples


def read_rounds(spec: Payload, within_reach: Collection[int]) -> list[Round]:
    """The rounds in the spec, each with `tasks`, `task_file` and `sampling`; with several evaluation sets also `eval_set`, the set's name,
    and `first`, the number of the file's first task. Raises UsageError."""
    here = frozenset(within_reach)
    indices = defaultdict[str, set[int]](set)
    for one in spec["rounds"]:
        indices[one["task_file"]] |= {task - one.get("first", 0) for task in here.intersection(one["tasks"])}
    # Read each file only once, because ten rounds may share a large one.
    found = {name: read_tasks(Path(name), wanted) for name, wanted in indices.items()}
    return [_round(one, found[one["task_file"]], here) for one in spec["rounds"]]


def _round(spec: Payload, found: TaskFile, within_reach: frozenset[int]) -> Round:
    values = spec["sampling"]
    sampling = Sampling(**{item.name: values[item.name] for item in fields(Sampling)})
    if sampling.samples > 1 and sampling.temperature == 0:
        raise UsageError(
            f"{sampling.samples} samples per task at temperature 0 would be identical; use 1 sample or a temperature above 0"
        )
    tasks, first = frozenset(spec["tasks"]), spec.get("first", 0)
    known = {
        task: replace(found.tasks[task - first], index=task, eval_set=spec.get("eval_set", ""))
        for task in tasks & within_reach
    }
    return Round(tasks, known, found.path, sampling)
