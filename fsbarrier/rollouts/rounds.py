"""The rounds of a rollout phase: tasks that are sampled in one way, and begun once those of the round before are.

Train rollouts have one round. An evaluation has one for each set of held-out tasks: each set has its task file and its sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fsbarrier.data.tasks import Task, TaskFile, read_tasks
from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Payload
from fsbarrier.rollouts.samples import Sampling


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `tasks`: its tasks on all nodes; `known`: those that this node may come to do, as their file has them."""

    tasks: frozenset[int]
    known: Mapping[int, Task]
    path: Path
    sampling: Sampling

    @property
    def samples(self) -> int:
        return self.sampling.samples


def read_rounds(spec: Payload, within_reach: Collection[int]) -> list[Round]:
    """What the spec says of each round: `tasks`, `task_file`, `sampling`; of a set of several also its name `eval_set`, and `first`, the
    number by which the file's first task goes. Raises UsageError."""
    return [_read_round(one, frozenset(within_reach)) for one in spec["rounds"]]


def _read_round(spec: Payload, within_reach: frozenset[int]) -> Round:
    values = spec["sampling"]
    sampling = Sampling(**{item.name: values[item.name] for item in fields(Sampling)})
    if sampling.samples > 1 and sampling.temperature == 0:
        raise UsageError(
            f"{sampling.samples} samples a task at temperature 0 would all be the same; give samples=1 or a temperature"
        )
    tasks, first = frozenset(spec["tasks"]), spec.get("first", 0)
    here = [task - first for task in tasks & within_reach]
    found: TaskFile = read_tasks(Path(spec["task_file"]), here)
    known = {
        index + first: replace(task, index=index + first, eval_set=spec.get("eval_set", ""))
        for index, task in found.tasks.items()
    }
    return Round(tasks, known, found.path, sampling)
