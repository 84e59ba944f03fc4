"""Groups of processes that are killed, stopped and started anew at random while they call at random (scripts/lab/group_fuzz.py)."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster import REPO
from group_members import Failed, Member, Members

sys.path.insert(0, str(REPO / "scripts" / "lab"))
import group_fuzz
import group_judge
from group_judge import digest, filling


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


#: two members that made two calls, as they write it down
SEEN: list[group_judge.Line] = [
    {
        "t": float(step),
        "what": what,
        "by": f"{rank}.0",
        "rank": rank,
        "joined": 1,
        "g": 1,
        "n": number,
        "call": "all_gather",
        "src": -1,
        "members": [0, 1],
        "seconds": 0.1,
        **(
            {"origin": [rank, 0, 1, 1, number], "size": 10}
            if what == "begin"
            else {"got": [[[r, 0, 1, 1, number], digest(filling([r, 0, 1, 1, number], 10))] for r in (0, 1)]}
        ),
    }
    for number in (0, 1)
    for step, what in ((2 * number, "begin"), (2 * number + 1, "end"))
    for rank in (0, 1)
]


@pytest.mark.parametrize(
    ("at", "change", "wrong"),
    [
        (0, {}, ""),
        (3, {"got": []}, "1.0 got"),
        (7, {"n": 2}, "was given to another call"),
        (3, {"members": [0, 1, 2]}, "generation 1 has members"),
        (1, {"t": 9.0}, "node 1 had begun all_gather"),
        (1, {"call": "barrier"}, "was given to another call"),
        (5, {"what": "another", "expected": "PeerLost", "said": "nothing"}, "after PeerLost another call gave nothing"),
        (6, {"what": "error", "error": "KeyError", "whom": 0, "host": "here", "message": ""}, "KeyError names"),
        (6, {"what": "error", "error": "PeerLost", "whom": None, "host": "", "message": ""}, "PeerLost names None"),
        (6, {"seconds": 999.0}, "ended after 999.0 s"),
        (6, {"n": 0}, "completed (1, 0) after (1, 0)"),
    ],
)  # fmt: skip
def test_the_judge_refuses_a_changed_history(at: int, change: group_judge.Line, wrong: str) -> None:
    lines = [line | change if number == at else line for number, line in enumerate(SEEN)]
    found = group_judge.judge(lines)
    assert any(wrong in one for one in found) if wrong else found == []


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
