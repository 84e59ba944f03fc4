"""Selects the groups of a batch: this iteration's, or drawn from recent iterations with a preference for newer ones (`update.recency`).

Weighted sampling without replacement in one pass: each group gets the key u ** (1 / weight), u uniform, and the largest keys win
(Efraimidis and Spirakis 2006). Other groups are discarded immediately, so memory holds only one batch.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def drawn(by_age: Iterable[tuple[int, Iterable[T]]], iterations: int, *, seed: str) -> Sequence[T]:
    """Of the last `iterations` iterations, the newest one (age 0) first, as many groups as that has; in the order in which they come."""
    generator = random.Random(seed)

    def keyed(age: int, groups: Iterable[T]) -> Iterable[tuple[float, int, int, T]]:
        # A group weighs from 1 in the newest to nearly 0. Of its key the logarithm, which may be too small for a float otherwise.
        weight = ((iterations - age) / iterations) ** 2
        return (
            (math.log(1.0 - generator.random()) / weight, age, place, one) for place, one in enumerate(groups)
        )

    first, *others = (keyed(age, groups) for age, groups in by_age)
    newest = list(first)
    best = heapq.nlargest(len(newest), chain(newest, *others), key=lambda one: one[0])
    return [group for _, _, _, group in sorted(best, key=lambda one: one[1:3])]
