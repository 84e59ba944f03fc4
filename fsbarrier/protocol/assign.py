"""Samples an iteration's tasks and splits them by node weight. Pure and deterministic."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import lru_cache


def sample_tasks(total: int, count: int, *, seed: int, iteration: int) -> list[int]:
    """The `count` task indices (of `total`; 0 = all) of an iteration.

    Each pass over the data shuffles it anew and cuts it into pieces of `count`, one for each iteration. The remainder at the end of a
    pass is skipped, so that no task comes twice in one iteration.
    """
    if count <= 0 or count >= total:
        return list(range(total))
    return [*_sampled(total, count, seed, iteration)]


@lru_cache(maxsize=8)
def _sampled(total: int, count: int, seed: int, iteration: int) -> tuple[int, ...]:
    data_pass, piece = divmod(iteration - 1, total // count)
    order = list(range(total))
    random.Random(f"{seed}:{data_pass}").shuffle(order)
    return tuple(order[piece * count : (piece + 1) * count])


def refill_tasks(
    total: int, drawn: Collection[int], size: int, *, most: int, seed: int, iteration: int
) -> list[list[int]]:
    """Tasks (of `total`) for up to `most` further rounds of `size` each, none of them in `drawn` or in another round.

    They are drawn outside the passes over the data, so the tasks of the next iteration do not depend on how many rounds this one needs.
    """
    if not most or not size:
        return []
    drawn = frozenset(drawn)
    others = [task for task in range(total) if task not in drawn]
    chosen = random.Random(f"{seed}:{iteration}:refills").sample(others, min(len(others), most * size))
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


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
