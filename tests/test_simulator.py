"""The simulator: thousands of schedules hold every invariant, and a seed replays identically. Broken protocols: test_mutants.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from sim.campaign import campaign, make_world
from sim.damage import DAMAGES, WRONG_SETTINGS
from sim.history import Said
from sim.invariants import check
from sim.scenario import prepare
from sim.settings import CommandLines, can_hold
from sim.setup import USUAL, Setup, parse_mix
from sim.store import Habits
from sim.transcript import transcript

import fsbarrier
from fsbarrier.protocol.codec import CorruptRecord, decode, encode
from fsbarrier.protocol.facts import Generation, Join, Payload, Position, StopRequest
from fsbarrier.settings.value_types import RlPhase

ALL = Setup(mix=USUAL)
KINDS_OF_RUN: tuple[RlPhase, ...] = ("both", "rollout", "update")


@pytest.mark.parametrize(
    ("setup", "seeds"),
    [
        pytest.param(Setup(mix=frozenset()), range(15), id="no-faults"),
        pytest.param(ALL, range(1000, 1060), id="one-iteration"),
        pytest.param(replace(ALL, iterations=3), range(2000, 2012), id="three-iterations"),
        pytest.param(replace(ALL, nodes=8), range(3000, 3008), id="eight-nodes"),
        pytest.param(replace(ALL, nodes=1), range(4000, 4030), id="one-node"),
        pytest.param(ALL, range(5000, 7000), id="many", marks=pytest.mark.slow),
        pytest.param(
            replace(ALL, nodes=5), range(7000, 7400), id="many of five nodes", marks=pytest.mark.slow
        ),
    ],
)
def test_every_invariant_holds(setup: Setup, seeds: range) -> None:
    broken = [verdict for verdict in campaign(seeds, setup) if verdict.violations]
    assert broken == [], (
        f"replay: python scripts/lab/simulate.py --nodes {setup.nodes} --iterations {setup.iterations} --trace SEED"
    )


@pytest.mark.parametrize("kind", sorted(USUAL))
def test_no_kind_of_fault_alone_breaks_an_invariant(kind: str) -> None:
    broken = [verdict for verdict in campaign(range(10), Setup(mix=parse_mix(kind))) if verdict.violations]
    assert broken == []


def test_faults_really_strike() -> None:
    awaited = {
        "crash",
        "power",
        "pause",
        "slow",
        "outage",
        "leave",
        "twin",
        "program",
        "lost",
        "error",
        "garbled",
    }
    meetings = {"a judge on some nodes", "a wait for lost nodes"}
    for verdict in campaign(range(150), ALL):
        awaited -= verdict.struck
        meetings -= verdict.reached
        if not awaited | meetings:
            break
    assert not awaited | meetings


def test_a_seed_replays_identically_also_in_another_process() -> None:
    seeds, setup = (7, 21, 40), replace(ALL, iterations=2)
    told = [transcript(make_world(seed, setup).run()) for seed in seeds]
    assert told == [transcript(make_world(seed, setup).run()) for seed in seeds]
    code = (
        "import sys, json; from sim.campaign import make_world; from sim.setup import Setup;"
        "from sim.setup import USUAL; from sim.transcript import transcript;"
        "setup = Setup(mix=USUAL, iterations=2);"
        f"print(json.dumps([transcript(make_world(seed, setup).run()) for seed in {seeds}]))"
    )
    root = str(Path(fsbarrier.__file__).parents[1])
    environ = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": f"{root}:{root}/scripts/lab"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == told


@pytest.mark.parametrize("said", [*DAMAGES])
def test_what_is_damaged_is_never_taken_for_a_record(said: str) -> None:
    """Nor for an absent one: why it cannot be read is known, and which format it has."""
    rng = Random(said)
    for write in make_world(1, replace(ALL, iterations=2)).run().writes:
        ends_the_run = isinstance(write.record, Generation) and write.record.verdict is not None
        if ends_the_run and said == "{} names a leader who is no member":
            # It may have no members, and so any leader.
            continue
        if isinstance(write.record, StopRequest) and said == "{} becomes another record":
            # The other record is a stop request too.
            continue
        with pytest.raises(CorruptRecord) as caught:
            decode(DAMAGES[said](encode(write.record), rng), type(write.record))  # type: ignore[type-var]
        assert "format" in str(caught.value) or said != "{} is written in record format 3"


@pytest.mark.parametrize("said", [*WRONG_SETTINGS])
def test_a_record_with_a_wrong_setting_is_whole_and_followed_by_nobody(said: str) -> None:
    world = make_world(1, Setup(mix=frozenset()))
    written = [write.record for write in world.run().writes]
    records = [record for record in written if isinstance(record, Join | Generation)]
    for record in records:
        spoilt = decode(WRONG_SETTINGS[said](encode(record), Random(said)), type(record))  # type: ignore[type-var]
        assert can_hold(world.settings, record)
        assert not can_hold(world.settings, spoilt)
    assert {type(record) for record in records} == {Join, Generation}


def test_heartbeats_have_mishaps_and_whoever_is_alive_is_heard() -> None:
    """A pulse that was renamed with an error has another name than its node believes."""
    setup, struck = Setup(mix=parse_mix("lost,errors"), policy="shrink"), set[str]()
    for seed in range(12):
        world = make_world(seed, setup)
        world.draw.error_rate = 0.01
        history = world.run()
        assert check(world) == [], seed
        assert not any(event.event == "node_lost" for event in history.events), seed
        struck |= history.faults
    assert struck >= {"lost", "error"}


@pytest.mark.parametrize(
    ("rank", "asked", "why"),
    [
        (0, {"num_nodes": 2, "rank_weights": [1.0, 1.0]}, "num_nodes=2 contradicts this run's settings (3)"),
        (1, {"tracker.names": ["tensorboard"]}, "tracker.names=tensorboard contradicts this run's settings"),
        (1, {"rollout.take_over": False}, "rollout.take_over=false contradicts this run's settings (true)"),
    ],
    ids=["a smaller run", "a list", "a switch"],
)
def test_a_later_start_that_asks_for_other_settings_ends_with_both_values(
    monkeypatch: pytest.MonkeyPatch, rank: int, asked: Payload, why: str
) -> None:
    def stated(lines: CommandLines, of: int, *, again: bool) -> Payload:
        return asked if again and of == rank else {}

    monkeypatch.setattr(CommandLines, "of", stated)
    kill = f"when any enters train_rollout: kill node {rank}"
    world = prepare(f"nodes 3\niterations 2\nlength 5\n{kill}\nat 25 s: start node {rank}")
    world.history.faults.add("settings")
    history = world.run()
    assert check(world) == []
    assert any(why in ended.why for ended in history.ended.values())


def test_two_starts_claim_one_rank_and_one_of_them_gets_it() -> None:
    assert any(
        "was taken by another process" in end.why
        for seed in range(60)
        for end in make_world(seed, Setup(mix=parse_mix("twin"))).run().ended.values()
    )


def test_refills_are_rolled_out_adopted_and_merged() -> None:
    awaited: set[object] = {1, 2, 3, "adopted"}
    for world in (make_world(seed, ALL) for seed in range(300)):
        if awaited and world.settings.rollout.max_refills:
            merged = [one for one in world.run().merges if one.split == "train"]
            awaited -= {one.rounds for one in merged}
            awaited -= {"adopted" for one in merged if one.rounds > 1 and one.adopted}
    assert not awaited


def test_a_run_is_started_again_for_other_phases_or_more_iterations() -> None:
    awaited: set[object] = {2, 3, *product(KINDS_OF_RUN, repeat=2)}
    for seed in range(150):
        world = make_world(seed, replace(ALL, iterations=2, phases=KINDS_OF_RUN[seed % 3]))
        world.sessions_left = int(world.settings.rollout_split is None)
        world.run()
        assert check(world) == [], seed
        first, last = world.sessions[0], world.sessions[-1]
        if first is not last:
            awaited -= {last.until, (first.phases, last.phases)}
        if not awaited:
            break
    assert not awaited


def test_a_node_whose_work_does_not_end_is_given_up() -> None:
    """It answers the loss of node 2 by ending its own work, hangs there, and its heartbeats stop."""
    world = prepare(
        "nodes 3\nlength 60\nwhen node 2 enters train_rollout: kill node 2\n"
        "when node 1 enters train_rollout: hold node 1 at cancel for 40 s"
    )
    history = world.run()
    assert check(world) == []
    assert "node 1: an operation hangs for 40 s" in {
        said.text for said in history.told if isinstance(said, Said)
    }
    assert [record.ranks for _, record in history.generations.values()][:3] == [(0, 1, 2), (0, 1), (0,)]


def test_i10_clocks_decide_nothing() -> None:
    """With every process on a clock of its own, which drifts, and with all on one, each passes the same rows."""
    for seed in range(10):
        happened = []
        for clocks in (True, False):
            did: dict[int, list[Position | None]] = {}
            for event in make_world(seed, Setup(mix=frozenset(), clocks=clocks)).run().events:
                if event.event == "phase_finished":
                    did.setdefault(event.process, []).append(event.node.position)
            happened.append(did)
        assert happened[0] == happened[1], f"seed {seed}"


@pytest.mark.parametrize("minutes", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_i7_nobody_is_given_up_under_load(minutes: int) -> None:
    """Three nodes, each stopped for 5 s again and again, listings 3 s stale: no false death in so many minutes of virtual time."""
    setup = Setup(
        mix=frozenset(), iterations=60, lengths=(2.0, 30.0), habits=Habits(listing_s=3.0), policy="shrink"
    )
    world = make_world(1, setup)

    def stop_somebody() -> None:
        running = [process for process in world.processes if process.up and not process.paused]
        if running:
            world.rng.choice(running).pause(5.0, frozen=False)
        world.after(7.0, stop_somebody)

    world.after(10.0, stop_somebody)
    world.end_s = 60.0 * minutes
    history = world.run()
    assert world.now > world.end_s - 10.0
    assert not [event for event in history.events if event.event == "node_lost"]
    assert len(history.generations) == 1
