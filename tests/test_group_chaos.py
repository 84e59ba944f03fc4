"""Groups of many processes that are killed, paused and started anew at random, while the others regroup and go on."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from group_members import Failed, Member, Members

SLOWER = {"beat_s": 1.0, "suspect_s": 4.0, "dead_s": 10.0, "timeout_s": 170.0}  # 64 processes on a few cores


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
    ("nodes", "strikes", "pause_s", "timing"),
    [
        pytest.param(6, 4, 1.0, {}, id="6"),
        pytest.param(64, 14, 5.0, SLOWER, id="64", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_whoever_lives_goes_on(
    tmp_path: Path, nodes: int, strikes: int, pause_s: float, timing: dict[str, float]
) -> None:
    """Each collective gave all its members the same; those that live at the end agree; none but the struck ones fell out."""
    dice, stop, idle = random.Random(nodes), tmp_path / "stop", threading.Event()
    with Members(tmp_path / "group", nodes, **timing) as group:
        group.start().joined()
        for member in group.all:
            member.tell("elastic", stop=str(stop))
        struck: set[int] = set()
        for _ in range(strikes):
            idle.wait(pause_s * dice.random() * 2)
            rank = dice.choice([r for r in group.by_rank if r not in struck])
            struck.add(rank)
            kind = dice.choice(["kill", "kill and restart", "pause"])
            group[rank].signal(signal.SIGSTOP if kind == "pause" else signal.SIGKILL)
            if kind == "kill and restart":
                group[rank].process.wait()
                group.start(rank)[rank].tell("elastic", stop=str(stop))
        unstruck = [r for r in group.by_rank if r not in struck]
        assert len(unstruck) >= 2
        idle.wait(timing.get("dead_s", 2.0))  # until the last ones struck can be known to be dead
        for member in group.all:
            if member.process.poll() is None:
                member.signal(signal.SIGCONT)
        stop.touch()
        ends = {rank: outcome(group[rank], 180.0) for rank in unstruck}
        assert all(isinstance(end, dict) for end in ends.values()), ends
        assert len({(end["step"], end["generation"]) for end in ends.values()}) == 1
        seen: dict[tuple[int, int], Any] = {}
        for end in ends.values():
            for generation, index, given in end["passed"]:
                assert seen.setdefault((generation, index), given) == given
        assert len(seen) > 2 and max(seen)[0] > 1


def test_the_survivors_of_every_instant_agree(tmp_path: Path) -> None:
    """The leader dies at a random instant of a stream of collectives, again and again."""
    dice, stop, idle = random.Random(7), tmp_path / "stop", threading.Event()
    with Members(tmp_path / "group", 5, beat_s=0.1, suspect_s=0.6, dead_s=1.2) as group:
        group.start().joined()
        for member in group.all:
            member.tell("elastic", stop=str(stop))
        for rank in range(3):
            idle.wait(dice.random())
            group[rank].kill()
        stop.touch()
        ends = [outcome(group[rank], 60.0) for rank in (3, 4)]
        assert all(isinstance(end, dict) for end in ends), ends
        assert ends[0]["step"] == ends[1]["step"]
