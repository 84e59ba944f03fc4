"""Scenarios for tests, in a small language: the nodes, and what happens when. The result is a transcript.

    nodes 3                                   how many (also: iterations, policy, min-nodes, length, seed, stale, stale-content, phases)
    when node 0 enters train_aggregate: kill node 0
    when node 0 enters train_rollout, 2 s later: stop node 2 for 30 s
    at 5 s: ask to stop

Actions: kill / start / end node R (or `all`), start node R elsewhere (on another host), start node R with other code, spoil FILE (a bit
flips in the newest whose path ends so), let node R read no generation, mend what cannot be read, stop node R for S s, freeze node R for S s
(its host too), hold node R at create for S s (in the middle of that operation; its heartbeats go on), stop node R at create for S s
(there too, but all of it), fail node R in PHASE [K times], ask to stop, ask to
stop at once, lose power, fill the disk of node R for S s.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import cast

from fsbarrier.errors import UsageError
from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.timing import BEAT_S
from fsbarrier.settings.value_types import RlPhase
from fsbarrier.sim import strikes
from fsbarrier.sim.history import History
from fsbarrier.sim.invariants import Violation, check
from fsbarrier.sim.schedule import Mishap
from fsbarrier.sim.setup import FailurePolicy, Setup
from fsbarrier.sim.store import Habits
from fsbarrier.sim.strikes import StruckWorld
from fsbarrier.sim.world import OnEntry, World

_WHEN = re.compile(
    r"when (?:node (\d+)|any) enters (\w+)(?: of iteration (\d+))?(?:, ([\d.]+) s later)?: (.+)"
)
_AT = re.compile(r"at ([\d.]+) s: (.+)")
_SET = re.compile(r"([a-z-]+) (\S+)")


def play(text: str) -> tuple[History, list[Violation]]:
    """Run the scenario in `text`. Raises UsageError for an invalid line."""
    world = prepare(text)
    return world.run(), check(world)


def prepare(text: str) -> World:
    """The world of the scenario in `text`, before its run. Raises UsageError."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = [match for line in lines if ":" not in line and (match := _SET.fullmatch(line))]
    world = _world({match[1]: match[2] for match in found})
    for line in lines:
        if ":" in line:
            _plan(world, line)
        elif line and _SET.fullmatch(line) is None:
            raise UsageError(f"not a line of a scenario: {line!r}")
    return world


def _world(settings: dict[str, str]) -> World:
    known = {
        "nodes",
        "iterations",
        "policy",
        "min-nodes",
        "length",
        "seed",
        "stale",
        "stale-content",
        "phases",
    }
    if settings.keys() - known:
        raise UsageError(f"unknown in a scenario: {', '.join(sorted(settings.keys() - known))}")
    stale = float(settings.get("stale", "0"))
    setup = Setup(
        nodes=int(settings.get("nodes", "3")),
        iterations=int(settings.get("iterations", "1")),
        mix=frozenset(),
        policy=cast(FailurePolicy, settings.get("policy", "shrink")),
        min_nodes=int(settings.get("min-nodes", "1")),
        phases=cast(RlPhase, settings.get("phases", "both")),
        beat_s=BEAT_S,
        lengths=(float(settings.get("length", "1.0")),),
        habits=Habits(stale, float(settings.get("stale-content", stale)), stale),
        clocks=False,
    )
    return StruckWorld(int(settings.get("seed", "1")), setup)


def _plan(world: World, line: str) -> None:
    if match := _AT.fullmatch(line):
        action = _counted(world, _action(world, match[2]))
        world.at(float(match[1]), action)
    elif match := _WHEN.fullmatch(line):
        rank = int(match[1]) if match[1] is not None else None
        if match[2] not in PHASE_NAMES:
            raise UsageError(f"no phase {match[2]!r} in {line!r}")
        action = _counted(world, _action(world, match[5]))
        place = int(match[3] or 1), PHASE_NAMES.index(match[2])
        world.awaited.append(OnEntry(rank, *place, float(match[4] or 0.0), action))
    else:
        raise UsageError(f"not a line of a scenario: {line!r}")


def _counted(world: World, action: Callable[[], None]) -> Callable[[], None]:
    """`action`, counted as a pending start, so that the world does not end before it."""
    world.starting += 1

    def act() -> None:
        world.starting -= 1
        action()

    return act


def _action(world: World, text: str) -> Callable[[], None]:
    if text in ("ask to stop", "ask to stop at once"):
        return partial(strikes.ask_to_stop, world, now=text.endswith("once"))
    if text == "lose power":
        return lambda: strikes.cut_power(world, world.of(None), again=False)
    if match := re.fullmatch(r"(kill|start|end) (?:node (\d+)|all)", text):
        ranks = range(world.setup.nodes) if match[2] is None else range(int(match[2]), int(match[2]) + 1)
        verb = match[1]
        return lambda: _do(world, verb, ranks)
    if match := re.fullmatch(r"start node (\d+) elsewhere", text):
        return partial(strikes.start_elsewhere, world, int(match[1]))
    if match := re.fullmatch(r"start node (\d+) with other code", text):
        return partial(strikes.start_with_other_code, world, int(match[1]))
    if match := re.fullmatch(r"spoil (\S+)", text):
        return partial(strikes.spoil_a_record, world, match[1])
    if match := re.fullmatch(r"let node (\d+) read no generation", text):
        return partial(strikes.hide, world, int(match[1]))
    if text == "mend what cannot be read":
        return world.mend
    if match := re.fullmatch(r"(stop|freeze|hold) node (\d+)(?: at (\w+))? for ([\d.]+) s", text):
        verb, rank, at, seconds = match[1], int(match[2]), match[3] or "", float(match[4])
        return lambda: _hold(world, verb, rank, at, seconds)
    if match := re.fullmatch(r"fail node (\d+) in (\w+)(?: (\d+) times)?", text):
        failures = {(int(match[1]), match[2]): int(match[3] or 1)}
        return lambda: world.failures.update(failures)
    if match := re.fullmatch(r"fill the disk of node (\d+) for ([\d.]+) s", text):
        return partial(strikes.fail_disk, world, int(match[1]), float(match[2]), full=True)
    raise UsageError(f"not an action of a scenario: {text!r}")


def _do(world: World, verb: str, ranks: range) -> None:
    for rank in ranks:
        if verb == "start":
            if world.of(rank):
                world.history.faults.add("twin")
            world.start(rank, 0.0)
            continue
        world.history.faults.add("crash" if verb == "kill" else "leave")
        for process in world.of(rank):
            if verb == "kill":
                process.kill("killed")
            else:
                process.signal()


def _hold(world: World, verb: str, rank: int, at: str, seconds: float) -> None:
    world.history.faults.add("pause")
    for process in world.of(rank):
        if verb == "hold" or at:
            process.mishap = Mishap("block", seconds=seconds, verb=at, stopped=verb != "hold")
        else:
            process.pause(seconds, frozen=verb == "freeze")
