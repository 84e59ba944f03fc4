"""Parses which accelerators have which role: `placement.rollout=0-19 placement.update=24-31`, or whole nodes, `node:0-1`. Pure.

Accelerators are numbered over all nodes in rank order, so each node must have equally many, except with whole nodes. The
numbers do not change when a node is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: the roles that nodes or accelerators can have
ROLES = ("rollout", "update")
ALL, NODE = "all", "node:"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def consecutive(ranks: Iterable[int], size: int) -> list[tuple[int, ...]]:
    """Group nodes by `size` in rank order; nodes left over are in no group."""
    ordered = sorted(ranks)
    return [tuple(ordered[first : first + size]) for first in range(0, len(ordered) - size + 1, size)]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Inclusive ranges of accelerators, or of nodes; none: everything."""

    ranges: tuple[tuple[int, int], ...] = ()
    nodes: bool = False

    @classmethod
    def parse(cls, text: str) -> Ranges:
        """Parse a placement. Raises ValueError that says what it must be."""
        if text.strip() == ALL:
            return cls()
        nodes = text.strip().startswith(NODE)
        parsed = []
        for word in text.strip().removeprefix(NODE).split(","):
            match = _RANGE.fullmatch(word.strip())
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last:
                raise ValueError("must be all, accelerators such as 0-19,24, or whole nodes such as node:0-1")
            parsed.append((first, last))
        return cls(tuple(sorted(parsed)), nodes)

    @property
    def everything(self) -> bool:
        return not self.ranges

    def __contains__(self, number: int) -> bool:
        return self.everything or any(first <= number <= last for first, last in self.ranges)

    def beyond(self, most: int) -> int | None:
        """The first number that these ranges name and that `most` nodes or accelerators do not have."""
        return next((max(first, most) for first, last in self.ranges if last >= most), None)

    def here(self, rank: int, per_node: int) -> tuple[int, ...] | None:
        """The accelerators of node `rank` in these ranges, by their numbers on the node, which has `per_node` of them; None if the node has
        none in the ranges. The result is () for a whole node without accelerators: its CPU has the role."""
        if self.nodes or self.everything:
            return tuple(range(per_node)) if rank in self else None
        own = tuple(number for number in range(per_node) if rank * per_node + number in self)
        return own or None

    def holders(self, ranks: Iterable[int], per_node: int) -> dict[int, tuple[int, ...]]:
        """The nodes among `ranks` that are in these ranges, with their accelerators."""
        accelerators = {rank: self.here(rank, per_node) for rank in ranks}
        return {rank: own for rank, own in accelerators.items() if own is not None}
