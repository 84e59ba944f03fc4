"""Each invariant's function can fail: a schedule in which all holds, with one thing in its history changed, is found wanting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sim import sessions
from sim.history import History, JournalLine, MergedGroup, Missing, ProcessEnd, Published, Used
from sim.invariants import check
from sim.scenario import prepare
from sim.setup import Setup
from sim.verdicts import i7_no_false_death
from sim.world import World

from fsbarrier.protocol.facts import Fact, Generation, Position, StopRequest
from fsbarrier.settings.value_types import RlPhase

STORY = Path(__file__).parent / "scenarios" / "leader_dies_in_phase_4.txt"


@pytest.fixture
def world() -> World:
    """A leader died, a second generation went on: everything held."""
    world = prepare(STORY.read_text().partition("----")[0])
    world.run()
    return world


def fresh(history: History) -> None:
    """Forget what was read from the records and the journals."""
    for name in ("generations", "facts", "joins", "places", "passed", "entered"):
        history.__dict__.pop(name, None)


def generation(history: History, number: int, change: Callable[[Generation], Generation]) -> None:
    """Change a generation's record."""
    for at, write in enumerate(history.writes):
        if write.path.endswith(f"generations/gen-{number:06d}.json") and isinstance(write.record, Generation):
            history.writes[at] = replace(write, record=change(write.record))
    fresh(history)


def first(history: History, name: str, number: int = 1) -> int:
    """The place of the first event of this name in generation `number`."""
    return next(
        i
        for i, event in enumerate(history.events)
        if event.event == name and event.node.generation and event.node.generation.number == number
    )


def no_fact(history: History) -> None:
    history.writes[:] = [
        w for w in history.writes if not w.path.endswith("p02-train_rollout/iter-000001.node-0001.done")
    ]


def no_entry(history: History) -> None:
    del history.events[first(history, "phase_started")]


def other_decision(history: History) -> None:
    at = next(
        i
        for i, event in enumerate(history.events)
        if event.event == "phase_finished" and event.node.position == Position(1, 1)
    )
    entry = {"iteration": 1, "value": {"wanted": []}}
    node = replace(history.events[at].node, decisions={"train_assign": entry})
    history.events[at] = replace(history.events[at], node=node)


def nothing_adopted(history: History) -> None:
    generation(history, 2, lambda record: replace(record, start=Position(1, 4), decisions={}))


def back_again(history: History) -> None:
    history.events.append(history.events[first(history, "phase_started")])


def written_twice(history: History) -> None:
    write = next(w for w in history.writes if "/generations/" in w.path)
    assert isinstance(write.record, Generation)
    history.writes.append(replace(write, record=replace(write.record, reason="another")))


def starts_too_far(history: History) -> None:
    generation(history, 2, lambda record: replace(record, start=Position(1, 9)))


def old_entry(history: History) -> None:
    merged = history.merges[0]
    old = MergedGroup(merged.entries[0].task, "elsewhere.part", 0, merged.generation - 1, merged.policy)
    history.merges[0] = replace(merged, entries=(old, *merged.entries[1:]))


def other_policy(history: History) -> None:
    merged = history.merges[0]
    history.merges[0] = replace(merged, policy=f"{merged.policy} of another lineage")


def other_merge_used(history: History) -> None:
    train = next(merged for merged in history.merges if merged.split == "train")
    history.merges.append(replace(train, stamp=99))
    history.used.append(Used(30.0, history.events[-1].node, 99))


def put_over_a_newer_one(history: History) -> None:
    train = next(merged for merged in history.merges if merged.split == "train")
    history.merges.append(replace(train, stamp=99, generation=1, entries=(), adopted=()))
    history.published.append(Published("/run/public", 99, ("gen-000001.json", "gen-000002.json")))


def model_moved_under_a_newer_one(history: History) -> None:
    shown = ("gen-000001.json", "gen-000002.json")
    history.served.append(history.served[-1]._replace(version=2, generation=1, shown=shown))


def model_moved_back(history: History) -> None:
    history.served.append(history.served[0]._replace(folder="the first model", version=0))


def one_task_too_few(history: History) -> None:
    """Nobody notices but whoever knows how many there are."""
    name = "p01-train_assign/iter-000001.node-0000.done"
    at, write = next((i, w) for i, w in enumerate(history.writes) if w.path.endswith(name))
    fact = write.record
    assert isinstance(fact, Fact)
    value = {**fact.value, "wanted": fact.value["wanted"][1:]}
    history.writes[at] = replace(write, record=replace(fact, value=value))
    gone = fact.value["wanted"][0]
    for n, merged in enumerate(history.merges):
        if merged.split == "train":
            history.merges[n] = replace(merged, entries=tuple(e for e in merged.entries if e.task != gone))
    fresh(history)


def task_twice(history: History) -> None:
    merged = history.merges[0]
    history.merges[0] = replace(merged, entries=(*merged.entries, merged.entries[0]))


def task_lost(history: History) -> None:
    merged = history.merges[0]
    history.merges[0] = replace(merged, entries=merged.entries[1:])


def still_waiting(history: History) -> None:
    history.stuck.append("node 1 still waits")


def ends_unaccounted(history: History) -> None:
    history.ended[1] = ProcessEnd(30.0, 1, 3, "the filesystem failed")


def dead_too_soon(history: History) -> None:
    event = history.events[first(history, "node_lost")]
    lost = [{"node_rank": 0, "host": "host0", "why": "no heartbeat for 15.0 s"}]
    early = history.ended[next(n for n, end in history.ended.items() if end.code is None)].time - 0.01
    history.events.append(replace(event, time=early, began=early, fields={"lost": lost}))


def unrecorded(history: History) -> None:
    event = history.events[first(history, "phase_started")]
    assert event.node.generation is not None
    other = replace(event.node, generation=replace(event.node.generation, reason="another"))
    history.events.append(JournalLine(event.time, event.process, "note", other, {}, event.began))


def removed(history: History) -> None:
    node = next(e.node for e in reversed(history.events) if e.node.generation is not None)
    history.missing.append(Missing(30.0, 1, node, "/run/checkpoints/policy-000001.g0002"))


def looked_up(history: History) -> None:
    history.misses["/run/coordination/generations/gen-000003.json"] = 9


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("I1", no_fact),
        ("I1", no_entry),
        ("I2", other_decision),
        ("I2", nothing_adopted),
        ("I3", back_again),
        ("I3", written_twice),
        ("I3", starts_too_far),
        ("I4", old_entry),
        ("I4", other_merge_used),
        ("I17", other_policy),
        ("I4", put_over_a_newer_one),
        ("I4", model_moved_under_a_newer_one),
        ("I4", model_moved_back),
        ("I5", task_twice),
        ("I5", task_lost),
        ("I5", one_task_too_few),
        ("I6", still_waiting),
        ("I6", ends_unaccounted),
        ("I7", dead_too_soon),
        ("I8", unrecorded),
        ("I9", removed),
        ("I11", looked_up),
    ],
)
def test_a_change_is_noticed(world: World, number: str, change: Callable[[History], None]) -> None:
    assert check(world) == []
    fresh(world.history)
    change(world.history)
    assert number in {violation.number for violation in check(world)}


def test_an_update_that_is_made_again_is_noticed() -> None:
    world = prepare("nodes 3\nwhen node 2 enters weights_publish: kill node 2")
    world.run()
    assert check(world) == []
    generation(world.history, 2, lambda record: replace(record, start=Position(1, 7)))
    assert "I19" in {violation.number for violation in check(world)}


def test_a_stop_at_the_safe_point_is_noticed_elsewhere() -> None:
    world = prepare("nodes 3\nwhen node 0 enters train_aggregate: ask to stop at once")
    world.run()
    assert check(world) == []
    at, request = next(
        (i, w) for i, w in enumerate(world.history.writes) if isinstance(w.record, StopRequest)
    )
    world.history.writes[at] = replace(request, record=replace(request.record, now=False))
    assert "I15" in {v.number for v in check(world)}


@pytest.mark.parametrize(("hidden_s", "holds"), [(30.0, True), (10.0, False)])
def test_only_heartbeats_that_a_mount_must_have_shown_count(
    world: World, hidden_s: float, holds: bool
) -> None:
    """Node 1 takes node 0 for dead, which beats all the time."""
    history = world.history
    event = next(e for e in history.events if e.event == "node_lost" and e.node.rank == 1)
    lost = [{"node_rank": 0, "host": "host0", "why": "no heartbeat for 15.0 s"}]
    history.events[:] = [replace(event, time=40.0, began=40.0, fields={"lost": lost})]
    history.beats[0, 1] = [2.0 * n for n in range(21)]
    history.ended.clear()
    history.hidden_s = hidden_s
    assert (list(i7_no_false_death(history)) == []) is holds


@pytest.mark.parametrize("phases", ["both", "rollout", "update"])
def test_a_session_with_other_phases_begins_where_work_is_left(phases: RlPhase) -> None:
    """The run has rolled out two iterations, and has learned from none of them. In this schedule the next session asks for more."""
    world = World(17, Setup(mix=frozenset(), iterations=2, phases="rollout", policy="shrink"))
    world.sessions_left = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "OTHERS", (phases,))
        history = world.run()
    assert check(world) == []
    assert [session.phases for session in world.sessions] == ["rollout", phases]
    begins = history.generations[max(history.generations)][1].start
    assert begins == (Position(3, 0) if phases == "rollout" else Position(1, 7))
