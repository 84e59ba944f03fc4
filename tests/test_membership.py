"""Who is given up, and who may be taken in: a node that says that it waits, and nobody who still believes to be a member."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_builders import FIRST, LIMITS, NOW, generation, heard, seen, started

from fsbarrier.protocol.facts import Generation, Join, Member, Pulse, Verdict
from fsbarrier.protocol.membership import (
    Ledger,
    losses,
    occupied,
)

# --- what one look after another tells -----------------------------------------------------------------------------------------

BLIND_S = 3.0
#: when this node looked, when it had written its own last heartbeat, and what the look showed
Look = tuple[float, float | None, dict[int, Pulse]]


def beat(counter: int, incarnation: int = 1, state: str = "running", rank: int = 0) -> Pulse:
    return Pulse(rank, incarnation, counter, state)


def after_looks(*looks: Look) -> Ledger:
    ledger = Ledger()
    for now, beaten_at, beats in looks:
        ledger = ledger.observe(beats, now, beaten_at, BLIND_S)
    return ledger


@pytest.mark.parametrize(
    ("looks", "counter", "since", "moved"),
    [
        ([(1.0, 1.0, {0: beat(5)})], 5, 1.0, False),
        ([(1.0, 1.0, {0: beat(5)}), (2.0, 2.0, {0: beat(6)})], 6, 2.0, True),
        ([(1.0, None, {0: beat(5)}), (2.0, None, {0: beat(6)})], 6, 2.0, True),
        ([(1.0, 1.0, {0: beat(5)}), (2.0, 2.0, {0: beat(5)})], 5, 1.0, False),
        ([(1.0, 1.0, {0: beat(5)}), (2.0, 2.0, {})], 5, 1.0, False),
        ([(1.0, 1.0, {0: beat(5)}), (2.0, 2.0, {0: beat(4)})], 5, 1.0, False),  # an old listing comes late
        ([(1.0, 1.0, {0: beat(5)}), (2.0, 2.0, {0: beat(6)}), (3.0, 3.0, {0: beat(6)})], 6, 2.0, True),
        ([(1.0, 1.0, {0: beat(5)}), (2.0, 2.0, {0: beat(0, 2)})], 0, 2.0, False),  # a newer start counts anew
        ([(1.0, 1.0, {0: beat(5, 2)}), (2.0, 2.0, {0: beat(9, 1)})], 5, 1.0, False),  # an older one does not
        ([(8.0, 0.0, {0: beat(5)}), (9.0, 9.0, {})], 5, 9.0, False),  # never paused into the future
    ],
)
def test_a_counter_that_moves_is_a_sign_of_life(
    looks: list[Look], counter: int, since: float, moved: bool
) -> None:
    item = after_looks(*looks).seen[0]
    assert (item.beat.counter, item.since, item.moved) == (counter, since, moved)


@pytest.mark.parametrize(
    ("looks", "silent_s"),
    [
        ([(0.0, None, {0: beat(5)}), (50.0, None, {})], 0.0),  # whoever never wrote a heartbeat knows nothing
        ([(0.0, 0.0, {0: beat(5)}), (2.9, 2.0, {})], 2.0),  # up to its own last one, and not up to now
        ([(0.0, 0.0, {0: beat(5)}), (50.0, 0.0, {})], 0.0),
        ([(1.5, 1.0, {0: beat(5)}), (3.1, 3.0, {})], 1.5),  # from the look that showed it on
        ([(0.0, 0.0, {0: beat(5)}), (3.0, 3.0, {})], 3.0),  # poll_gap_s is not longer than poll_gap_s
        ([(0.0, 0.0, {0: beat(5)}), (9.0, 9.0, {})], 3.0),  # of a longer gap so much counts
        ([(0.0, 0.0, {0: beat(5)}), (9.0, 9.0, {}), (18.0, 18.0, {})], 6.0),  # where all is slow, too
        ([(0.0, 0.0, {0: beat(5)}), (2.0, 2.0, {}), (22.0, 2.0, {}), (22.5, 22.1, {})], 5.0),
        ([(0.0, 0.0, {0: beat(5)}), (22.0, 22.0, {0: beat(6)})], 0.0),
        ([(8.0, 0.0, {0: beat(5)}), (9.0, 9.0, {})], 0.0),  # never paused into the future
        ([(1.0, 1.0, {0: beat(5)}), (3.0, 3.0, {0: beat(0, 2)})], 2.0),  # a later start does not hide its end
        ([(1.0, 1.0, {0: beat(5)}), (3.0, 3.0, {0: beat(0, 2)}), (9.0, 9.0, {0: beat(1, 2)})], 5.0),
    ],
)
def test_only_time_in_which_this_node_wrote_heartbeats_is_silence(looks: list[Look], silent_s: float) -> None:
    """I7, and rule 3 of liveness."""
    assert after_looks(*looks).silence(Member(0, 1), since=0.0) == pytest.approx(silent_s)


# --- who is lost -----------------------------------------------------------------------------------------------------------------

# Node 2 is back 7 s after its last heartbeat.
BACK = replace(seen(2, incarnation=2, state="joining"), before=seen(2, ago=7.0))
LEFT = "it was stopped by hand or ended in an error"


@pytest.mark.parametrize(
    ("ledger", "joins", "why", "age"),
    [
        (heard(), {}, None, None),
        (heard(seen(2, ago=14.9)), {}, None, None),
        (heard(seen(2, ago=15.0)), {}, "no heartbeat for 15.0 s", 15.0),
        (heard(seen(2, ago=15.0, state="finished")), {}, "it finished, and no heartbeat for 15.0 s", 15.0),
        (heard(seen(2, ago=14.9, state="finished")), {}, None, None),
        (heard(seen(2, ago=15.0, state="joining")), {}, "no heartbeat for 15.0 s", 15.0),
        (heard(seen(2, ago=1.0, state="left")), {}, LEFT, 1.0),
        (heard(seen(2, ago=1.0, state="killed")), {}, "its daemon was killed", 1.0),
        (heard(seen(2, ago=1.0, state="stopped")), {}, None, None),
        (heard(seen(2, ago=1.0, state="broken")), {}, None, None),
        (heard(), started(2), None, None),
        (heard(), started(2, incarnation=2), "restarted as incarnation 2", 0.0),
        (heard(seen(2, ago=1.0, state="left")), started(2, incarnation=3), "restarted as incarnation 3", 1.0),
        (heard(seen(2, incarnation=2)), started(2), "restarted as incarnation 2", None),
        (heard(seen(2, incarnation=2)), started(2, incarnation=3), "restarted as incarnation 3", None),
        (heard(BACK), started(2, incarnation=2), "restarted as incarnation 2", 7.0),
        (
            heard(seen(2, incarnation=0, state="left")),
            {},
            "no heartbeat for 100.0 s",
            None,
        ),  # an older start's word
        (
            heard(ranks=(1,)),
            {},
            "no heartbeat for 100.0 s",
            None,
        ),  # never seen: since this node began to watch
        (heard(seen(2, ago=-1.0, state="left")), {}, LEFT, 0.0),  # heard after the time that is asked for
    ],
)
def test_who_is_lost_and_why(
    ledger: Ledger, joins: dict[int, Join], why: str | None, age: float | None
) -> None:
    found = losses(FIRST.members[1:], 1, joins, ledger, NOW - 100.0, LIMITS)
    assert [(loss.member.rank, loss.why, loss.age_s) for loss in found] == ([(2, why, age)] if why else [])
    for loss in found:
        news = ledger.last_news(loss.member)
        assert loss.beat == (news.beat if news is not None else None)


# --- who is there ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest", "ledger", "joins", "alive"),
    [
        (FIRST, heard(), {}, True),
        (None, heard(), {}, False),
        (generation(verdict=Verdict(0, "over")), heard(), {}, False),
        (FIRST, heard(seen(0, ago=15.0), seen(2, ago=14.9)), {}, True),
        (
            FIRST,
            heard(seen(0, ago=15.0), seen(2, ago=15.0)),
            {},
            False,
        ),  # this rank's own old start lives for nobody
        (FIRST, heard(seen(0, state="left"), seen(2, state="broken")), {}, False),
        (FIRST, heard(seen(0, state="finished"), seen(2, state="stopped")), {}, False),
        (FIRST, heard(seen(0, state="finished"), seen(2, state="running")), {}, True),
        (FIRST, heard(), started(0, 2, incarnation=2), False),
        (FIRST, heard(), started(0, incarnation=2), True),
        (generation(ranks=(1,)), heard(), {}, False),
    ],
)
def test_whether_a_generation_may_still_live(
    newest: Generation | None, ledger: Ledger, joins: dict[int, Join], alive: bool
) -> None:
    assert occupied(newest, 1, joins, ledger, NOW - 100.0, LIMITS) is alive
