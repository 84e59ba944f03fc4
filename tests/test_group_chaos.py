"""Groups under random strikes: real processes, and the simulator."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster import REPO
from group_members import Failed, Member, Members
from sim.campaign import campaign
from sim.setup import USUAL, Setup
from waiting import DEADLINE_S

sys.path.insert(0, str(REPO / "scripts" / "lab"))
import group_fuzz
import group_judge


def outcome(member: Member, deadline_s: float) -> Any:
    """A member's answer, an exception for a failure, None for one that is dead."""
    try:
        return member.answer(deadline_s)
    except Failed as failed:
        return failed
    except AssertionError:
        if member.process.poll() is not None:
            return None
        raise


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [
        pytest.param(3, 4.0, id="3"),
        *(
            pytest.param(nodes, 120.0, id=str(nodes), marks=[pytest.mark.slow, pytest.mark.timeout(2400)])
            for nodes in (2, 4, 8, 16, 64)
        ),
    ],
)
def test_random_calls_and_strikes(tmp_path: Path, nodes: int, seconds: float) -> None:
    fuzz = group_fuzz.Fuzz(tmp_path, nodes, seed=nodes)
    assert fuzz.run(seconds) == []
    seen = group_judge.read(tmp_path)
    assert sum(line["what"] == "end" for line in seen) > 2 * nodes
    assert fuzz.struck


def test_the_survivors_of_every_instant_agree(tmp_path: Path) -> None:
    """The leader dies at a random instant of a stream of collectives, again and again."""
    dice, stop, idle = random.Random(7), tmp_path / "stop", threading.Event()
    with Members(tmp_path / "group", 5, beat_s=0.1, suspect_s=1.5, dead_s=4.0) as group:
        group.start().joined()
        for member in group.all:
            member.tell("elastic", stop=str(stop))
        for rank in range(3):
            idle.wait(dice.random())
            group[rank].kill()
        stop.touch()
        ends = [outcome(group[rank], DEADLINE_S) for rank in (3, 4)]
        assert all(isinstance(end, dict) for end in ends), ends
        assert ends[0]["step"] == ends[1]["step"]


# --- simulated ------------------------------------------------------------------------------------------------------------------


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
