"""Who is given up, and who may be taken in: a node that says that it waits, and nobody who still believes to be a member."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_builders import FIRST, LIMITS, NOW, generation, heard, seen, started

from fsbarrier.coordination.observer import Observer
from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol.facts import Beat, Generation, Join, Member, Pulse, StopRequest, Verdict
from fsbarrier.protocol.membership import (
    JOINING,
    Ledger,
    losses,
    occupied,
)
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.stop_requests import request_stop

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
    ],
)
def test_only_time_in_which_this_node_wrote_heartbeats_is_silence(looks: list[Look], silent_s: float) -> None:
    """I7, and rule 3 of liveness."""
    assert after_looks(*looks).silence(Member(0, 1), since=0.0) == pytest.approx(silent_s)


# --- who is lost -----------------------------------------------------------------------------------------------------------------

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
        (heard(seen(2, incarnation=2)), started(2), "restarted as incarnation 2", 100.0),
        (heard(seen(2, incarnation=2)), started(2, incarnation=3), "restarted as incarnation 3", 100.0),
        (
            heard(seen(2, incarnation=0, state="left")),
            {},
            "no heartbeat for 100.0 s",
            100.0,
        ),  # an older start's word
        (
            heard(ranks=(1,)),
            {},
            "no heartbeat for 100.0 s",
            100.0,
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
        news = ledger.news(loss.member)
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


PING = Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES)))


class Frozen(PosixStore):
    """A mount on which the listing of one directory never changes any more (two changes within one tick of its time)."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.known = directory, super().names(directory)

    def names(self, directory: Path) -> list[str]:
        return self.known if directory == self.directory else super().names(directory)


def test_of_two_starts_of_a_rank_the_newer_is_heard_and_the_older_told(tmp_path: Path) -> None:
    """I7: each has a heartbeat of its own, and by its name the older learns of the newer, however old its listings of `joins/` are."""
    paths, store = RunPaths(tmp_path), PosixStore()
    for folder in (paths.joins, paths.beats):
        store.make_dir(folder)
    for incarnation in (1, 2):
        join = Join(1, incarnation, "ab"[incarnation - 1], 1, "boot")
        store.put(paths.join(1, incarnation), join)
        if incarnation == 1:
            frozen = Frozen(paths.joins)
    others, older = Observer(store, paths, PING), Observer(frozen, paths, PING)
    for observer in (others, older):
        observer.prepare()
    for counter in range(20):
        for incarnation in (2, 1):  # the older one always beats last
            paths.pulse(Pulse(1, incarnation, counter, JOINING)).touch()
        seen = others.view(Node(0, 1, 0.0), float(counter)).ledger.seen[1]
        assert (seen.beat.incarnation, seen.since) == (2, float(counter))
        known = older.view(Node(1, 1, 0.0), float(counter)).joins[1]
        assert known.incarnation == 2


def test_a_stop_holds_for_the_starts_that_were_there(tmp_path: Path) -> None:
    """A listing that is behind shows it late: then it must not end a later session. Nor must it be missed by whom it is meant for."""
    paths, store = RunPaths(tmp_path), PosixStore()
    runs, started = {rank: Observer(store, paths, PING) for rank in (0, 1)}, {0: 3, 1: 2}
    for observer in runs.values():
        observer.prepare()

    def ask(number: int, *starts: Member) -> StopRequest:
        request = StopRequest(True, f"ann {number}", starts=starts)
        store.put(paths.stop(number), request)
        for observer in runs.values():
            observer.schedule.poll_now()
        return request

    def seen(rank: int) -> StopRequest | None:
        return runs[rank].view(Node(rank, 9, 0.0, started_as=started[rank]), 0.0).stop

    ask(1, Member(0, 2), Member(1, 1))
    assert seen(0) is seen(1) is None, "both were started since"
    ours = ask(2, Member(0, 3), Member(1, 5))
    assert seen(0) == seen(1) == ours, "node 1 rejoined as its fifth incarnation"
    ask(3, Member(0, 2))
    assert seen(0) == ours, "its author's listing was behind"


def test_a_stop_names_the_starts_that_its_author_sees(tmp_path: Path) -> None:
    paths, store = RunPaths(tmp_path), PosixStore()
    for folder in (paths.joins, paths.status):
        store.make_dir(folder)
    paths.record.write_bytes(b"{}")
    for rank, incarnation in ((0, 1), (0, 2), (1, 1), (2, 1)):
        store.put(paths.join(rank, incarnation), Join(rank, incarnation, "a", 1, "boot"))
    for rank, incarnation in ((0, 1), (1, 1), (2, 3)):
        store.put(paths.beat(rank, incarnation), Beat(rank, incarnation, 5, "a", 1, "running"))
    found = request_stop(tmp_path, now=True)
    assert found == store.read(paths.stop(1), StopRequest) and found.now
    assert found.starts == (Member(0, 2), Member(1, 1), Member(2, 3))


def test_two_requests_at_once_have_two_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither listing shows the other's request."""
    RunPaths(tmp_path).record.touch()
    monkeypatch.setattr(PosixStore, "names", lambda store, directory: [])
    made = [request_stop(tmp_path, now=False), request_stop(tmp_path, now=True)]
    paths = RunPaths(tmp_path)
    assert [PosixStore().read(paths.stop(number), StopRequest) for number in (1, 2)] == made
