"""Which groups a batch is made of: this iteration's, or drawn from the last ones, the later the likelier (`update.recency`).

Weighted drawing without replacement in one pass: each group gets the key u ** (1 / weight), u uniform, and the largest keys are taken
(Efraimidis and Spirakis 2006). What is not taken is let go at once, so that memory holds one batch, however far back the files go.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from fsbarrier.settings.sections import UpdateSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Recency:
    """The settings `update.*` that say how to draw. `groups`: how many; None: as many as the newest iteration offers."""

    iterations: int
    power: float
    groups: int | None

    @classmethod
    def of(cls, settings: UpdateSettings) -> Recency:
        return cls(settings.recency, settings.recency_power, settings.groups)

    @property
    def draws(self) -> bool:
        """Whether anything is drawn at all, or the batch is simply what there is."""
        return self.iterations > 1 or self.groups is not None

    def weight(self, age: int) -> float:
        """How likely a group of so many iterations before the newest is drawn, beside one of the newest: 1 to nearly 0."""
        return float(max(0.0, (self.iterations - age) / self.iterations) ** self.power)


class Draw(Generic[T]):
    """Takes offers, the newest iteration's first, and keeps the chosen ones."""

    def __init__(self, recency: Recency, *, seed: str) -> None:
        self.recency = recency
        self._random = random.Random(seed)
        self._held: list[tuple[float, int, int, T]] = []  # key, age, order of arrival
        self._most = recency.groups
        self._offers = 0

    def offer(self, age: int, items: Iterable[T]) -> None:
        """Consider the groups of one iteration."""
        weight = self.recency.weight(age)
        for item in items:
            self._offers += 1
            if weight <= 0:
                continue
            key = math.log(1.0 - self._random.random()) / weight
            heapq.heappush(self._held, (key, age, self._offers, item))
            if self._most is not None and len(self._held) > self._most:
                heapq.heappop(self._held)
        if self._most is None:
            self._most = len(self._held)

    def chosen(self) -> Iterator[tuple[int, T]]:
        """(age, group), newest iteration first, in the order of the files."""
        for _, age, _, item in sorted(self._held, key=lambda held: held[1:3]):
            yield age, item
