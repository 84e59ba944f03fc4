"""Faults as they strike a world, and how they end."""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING, cast

from fsbarrier.protocol.facts import Member, StopRequest
from fsbarrier.protocol.state import Exit
from fsbarrier.sim.disk import SimPath
from fsbarrier.sim.faults import Mishap, Strike
from fsbarrier.sim.process import Process
from fsbarrier.sim.setup import PATHS

if TYPE_CHECKING:
    from fsbarrier.sim.world import World


def heal(world: World) -> None:
    """The faults stop: what sleeps wakes up, and enough of what is down is started again."""
    if world.healed:
        return
    world.healed = True
    world.history.healed_at = world.now
    world.end_s = world.now + world.settle_s
    world.say("all faults stop")
    world.mishap_rate = world.garbling.rate = 0.0
    world.awaited.clear()
    for process in world.processes:
        process.mishap = None
        if process.paused:
            world.resume(process)
    for client, trouble in world.clients.values():
        client.garbled = None
        trouble.set_outage(None)
    down = [rank for rank in range(world.setup.nodes) if not lives(world, rank) and may_return(world, rank)]
    for rank in down:
        lonely = not world.starting and not any(lives(world, other) for other in range(world.setup.nodes))
        if world.rules.on_node_failure == "wait" or lonely or world.rng.random() < 0.7:
            world.start(rank, world.rng.random() * 5)


def lives(world: World, rank: int) -> bool:
    """Whether the last start of a rank is up. An older one does not count: it will see the newer one, and end."""
    return [process.up for process in world.processes if process.rank == rank][-1:] == [True]


def may_return(world: World, rank: int) -> bool:
    ended = [world.history.ended[p.number] for p in world.processes if p.rank == rank and not p.up]
    return not ended or ended[-1].code not in (0, 4, 5)


def strike(world: World, strike: Strike) -> None:
    """Let a planned fault happen to the processes that it is meant for."""
    if world.healed:
        return
    world.history.faults.add(strike.kind)
    if strike.kind == "stop":
        ask_to_stop(world, now=strike.whole)
        return
    struck = [p for p in world.processes if p.up and strike.rank in (p.rank, None)]
    if strike.kind == "power":
        cut_power(world, struck, again=True)
        return
    for process in struck:
        if strike.step and process.strand is None and not process.paused:
            how = "block" if strike.kind != "crash" else world.rng.choice(("crash", "crash-after"))
            stopped = strike.kind == "pause"
            process.mishap = Mishap(how, strike.step, seconds=strike.seconds, stopped=stopped)
            if how != "block":
                maybe_again(world, process)
        else:
            strike_now(world, strike, process)


def strike_now(world: World, strike: Strike, process: Process) -> None:
    match strike.kind:
        case "crash":
            world.kill(process, "killed")
            maybe_again(world, process)
        case "pause":
            world.pause(process, strike.seconds, frozen=strike.whole)
        case "slow":
            process.mishap = Mishap("block", 1, seconds=strike.seconds)
        case "leave":
            if process.joined and process.strand is None and not process.paused:
                process.agent.exit = Exit(143, "left", "stopped by SIGTERM")
                world.finish(process)
        case "twin":
            start_elsewhere(world, process.rank)
        case "outage":
            fail_disk(world, strike)


def start_elsewhere(world: World, rank: int) -> None:
    """A rank is started on another host, whether or not it runs."""
    world.history.faults.add("twin")
    world.hosts[rank] += "b"
    world.start(rank, 0.0)


def fail_disk(world: World, strike: Strike) -> None:
    """A node's operations fail for a while: all of them, or (`whole`) those that need space."""
    world.history.faults.add("outage")
    code = errno.ENOSPC if strike.whole else errno.EIO
    for process in [p for p in world.processes if p.up and p.rank == strike.rank]:
        world.say(
            f"node {process.rank}: the filesystem fails for {strike.seconds:g} s ({errno.errorcode[code]})"
        )
        process.trouble.set_outage(code)
        world.after(strike.seconds, partial(process.trouble.set_outage, None))


def cut_power(world: World, struck: list[Process], *, again: bool) -> None:
    """The hosts of these processes lose power at once; `again`: most of them are started again."""
    world.history.faults.add("power")
    for process in struck:
        world.kill(process, "its host lost power")
        process.client.drop_caches()
    hosts = {process.client.host for process in struck}
    if not any(process.up for process in world.processes):
        # Without a living process, all hosts lose power: they may be one machine.
        hosts = set(world.clients)
    for path in world.disk.lose_power(hosts, world.rng, 10.0):
        world.say(f"{path} was not flushed and is lost or torn")
    for process in struck if again else ():
        maybe_again(world, process)


def maybe_again(world: World, process: Process) -> None:
    if world.rng.random() < 0.7:
        world.start(process.rank, 0.2 + world.rng.random() * world.rng.choice((1.0, 25.0)))


def ask_to_stop(world: World, *, now: bool) -> None:
    world.history.faults.add("stop")
    world.say(f"an operator asks to stop{' at once' if now else ''}")
    world.history.stopped_at = world.now
    path = cast(SimPath, PATHS.stops / f"{len(world.history.writes):06d}.json")
    world.disk.make_dir(path.parent)
    alive = tuple(Member(p.rank, p.agent.node.incarnation) for p in world.processes if p.up and p.joined)
    request = StopRequest(now, "operator", alive=alive)
    world.disk.watch(path, request, world.disk.write(path, request, "operator", True))
