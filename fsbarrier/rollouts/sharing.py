"""Distributes an iteration's tasks among the nodes, except those whose groups an earlier attempt left on disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from fsbarrier.context import Context, PartOnDisk
from fsbarrier.decisions import PartGroups, RolloutDecision
from fsbarrier.protocol.assign import TaskSet, split_by_weight
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir.runrecord import TaskSource, numbers_in

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

#: prefix of the names of training sets among a run's task files; a run without sets has only the name "train"
TRAIN_SET = "train."


def training_sets(settings: Settings, tasks: Mapping[str, TaskSource]) -> list[TaskSet]:
    """The sets of training tasks in the run's task files, and their tasks by number."""
    files, sets = training_files(tasks), []
    for key in _of_training(tasks):
        source, name = tasks[key], key.removeprefix("train").removeprefix(".")
        numbers = [files[source["path"]] + index for index in numbers_in(source)]
        sets.append(TaskSet(name, numbers, settings.train.sets[name].weight if name else 1.0))
    return sets


def training_files(tasks: Mapping[str, TaskSource]) -> dict[str, int]:
    """The files of training tasks, each with the number of its first task; the numbering continues from file to file."""
    files: dict[str, int] = {}
    first = 0
    for key in _of_training(tasks):
        if tasks[key]["path"] not in files:
            files[tasks[key]["path"]] = first
            first += tasks[key]["count"]
    return files


def _of_training(tasks: Mapping[str, TaskSource]) -> list[str]:
    return sorted(key for key in tasks if key == "train" or key.startswith(TRAIN_SET))


def file_of(task: int, files: Mapping[str, int]) -> tuple[str, int]:
    """The file that contains a task, with the number of the file's first task."""
    return max(((path, first) for path, first in files.items() if first <= task), key=lambda file: file[1])


def share_out(ctx: Context, split: str, sampled_how: str, rounds: Sequence[Sequence[int]]) -> RolloutDecision:
    """Distribute the tasks of `rounds` by weight among the nodes that sample, each round separately, so that no node is idle in a round.

    A node skips a round only if all its tasks in it are on disk. Groups on disk are adopted if they were sampled in the same way
    (`sampled_how`) from the current policy, or with `rollout.ahead` from the previous one.
    """
    wanted = [*chain.from_iterable(rounds)]
    policies = ctx.recent_policies if split == "train" else (ctx.policy_identity,)
    parts = [
        part
        for part in ctx.inventory(split)
        if part.policy in policies and part.sampled_how in ("", sampled_how)
    ]
    adopted = adopt_parts(parts, wanted)
    missing = set(wanted).difference(*(part.tasks for part in adopted))
    signal_in = {part.name: part.with_signal for part in parts}
    with_signal = {task for part in adopted for task in part.tasks if task in signal_in[part.name]}
    samplers = [head for head, *_ in ctx.engine_groups]
    weights = [ctx.settings.rank_weights[rank] for rank in samplers]
    each = [split_by_weight([task for task in tasks if task in missing], weights) for tasks in rounds]
    shares = [[*chain.from_iterable(of_one_node)] for of_one_node in zip(*each, strict=True)]
    return RolloutDecision(
        wanted,
        dict(zip(samplers, shares, strict=True)),
        adopted,
        fixed_shares="rollout.take_over is off"
        if not ctx.settings.rollout.take_over
        else ctx.claims_unsafe(),
        with_signal=[len(with_signal.intersection(tasks)) for tasks in rounds],
        evaluate=split == "test",
    )


def adopt_parts(parts: Sequence[PartOnDisk], wanted: Sequence[int]) -> list[PartGroups]:
    """The wanted groups that are on disk. If several parts contain a task, the first one counts.

    A group in which the reward, the agent or every sample failed is not adopted: its task is rolled out again.
    """
    left, taken = set(wanted), []
    for part in parts:
        useful = [task for task in part.tasks if task in left and task not in part.unjudged]
        if useful:
            left.difference_update(useful)
            taken.append(PartGroups(part.name, part.valid_bytes, useful))
    return taken


def sharing_events(decision: RolloutDecision) -> list[JsonObject]:
    """Journal events of the decision, because a later check of the merged file needs it after the decision has been removed."""
    events: list[JsonObject] = []
    if decision.fixed_shares and len(decision.shares) > 1:
        events.append({"event": "shares_fixed", "why": decision.fixed_shares})
    if decision.adopted:
        parts = [{"name": part.name, "bytes": part.valid_bytes} for part in decision.adopted]
        events.append({"event": "parts_adopted", "split": decision.split, "parts": parts})
    return events
