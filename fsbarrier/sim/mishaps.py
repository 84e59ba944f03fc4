"""Draws the small mishaps of a node's single steps: of a look, a start, a heartbeat, a seal, a program, a death."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, cast

from fsbarrier.protocol.membership import epitaph
from fsbarrier.sim.disk import SimPath
from fsbarrier.sim.faults import FAILURES, Mishap, draw_mishap, draw_mishap_of_a_start
from fsbarrier.sim.setup import PATHS

if TYPE_CHECKING:
    from fsbarrier.sim.process import Process
    from fsbarrier.sim.world import World


def small_mishap(world: World) -> Mishap | None:
    """The mishap of the look that begins now."""
    mishap = draw_mishap(world.rng, world.setup.mix, world.mishap_rate)
    if mishap is not None:
        world.history.faults.add(mishap.how)
    return mishap


def mishap_of_a_start(world: World, rate: float = 0.03) -> Mishap | None:
    """The mishap of a join or rejoin."""
    mishap = None if world.healed else draw_mishap_of_a_start(world.announcing, world.setup.mix, rate)
    if mishap is not None:
        world.history.faults.add(mishap.how)
    return mishap


def mishap_of_a_beat(world: World) -> str:
    """ "error" if a heartbeat is not written, "lost" if it is and an error is returned; mostly ""."""
    if not world.beat_mishaps or world.healed or world.beating.random() >= 0.05:
        return ""
    mishap = world.beating.choice(world.beat_mishaps)
    world.history.faults.add(mishap)
    return mishap


def mishap_after_a_seal(world: World, rank: int) -> Mishap | None:
    """A node may die after it has sealed a generation and before it forms the next. The living members of the old one then do that."""
    if world.healed or "crash" not in world.setup.mix or world.announcing.random() < 0.5:
        return None
    world.history.faults.add("crash")
    world.start(rank, 0.2 + world.announcing.random() * 20)
    return Mishap("crash", 1)


def failure_of_a_program(world: World, rank: int, phase_name: str) -> tuple[float, str] | None:
    """The fraction of its time after which a program fails, and its message; None if it succeeds."""
    key = (rank, phase_name)
    told = world.failures.get(key, 0) > 0
    world.failures[key] = world.failures.get(key, 0) - told
    found = (0.5, FAILURES[0]) if told else None
    if world.failure_rate and not world.healed and world.rng.random() < world.failure_rate:
        found = found or (world.rng.random(), world.rng.choice(FAILURES))
    if rank == world.broken_node and not world.healed:
        found = found or (0.1, "a library is missing")
    world.history.faults |= {"program"} if found else set()
    return found


def leave_epitaph(process: Process, *, host: bool) -> None:
    """A killed daemon's last heartbeat mostly says so a moment later, if its `host` lives. Groups have no epitaphs."""
    world, dice = process.world, Random(f"epitaph {process.number} {process.world.now}")
    if not host and not world.setup.groups and dice.random() < 0.7:
        world.after(dice.random() * 0.3, partial(_put_epitaph, process))


def _put_epitaph(process: Process) -> None:
    for beat in reversed(process.noted) if process.trouble.outage is None else ():
        names = [cast(SimPath, PATHS.pulse(pulse)) for pulse in (beat.pulse, epitaph(beat))]
        if process.client.move(*names) is not None:
            return
