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
from fsbarrier.protocol.membership import BEAT_S
from fsbarrier.settings.value_types import RlPhase
from sim import strikes
from sim.history import History
from sim.invariants import Violation, check
from sim.schedule import Mishap
from sim.setup import FailurePolicy, Setup
from sim.store import Habits
from sim.strikes import StruckWorld
from sim.world import OnEntry, World

_WHEN = re.compile(
    r"when (?:node (\d+)|any) enters (\w+)(?: of iteration (\d+))?(?:, ([\d.]+) s later)?: (.+)"
)
_AT = re.compile(r"at ([\d.]+) s: (.+)")
_SET = re.compile(r"([a-z-]+) (\S+)")
#: what a scenario may set, and what holds where it does not
SETTINGS = {
    **{"nodes": "3", "iterations": "1", "policy": "shrink", "min-nodes": "1", "phases": "both"},
    **{"length": "1.0", "seed": "1", "stale": "0", "stale-content": ""},
}


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
    for name in settings.keys() - {*SETTINGS}:
        raise UsageError(f"unknown in a scenario: {name}")
    values = SETTINGS | settings
    stale = float(values["stale"])
    setup = Setup(
        nodes=int(values["nodes"]),
        iterations=int(values["iterations"]),
        mix=frozenset(),
        policy=cast(FailurePolicy, values["policy"]),
        min_nodes=int(values["min-nodes"]),
        phases=cast(RlPhase, values["phases"]),
        beat_s=BEAT_S,
        lengths=(float(values["length"]),),
        habits=Habits(stale, float(values["stale-content"] or stale), stale),
        clocks=False,
    )
    return StruckWorld(int(values["seed"]), setup)


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
    for pattern, action in ACTIONS.items():
        if match := re.fullmatch(pattern, text):
            return partial(action, world, *match.groups())
    raise UsageError(f"not an action of a scenario: {text!r}")


def _fail(world: World, rank: str, phase: str, times: str | None) -> None:
    world.failures[int(rank), phase] = int(times or 1)


def _do(world: World, verb: str, rank: str | None) -> None:
    for node_rank in range(world.setup.nodes) if rank is None else (int(rank),):
        if verb == "start":
            if world.of(node_rank):
                world.history.faults.add("twin")
            world.start(node_rank, 0.0)
            continue
        world.history.faults.add("crash" if verb == "kill" else "leave")
        for process in world.of(node_rank):
            if verb == "kill":
                process.kill("killed")
            else:
                process.signal()


def _hold(world: World, verb: str, rank: str, at: str | None, seconds: str) -> None:
    world.history.faults.add("pause")
    for process in world.of(int(rank)):
        if verb == "hold" or at:
            process.mishap = Mishap("block", seconds=float(seconds), verb=at or "", stopped=verb != "hold")
        else:
            process.pause(float(seconds), frozen=verb == "freeze")


#: the words of an action -> what is done, with the words in parentheses
ACTIONS: dict[str, Callable[..., None]] = {
    r"ask to stop( at once)?": lambda world, once: strikes.ask_to_stop(world, now=once is not None),
    r"lose power": lambda world: strikes.cut_power(world, world.of(None), again=False),
    r"(kill|start|end) (?:node (\d+)|all)": _do,
    r"start node (\d+) elsewhere": lambda world, rank: strikes.start_elsewhere(world, int(rank)),
    r"start node (\d+) with other code": lambda world, rank: strikes.start_with_other_code(world, int(rank)),
    r"spoil (\S+)": strikes.spoil_a_record,
    r"let node (\d+) read no generation": lambda world, rank: strikes.hide(world, int(rank)),
    r"mend what cannot be read": World.mend,
    r"(stop|freeze|hold) node (\d+)(?: at (\w+))? for ([\d.]+) s": _hold,
    r"fail node (\d+) in (\w+)(?: (\d+) times)?": _fail,
    r"keep the disk(?: of node (\d+))? busy for ([\d.]+) s": lambda world, rank, seconds: strikes.keep_busy(
        world, None if rank is None else int(rank), float(seconds)
    ),
    r"fill the disk of node (\d+) for ([\d.]+) s": lambda world, rank, seconds: strikes.fail_disk(
        world, int(rank), float(seconds), strikes.WITHOUT_ROOM[0]
    ),
}
