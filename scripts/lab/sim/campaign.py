"""Runs many schedules, one for each seed, on one or several cores."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from sim.groups import GroupWorld, check_groups
from sim.invariants import Violation, check
from sim.reached import reached
from sim.setup import Setup
from sim.strikes import StruckWorld
from sim.world import World

# schedules that a process takes at a time
CHUNK = 20


@dataclass(frozen=True, slots=True)
class SeedVerdict:
    """The result of one seed. `struck`: the kinds of faults that really happened. `reached`: see reached.py."""

    seed: int
    violations: tuple[Violation, ...]
    virtual_s: float
    struck: frozenset[str]
    reached: frozenset[str]


def judge(seed: int, setup: Setup) -> SeedVerdict:
    """Run one schedule and check every invariant. An unexpected exception of the tested code is a violation too."""
    world = make_world(seed, setup)
    found, history = _found(world), world.history
    came_to = frozenset[str]() if setup.groups else reached(history)
    return SeedVerdict(seed, found, world.now, frozenset(history.faults), came_to)


def make_world(seed: int, setup: Setup) -> World:
    return GroupWorld(seed, setup) if setup.groups else StruckWorld(seed, setup)


def violations_in(world: World) -> list[Violation]:
    """All violations in a finished schedule."""
    return check_groups(world) if isinstance(world, GroupWorld) else check(world)


def _found(world: World) -> tuple[Violation, ...]:
    try:
        world.run()
        return tuple(violations_in(world))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        return (Violation("error", what),)


def campaign(seeds: range, setup: Setup, jobs: int = 1) -> Iterator[SeedVerdict]:
    """The verdicts of `seeds`, in order. `jobs`: processes that share the work."""
    if jobs <= 1:
        yield from (judge(seed, setup) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(judge, setup=setup), seeds, chunksize=CHUNK)
