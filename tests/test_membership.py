"""Who is given up, and who may be taken in: a node that says that it waits, and nobody who still believes to be a member."""

from __future__ import annotations

import pytest

from fsbarrier.protocol.facts import Beat, Join, Member
from fsbarrier.protocol.membership import JOINING, Ledger, Limits, live_joiners, losses


def joiners(states: list[str], *, incarnation: int = 2, seconds_ago: float = 0.0) -> dict[int, Member]:
    """What a node sees of node 0, whose second start has joined, after heartbeats in these states."""
    ledger = Ledger()
    for counter, state in enumerate(states):
        beat = Beat(0, incarnation, counter, "a", 1, state)
        ledger = ledger.observe({0: beat}, float(counter), float(counter), 60.0)
    joins = {0: Join(0, 2, "a", 1, "boot")}
    return live_joiners(joins, ledger, len(states) - 1 + seconds_ago, Limits())


def test_one_that_waits_and_beats_is_taken_in() -> None:
    assert joiners([JOINING, JOINING]) == {0: Member(0, 2, "a")}


@pytest.mark.parametrize("state", ["running", "leaving", "left", "finished", "stopped", "broken"])
def test_one_in_another_state_is_not(state: str) -> None:
    """A stopped node that wakes beats as the member it was, until it learns that the others went on: it comes back anew."""
    assert joiners([JOINING, state]) == {}


def test_a_file_that_lies_about_is_no_sign_of_life() -> None:
    assert joiners([JOINING]) == {}
    assert joiners([JOINING, JOINING], seconds_ago=7.0) == {}
    assert joiners([JOINING, JOINING], incarnation=1) == {}


@pytest.mark.parametrize("known", [1, 2])
def test_whoever_beats_as_a_newer_start_is_not_silent(known: int) -> None:
    """I7: the heartbeat of a second start may be read before its record; that is a restart, and no silence since the generation began."""
    ledger = Ledger().observe({0: Beat(0, 2, 1, "b", 1, JOINING)}, 100.0, 100.0, 60.0)
    joins = {0: Join(0, known, "a", 1, "boot")}
    (loss,) = losses([Member(0, 1, "a")], 1, joins, ledger, since=0.0, now=100.0, limits=Limits())
    assert loss.why == "restarted as incarnation 2"
