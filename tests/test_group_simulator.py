"""Groups in the simulator: schedules under all faults, and histories with one thing changed, which the checks refuse."""

from __future__ import annotations

import pytest

from fsbarrier.sim.campaign import campaign
from fsbarrier.sim.setup import USUAL, Setup


@pytest.mark.parametrize(
    ("nodes", "seeds", "mix"),
    [
        (2, 20, USUAL),
        (3, 40, USUAL),
        (3, 30, frozenset({"stale"})),
        (3, 15, frozenset()),
        (5, 10, USUAL),
        pytest.param(3, 400, USUAL, marks=pytest.mark.slow),
    ],
    ids=["two", "three", "old listings", "nothing", "five", "many"],
)
def test_groups_hold_under_faults(nodes: int, seeds: int, mix: frozenset[str]) -> None:
    setup = Setup(nodes=nodes, mix=mix, groups=True)
    broken = [(v.seed, v.violations) for v in campaign(range(seeds), setup) if v.violations]
    assert broken == []
