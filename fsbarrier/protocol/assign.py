"""Samples an iteration's tasks and splits them by node weight. Pure and deterministic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain


def sample_tasks(total: int, count: int, *, seed: int | str, iteration: int) -> list[int]:
    """The `count` task indices (of `total`; 0 = all) of an iteration.

    Each pass over the data shuffles it anew and cuts it into pieces of `count`, one for each iteration. The remainder at the end of a
    pass is skipped, so that no task comes twice in one iteration.
    """
    if count <= 0 or count >= total:
        return list(range(total))
    return [*_sampled(total, count, seed, iteration)]


def iterations_of_a_pass(total: int, count: int) -> int:
    """How many iterations of `count` tasks (0 = all) a pass over `total` tasks takes."""
    return max(1, total // count) if count > 0 else 1


@lru_cache(maxsize=8)
def _sampled(total: int, count: int, seed: int | str, iteration: int) -> tuple[int, ...]:
    data_pass, piece = divmod(iteration - 1, iterations_of_a_pass(total, count))
    order = list(range(total))
    random.Random(f"{seed}:{data_pass}").shuffle(order)
    return tuple(order[piece * count : (piece + 1) * count])


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks by their numbers. `weight`: the set's share of an iteration, relative to the other sets. `name`: "" for the only set."""

    name: str
    tasks: Sequence[int]
    weight: float = 1.0


def draw_rounds(
    sets: Sequence[TaskSet],
    count: int,
    rounds: int,
    *,
    seed: int,
    iteration: int,
    weight_of: Callable[[int], float] | None = None,
) -> list[list[int]]:
    """The tasks of an iteration, `count` or fewer, and those of up to `rounds - 1` refills of as many other tasks.

    Each set has its share of every round, by largest remainder, while it has enough tasks. `weight_of`: how likely a task is drawn from its
    set; a task of weight 0 is drawn only if there are too few others. None: each task of a set comes once before any comes again. Refills
    do not advance this order, so the tasks of the next iteration do not depend on how many refills this one needs.
    """
    drawn = []
    shares = split_by_weight(range(count), [task_set.weight for task_set in sets])
    for task_set, share in zip(sets, shares, strict=True):
        key, quota = f"{seed}:{task_set.name}" if task_set.name else f"{seed}", len(share)
        if weight_of is None:
            order = _in_passes(task_set.tasks, quota, rounds, key, iteration)
        else:
            order = _by_weight(task_set.tasks, quota, key, iteration, weight_of)
        drawn.append([order[quota * number : quota * (number + 1)] for number in range(rounds)])
    by_round = [[*chain(*parts)] for parts in zip(*drawn, strict=True)]
    if len(sets) > 1:
        # A node gets consecutive tasks, so they are shuffled to give each node tasks of all sets.
        for number, tasks in enumerate(by_round):
            random.Random(f"{seed}:{iteration}:{number}").shuffle(tasks)
    return [tasks for tasks in by_round if tasks]


def _in_passes(tasks: Sequence[int], quota: int, rounds: int, key: str, iteration: int) -> list[int]:
    """The tasks of an iteration, then the tasks of its refills."""
    indices = sample_tasks(len(tasks), quota, seed=key, iteration=iteration) if quota else []
    if rounds > 1:
        drawn = frozenset(indices)
        others = [index for index in range(len(tasks)) if index not in drawn]
        most = min(len(others), quota * (rounds - 1))
        indices += random.Random(f"{key}:{iteration}:refills").sample(others, most)
    return [tasks[index] for index in indices]


def _by_weight(
    tasks: Sequence[int], quota: int, key: str, iteration: int, weight_of: Callable[[int], float]
) -> list[int]:
    """Tasks in the order of a weighted draw without replacement (Efraimidis and Spirakis 2006, with the logarithm of their key)."""
    rng = random.Random(f"{key}:{iteration}:weighted")
    # Each task draws a number of its own, which does not depend on the weights of other tasks.
    keys = {task: -math.log1p(-rng.random()) for task in tasks}
    weights = {task: weight_of(task) for task in tasks}
    wanted = sorted((task for task in tasks if weights[task]), key=lambda task: keys[task] / weights[task])
    unwanted = sorted((task for task in tasks if not weights[task]), key=keys.__getitem__)
    return wanted + unwanted[: max(0, quota - len(wanted))]


def split_by_weight(tasks: Sequence[int], weights: Sequence[float]) -> list[list[int]]:
    """`tasks` in consecutive shares proportional to `weights`, by largest remainder; ties go to the lower position.

    Raises ValueError for no weights or one that is not positive.
    """
    if not weights or any(not weight > 0 for weight in weights):
        raise ValueError(f"weights must be positive: {list(weights)}")
    total = sum(weights)
    exact = [len(tasks) * weight / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: len(tasks) - sum(counts)]:
        counts[i] += 1
    shares, start = [], 0
    for count in counts:
        shares.append(list(tasks[start : start + count]))
        start += count
    return shares


# The largest number of lots in a share: the last lot is then less than a hundredth of the work.
LOTS = 128


def lots(share: Sequence[int], most: int = LOTS) -> list[tuple[int, ...]]:
    """A share cut into consecutive lots of equal size (the last may be smaller). A node claims one lot at a time."""
    size = -(-len(share) // most) or 1
    return [tuple(share[start : start + size]) for start in range(0, len(share), size)]
