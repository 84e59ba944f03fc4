"""Groups in the simulator: schedules under all faults, and histories with one thing changed, which the checks refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsbarrier.sim.campaign import campaign
from fsbarrier.sim.faults import USUAL
from fsbarrier.sim.groups import Diary, GroupWorld, check_groups
from fsbarrier.sim.setup import Setup


@pytest.mark.parametrize(
    ("nodes", "seeds", "mix"),
    [(2, 40, USUAL), (3, 80, USUAL), (3, 30, frozenset({"stale"})), (3, 15, frozenset()), (5, 15, USUAL)],
    ids=["two", "three", "old listings", "nothing", "five"],
)
def test_groups_hold_under_faults(nodes: int, seeds: int, mix: frozenset[str]) -> None:
    setup = Setup(nodes=nodes, mix=mix, groups=True)
    broken = [(v.seed, v.violations) for v in campaign(range(seeds), setup) if v.violations]
    assert broken == []


def other_value(diary: Diary) -> None:
    at = next(i for i, end in enumerate(diary.ends) if end.objects)
    diary.ends[at] = replace(diary.ends[at], objects=("another", *diary.ends[at].objects[1:]))


def never_called(diary: Diary) -> None:
    passed = next(end for end in diary.ends if not end.error)
    diary.calls.remove(next(call for call in diary.calls if call.row == passed.call.row))


def called_something_else(diary: Diary) -> None:
    passed = next(end for end in diary.ends if not end.error)
    at = next(
        i
        for i, call in enumerate(diary.calls)
        if call.row == passed.call.row and call.rank != passed.call.rank
    )
    diary.calls[at] = replace(diary.calls[at], name="something else")


def out_of_step_for_nothing(diary: Diary) -> None:
    diary.ends[-1] = replace(diary.ends[-1], objects=(), error="OutOfStep")


def waited_in_vain(diary: Diary) -> None:
    diary.ends[-1] = replace(diary.ends[-1], objects=(), error="timed out")


def lost_although_it_had_passed(diary: Diary) -> None:
    _, rank, row = diary.farewells[0]
    at = next(i for i, end in enumerate(diary.ends) if end.call.row == row and end.call.rank != rank)
    diary.ends[at] = replace(diary.ends[at], objects=(), error="PeerLost", about=rank, left=True)


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (other_value, "I2"),
        (never_called, "I2"),
        (called_something_else, "I2"),
        (out_of_step_for_nothing, "I6"),
        (waited_in_vain, "I6"),
        (lost_although_it_had_passed, "I7"),
    ],
)
def test_a_changed_history_is_refused(change: Callable[[Diary], None], number: str) -> None:
    world = GroupWorld(1, Setup(nodes=3, mix=frozenset(), groups=True))
    world.run()
    assert check_groups(world) == []
    change(world.diary)
    assert number in {violation.number for violation in check_groups(world)}
