"""Selects the groups of a batch: this iteration's, or drawn from recent iterations with a preference for newer ones (`update.recency`).

Weighted sampling without replacement in one pass: each group gets the key u ** (1 / weight), u uniform, and the largest keys win
(Efraimidis and Spirakis 2006). Other groups are discarded immediately, so memory holds only one batch.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from fsbarrier.settings.sections import UpdateSettings

T = TypeVar("T")


def draws(settings: UpdateSettings) -> bool:
    """Whether groups are drawn; otherwise the batch contains all groups."""
    return settings.recency > 1


def age_weight(settings: UpdateSettings, age: int) -> float:
    """The relative weight of a group of this age, in iterations: from 1 for the newest to nearly 0."""
    iterations = settings.recency
    return float(max(0.0, (iterations - age) / iterations) ** 2)


class Draw(Generic[T]):
    """Selects from offered groups, the newest iteration first."""

    def __init__(self, settings: UpdateSettings, *, seed: str) -> None:
        self._settings = settings
        self._random = random.Random(seed)
        # A heap of key, age, order of arrival and group: the smallest key is the first to be let go.
        self._held: list[tuple[float, int, int, T]] = []
        # How many are kept: as many as the newest iteration, which comes first, offers.
        self._most: int | None = None
        self._offers = 0

    def offer(self, age: int, items: Iterable[T]) -> None:
        """Consider the groups of one iteration."""
        weight = age_weight(self._settings, age)
        for item in items:
            self._offers += 1
            if weight <= 0:
                continue
            # The logarithm of u ** (1 / weight), which would be too small for a float where the weight is.
            key = math.log(1.0 - self._random.random()) / weight
            heapq.heappush(self._held, (key, age, self._offers, item))
            if self._most is not None and len(self._held) > self._most:
                heapq.heappop(self._held)
        if self._most is None:
            self._most = len(self._held)

    def chosen(self) -> Iterator[T]:
        """Newest iteration first, in the order of the files."""
        for _, _, _, item in sorted(self._held, key=lambda held: held[1:3]):
            yield item
