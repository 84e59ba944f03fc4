"""`fsbarrier.join` with real processes: collectives, deaths, restarts, pauses, leaving, and everything given wrongly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from group_members import FAST, REPO, SILENCE, Failed, Members

import fsbarrier

HERE = socket.gethostname()


def lost_at(group: Members, rank: int) -> Failed:
    """The PeerLost of a member whose first barrier all may still have come to."""
    outcome = group.ask("barrier", rank)[0]
    if not isinstance(outcome, Failed):
        outcome = group.ask("barrier", rank)[0]
    assert isinstance(outcome, Failed) and outcome.kind == "PeerLost"
    return outcome


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[fsbarrier.Group]:
    """A group of one, in this process."""
    with fsbarrier.join(tmp_path / "group", node_rank=0, num_nodes=1, **FAST) as group:
        yield group


# --- what the members exchange ----------------------------------------------------------------------------------------------


def test_objects_reach_all_members_in_any_order_of_start(tmp_path: Path) -> None:
    with Members(tmp_path, 4) as group:
        group.start(2, 0, 3).start(1).joined()
        assert group.ask("look") == [{"generation": 1, "members": [0, 1, 2, 3], "joiners": []}] * 4
        for rank in range(4):
            group[rank].tell("all_gather", obj={"rank": rank, "text": "ü\ud800"[:1]})
        assert [group[rank].answer() for rank in range(4)] == [
            [{"rank": rank, "text": "ü"} for rank in range(4)]
        ] * 4
        assert group.ask("broadcast", obj="two's", src=2) == ["two's"] * 4
        times = group.ask("barrier")
        assert max(entered for entered, _ in times) <= min(left for _, left in times)


def test_nobody_passes_before_the_last_one_came(tmp_path: Path) -> None:
    with Members(tmp_path, 3) as group:
        group.start().joined()
        group[0].tell("barrier")
        group[1].tell("barrier")
        last = group.ask("barrier", 2)
        times = [group[0].answer(), group[1].answer(), *last]
        assert all(left >= last[0][0] for _, left in times)


def test_an_object_of_ten_megabytes_reaches_all(tmp_path: Path) -> None:
    with Members(tmp_path, 3) as group:
        group.start().joined()
        assert group.ask("big", size=10_000_000, src=0) == [[10_000_000, 10_000_000]] * 3
        records = [path.stat().st_size for path in (tmp_path / "coordination" / "generations").iterdir()]
        assert sum(records) < 10_000  # what callers exchange is in no record that lasts


def test_only_what_json_keeps_can_be_sent(alone: fsbarrier.Group) -> None:
    assert alone.broadcast((1, [2.5, None, True, "x", 2**70])) == [1, [2.5, None, True, "x", 2**70]]
    circular: list[Any] = []
    circular.append(circular)
    # The second can become JSON, but cannot be compared with what comes back.
    depths: list[list[Any]] = [[], []]
    for nested, levels in zip(depths, (100_000, 600), strict=True):
        for _ in range(levels):
            nested[:] = [[*nested]]
    for wrong in (b"bytes", {1, 2}, object(), {1: 2}, [{"a": {None: 1}}], {(1, 2): 3}):
        with pytest.raises(TypeError, match="JSON data"):
            alone.all_gather(wrong)
    for wrong in (circular, *depths, "x" * 24 * 2**20):
        with pytest.raises(ValueError, match=r"cannot be sent|send its path"):
            alone.broadcast(wrong)
    assert alone.all_gather("still here") == ["still here"]


def test_what_was_used_is_removed(tmp_path: Path, alone: fsbarrier.Group) -> None:
    for number in range(50):
        assert alone.all_gather(number) == [number]
    alone.leave()  # nothing is being removed any more
    facts = list((tmp_path / "group" / "coordination" / "gen-000001").rglob("*"))
    assert len(facts) < 10, facts


# --- losses -------------------------------------------------------------------------------------------------------------------


def test_killed_rank_0_and_a_member_that_was_busy_meanwhile(tmp_path: Path) -> None:
    with Members(tmp_path, 4, **SILENCE) as group:
        group.start().joined()
        group[0].kill()
        for lost in group.ask("barrier", 1, 2):
            assert (lost.kind, lost.rank, lost.host) == ("PeerLost", 0, HERE)
            assert lost.age >= SILENCE["dead_s"] and "no heartbeat" in lost.message
        assert group.ask("barrier", 1)[0].kind == "PeerLost"  # until it regroups
        group.by_rank.pop(0)
        assert group.ask("regroup", 1, 2) == [[2, [1, 2, 3]]] * 2
        group[1].tell("all_gather", obj=1)
        group[2].tell("all_gather", obj=2)
        busy = group.ask("barrier", 3)[0]  # must not meet the others' all_gather
        assert (busy.kind, busy.rank, busy.host) == ("PeerLost", 0, HERE)
        assert group.ask("regroup", 3) == [[2, [1, 2, 3]]]
        assert group.ask("all_gather", 3, obj=3) == [[1, 2, 3]]
        assert [group[1].answer(), group[2].answer()] == [[1, 2, 3]] * 2
        wrong = group.ask("broadcast", 1, obj=1, src=0)[0]
        assert (wrong.kind, "(1, 2, 3)" in wrong.message) == ("ValueError", True)
        assert group.ask("broadcast", obj="by 1", src=1) == ["by 1"] * 3


def test_a_restarted_rank_is_taken_in(tmp_path: Path) -> None:
    with Members(tmp_path, 3) as group:
        group.start().joined()
        group.restart(1)
        for lost in group.ask("barrier", 0, 2):
            assert (lost.kind, lost.rank) == ("PeerLost", 1)
        assert group.ask("regroup", 0, 2) == [[2, [0, 1, 2]]] * 2
        group.joined(1)
        assert group.ask("all_gather", obj="x") == [["x"] * 3] * 3


def test_a_late_rank_is_taken_in_when_the_members_regroup(tmp_path: Path) -> None:
    with Members(tmp_path, 3, **SILENCE) as group:
        group.start().joined()
        group[2].kill()
        assert {lost.kind for lost in group.ask("barrier", 0, 1)} == {"PeerLost"}
        assert group.ask("regroup", 0, 1) == [[2, [0, 1]]] * 2
        group.start(2)
        while 2 not in group.ask("look", 0)[0]["joiners"]:
            group.ask("barrier", 0, 1)
        assert group.ask("regroup", 0, 1) == [[3, [0, 1, 2]]] * 2
        group.joined(2)
        assert group.ask("all_gather", obj="x") == [["x"] * 3] * 3


def test_a_member_that_wakes_up_late_is_fenced(tmp_path: Path) -> None:
    with Members(tmp_path, 3, **SILENCE) as group:
        group.start().joined()
        group[1].tell("barrier")
        group[1].signal(signal.SIGSTOP)  # in a collective, or just before: both must end alike
        group[2].signal(signal.SIGSTOP)
        lost = group.ask("barrier", 0)[0]
        assert (lost.kind, lost.rank) == ("PeerLost", 1) or (lost.kind, lost.rank) == ("PeerLost", 2)
        generation, members = group.ask("regroup", 0)[0]
        while members != [0]:  # the other one's silence may be noticed a moment later
            assert group.ask("barrier", 0)[0].kind == "PeerLost"
            generation, members = group.ask("regroup", 0)[0]
        for rank in (1, 2):
            group[rank].signal(signal.SIGCONT)
        for fenced in (group.outcome(1), *group.ask("barrier", 1, 2)):
            assert (fenced.kind, fenced.host) == ("Fenced", HERE)
            assert f"generation {generation}" in fenced.message
        assert group.ask("all_gather", 0, obj="alone") == [["alone"]]


def test_of_two_processes_with_one_rank_the_first_is_fenced(tmp_path: Path) -> None:
    with Members(tmp_path, 2) as group:
        group.start().joined()
        first = group[1]
        group.start(1)
        with pytest.raises(Failed) as caught:
            first.ask("barrier")
        assert (caught.value.kind, caught.value.rank, caught.value.host) == ("Fenced", 1, HERE)
        lost_at(group, 0)
        assert group.ask("regroup", 0) == [[2, [0, 1]]]
        group.joined(1)
        assert group.ask("all_gather", obj=0) == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("how", "words"), [("leave", "it left the group"), ("fail", "after ValueError: boom")]
)
def test_a_member_that_leaves_is_lost_for_the_others_with_its_reason(
    tmp_path: Path, how: str, words: str
) -> None:
    with Members(tmp_path, 3) as group:
        group.start().joined()
        arguments = {"text": "boom"} if how == "fail" else {}
        group.ask("barrier")
        group.ask(how, 0, **arguments)
        lost = group.ask("barrier", 1)[0]
        assert (lost.kind, lost.rank, lost.host) == ("PeerLost", 0, HERE)
        assert words in lost.message
        assert group.ask("barrier", 0)[0].kind == "RuntimeError"  # it has left
        assert group.ask("regroup", 1, 2) == [[2, [1, 2]]] * 2


def test_whoever_is_interrupted_in_a_call_has_left(tmp_path: Path) -> None:
    with Members(tmp_path, 2) as group:
        group.start().joined()
        group[0].tell("interrupted", obj="a")
        assert group.outcome(0).kind == "KeyboardInterrupt"
        assert group.ask("barrier", 0)[0].kind == "RuntimeError"
        lost = lost_at(group, 1)
        assert lost.rank == 0 and "it left the group after KeyboardInterrupt" in lost.message


# --- waits that end -----------------------------------------------------------------------------------------------------------


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(fsbarrier.BarrierTimeout, match=r"node 1 \(never seen\), node 2") as caught:
        fsbarrier.join(tmp_path, node_rank=0, num_nodes=3, **{**FAST, "timeout_s": 0.5})
    assert (caught.value.rank, caught.value.host, caught.value.age) == (1, "", 0.5)


def test_a_directory_that_fails_is_a_store_error(tmp_path: Path) -> None:
    with fsbarrier.join(tmp_path, node_rank=0, num_nodes=1, **FAST) as group:
        (tmp_path / "coordination").rename(tmp_path / "away")
        (tmp_path / "coordination").write_text("")
        with pytest.raises(fsbarrier.StoreError, match=r"node 0: .*has failed for") as caught:
            group.barrier()
        assert (caught.value.rank, caught.value.host) == (0, HERE)
        assert caught.value.age is not None and caught.value.age >= FAST["dead_s"]


# --- paths and arguments ------------------------------------------------------------------------------------------------------


def test_a_path_is_used_again(tmp_path: Path) -> None:
    for session in range(2):
        with Members(tmp_path, 3, **SILENCE) as group:
            group.start().joined()
            assert group.ask("all_gather", obj=session) == [[session] * 3] * 3
            group.ask("barrier")
            group.ask("leave", 0, 1)
            group[2].kill()
    with Members(tmp_path, 2, **SILENCE) as group:  # fewer, and one of those before was killed
        group.start().joined()
        assert group.ask("look") == [{"generation": 3, "members": [0, 1], "joiners": []}] * 2
        assert group.ask("all_gather", obj="x") == [["x"] * 2] * 2


def test_different_numbers_of_nodes_are_refused_on_all(tmp_path: Path) -> None:
    with Members(tmp_path, 2) as two, Members(tmp_path, 3) as three:
        two.start(0)
        three.start(1)
        for failed in (two.outcome(0), three.outcome(1)):
            assert failed.kind == "ValueError" and "num_nodes=2" in failed.message
            assert "num_nodes=3" in failed.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"node_rank": 2},
        {"node_rank": -1},
        {"num_nodes": 0},
        {"timeout_s": 0},
        {"beat_s": 3.0},
        {"dead_s": 0.1},
    ],
)
def test_wrong_arguments_are_named_and_make_no_folder(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        fsbarrier.join(tmp_path / "group", **{"node_rank": 0, "num_nodes": 2, **FAST, **wrong})
    assert not (tmp_path / "group").exists()


def test_paths_that_cannot_be_a_group_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fsbarrier.StoreError, match="node 0: cannot join") as caught:
        fsbarrier.join(tmp_path / "file" / "group", node_rank=0, num_nodes=1)
    assert (caught.value.rank, caught.value.host) == (0, HERE)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="directory of a run"):
        fsbarrier.join(tmp_path, node_rank=0, num_nodes=1)
    (tmp_path / "locked").mkdir(mode=0o500)
    if not os.access(tmp_path / "locked", os.W_OK):  # root may write everywhere
        with pytest.raises(fsbarrier.StoreError, match="Permission denied"):
            fsbarrier.join(tmp_path / "locked", node_rank=0, num_nodes=1)


def test_nothing_but_light_libraries_is_needed(tmp_path: Path) -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {{"fsbarrier", "filelock", "msgspec", "watchdog", "rich"}}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import fsbarrier
with fsbarrier.join({str(tmp_path)!r}, node_rank=0, num_nodes=1) as group:
    print(group.all_gather({{"light": True}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[{'light': True}]\n", "")
