"""Makes faults strike a world, and ends them."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Generation, Join, Member, Payload, Position, StopRequest, Verdict
from fsbarrier.protocol.state import Exit
from fsbarrier.rundir import checkpoints
from fsbarrier.sim.damage import DAMAGES, WRONG_SETTINGS
from fsbarrier.sim.disk import SimPath
from fsbarrier.sim.faults import (
    Mishap,
    Strike,
    StrikeOnEntry,
    draw_old_view,
    draw_strikes,
)
from fsbarrier.sim.setup import HASTY_S, PATHS

#: at most so many heartbeats lie between two looks that are simulated, and some more between the first in vain and the last
HIDDEN_LOOKS = 4

if TYPE_CHECKING:
    from fsbarrier.sim.process import Process
    from fsbarrier.sim.store import MountClient
    from fsbarrier.sim.world import World


def heal(world: World) -> None:
    """End all faults: stopped processes wake up, and enough dead ones are restarted."""
    if world.healed:
        return
    old_until = max([0.0, *(client.old_until for client, _ in world.clients.values())])
    if world.now < old_until and any(process.up for process in world.processes):
        world.at(old_until, partial(heal, world))
        return
    world.healed = True
    world.end_s = world.now + world.settle_s
    world.say("all faults stop")
    # After a recovery the operator restarts nodes when their mounts show it. Before that they would see the damaged record as the newest.
    taken_back = take_back(world)
    shown_s = world.habits.listing_s if taken_back else 0.0
    if not taken_back:
        mend(world)
    _end_all_faults(world)
    down = [rank for rank in range(world.setup.nodes) if not lives(world, rank) and may_return(world, rank)]
    for rank in down:
        lonely = not world.starting and not any(lives(world, other) for other in range(world.setup.nodes))
        if world.rules.on_node_failure == "wait" or lonely or world.rng.random() < 0.7:
            world.start(rank, shown_s + world.rng.random() * 5)


def _end_all_faults(world: World) -> None:
    world.mishap_rate = world.garbling.rate = world.stale_handles.rate = 0.0
    world.codes = [""] * world.setup.nodes
    world.awaited.clear()
    for process in world.processes:
        process.mishap = None
        if process.paused:
            world.resume(process)
    for client, trouble in world.clients.values():
        client.show_all()
        client.garbled = client.stale_handle = None
        trouble.set_outage(None)


def start_again(world: World) -> None:
    """The run has ended: start all nodes for the next session. Some come late, and half of these sessions have faults of their own."""
    session = world.sessions[-1]
    world.say(f"the run is started again: {session.phases}, up to iteration {session.until}")
    world.healed = True
    # What was written while a mount was old is seen by those who start now.
    world.end_s = (
        max(world.now, *(client.old_until for client, _ in world.clients.values())) + 2 * world.settle_s
    )
    mend(world)
    _end_all_faults(world)
    for rank in range(world.setup.nodes):
        world.start(rank, world.later.random() * world.later.choice((1.0, 1.0, 25.0)))
    if world.later.random() < 0.5:
        _plan_faults_again(world)


def _plan_faults_again(world: World) -> None:
    """Plan the faults of a later session, and their end. Those that are bound to a row strike in the session's last iteration. Nobody
    takes the run back a second time."""
    world.healed, world.end_s, world.taken_back_to = False, float("inf"), None
    for planned in draw_strikes(world.later, world.setup.mix, world.setup.nodes, 1):
        action = partial(strike, world, planned)
        if planned.iteration:
            place = world.sessions[-1].until, planned.phase
            world.awaited.append(StrikeOnEntry(planned.rank, *place, planned.delay, action))
        else:
            world.after(planned.time, action)
    world.after(30.0, partial(heal, world))


def lives(world: World, rank: int) -> bool:
    """Whether the last start of a rank is up. Older starts do not count, since they will see the newer one and end; nor does a start
    that found its rank taken."""
    starts = [
        process for process in world.processes if process.rank == rank and (process.up or process.joined)
    ]
    return [process.up for process in starts][-1:] == [True]


def may_return(world: World, rank: int) -> bool:
    ended = [world.history.ended[p.number] for p in world.processes if p.rank == rank and not p.up]
    return not ended or ended[-1].code not in (0, 4, 5)


def strike(world: World, strike: Strike) -> None:
    """Strike the processes that a planned fault is meant for."""
    if world.healed:
        return
    world.history.faults.add(strike.kind)
    if strike.kind == "stop":
        ask_to_stop(world, now=strike.whole)
        if "unreadable" in world.setup.mix and Random(f"stop {world.now}").random() < 0.2:
            # The request is the last record.
            spoil_a_record(world, world.history.writes[-1].path)
        return
    if strike.kind == "unreadable" and strike.whole:
        spoil_a_record(world)
        for process in [p for p in world.processes if p.up and p.rank == strike.rank]:
            maybe_kill(world, process)
        return
    struck = [p for p in world.processes if p.up and strike.rank in (p.rank, None)]
    if strike.kind == "power":
        cut_power(world, struck, again=True)
        return
    for process in struck:
        if strike.step and process.held_look is None and not process.paused:
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
            # Half of them block while they end their work, or in a group while they give something.
            verb = "" if not strike.whole else "put" if world.setup.groups else "cancel"
            inside = "/gen-" if verb == "put" else ""
            process.mishap = Mishap("block", 1, seconds=strike.seconds, verb=verb, inside=inside)
        case "leave":
            if process.joined and process.held_look is None and not process.paused:
                process.loop.exit = Exit(143, "left", "stopped by SIGTERM")
                world.finish(process)
        case "twin":
            start_elsewhere(world, process.rank)
        case "outage":
            fail_disk(world, strike)
        case "old":
            show_nothing_newer(world, process.rank, process.client, strike.seconds)
            maybe_kill(world, process)
        case "unreadable":
            hide(world, process.rank)
            maybe_kill(world, process)
        case "version":
            world.history.faults.add("crash")
            world.kill(process, "killed")
            start_with_other_code(world, process.rank, world.rng.random() * 5)


def start_with_other_code(world: World, rank: int, delay: float = 0.0) -> None:
    world.history.faults.add("version")
    world.codes[rank] = "other"
    world.start(rank, delay)


def show_nothing_newer(world: World, rank: int, client: MountClient, seconds: float) -> None:
    """Freeze what the mount of a node's host shows, at this time or at its first look."""
    world.say(f"node {rank}'s host sees nothing newer for {seconds:g} s")
    client.show_nothing_newer(world.now + seconds)
    world.history.old_views[client.host] = world.now, world.now + seconds


def hide(world: World, rank: int) -> None:
    """Make all generations unreadable on a node's host, until `mend`."""
    world.history.faults.add("unreadable")
    world.say(f"node {rank}'s host can read no generation's record")
    for host, (client, _) in world.clients.items():
        if host == world.hosts[rank]:
            client.cannot_read = str(PATHS.generations)


def mend(world: World) -> None:
    """Restore damaged records, and make everything readable again."""
    if world.disk.spoilt or any(client.cannot_read for client, _ in world.clients.values()):
        world.say("what could not be read is mended")
    world.disk.spoilt.clear()
    for client, _ in world.clients.values():
        client.cannot_read = ""


def take_back(world: World) -> bool:
    """The newest generation is unreadable for good: an operator ends all nodes and recovers the run.

    As `fsbarrier recover --iteration N` does (fsbarrier/run/superseding.py), after pointing model.pt at the policy with which
    iteration N began, if that still exists. Then there will be two policies of each later version.
    """
    history, iteration = world.history, world.taken_back_to
    records = [write.record for write in history.writes]
    newest = max((record.number for record in records if isinstance(record, Generation)), default=0)
    places = (event.node.position for event in history.events)
    begun = any(place is not None and place.iteration == iteration for place in places)
    if iteration is None or not begun or not newest or world.over():
        return False
    if world.rules.slice == "update" and not world.artifacts.paths.merged("train", iteration).exists():
        # What that iteration would learn from has been removed (`checkpoint.keep_trajectories`).
        return False
    history.faults.add("unreadable")
    spoil_a_record(world, f"generations/gen-{newest:06d}.json")
    lost = {path: data for path, data in world.disk.spoilt.items() if f"gen-{newest:06d}" in path}
    for process in [process for process in world.processes if process.up]:
        history.faults.add("crash")
        world.kill(process, "ended by a person")
    starts: dict[int, int] = {}
    for join in records:
        if isinstance(join, Join):
            starts[join.rank] = max(join.incarnation, starts.get(join.rank, 0))
    served = [put for put in history.served if Path(put.folder).is_dir()]
    serves = [put for put in served if put.version == iteration - 1] or served[-1:]
    decisions: dict[str, Payload] = {}
    for put in serves[-1:]:
        history.served.append(put._replace(generation=newest + 1, shown=()))
        digest = checkpoints.read_manifest(Path(put.folder)).digest
        world.artifacts.point_at(put.folder)
        value = {"policy_version": put.version, "folder": Path(put.folder).name, "digest": digest}
        decisions["weights_publish"] = {"iteration": iteration - 1, "value": value}
    members = tuple(Member(rank, starts[rank]) for rank in sorted(starts))
    why = f"the run goes on at iteration {iteration}"
    start = Position(iteration, history.first)
    generation = Generation(
        newest + 1, members, members[0].rank, start, why, decisions, verdict=Verdict(0, why)
    )
    path = cast(SimPath, PATHS.generation(newest + 1))
    history.recovered.add(newest + 1)
    world.say(f"a person takes the run back to iteration {iteration}")
    world.disk.watch(path, generation, world.disk.write(path, generation, "operator", True))
    mend(world)
    world.disk.spoilt.update(lost)
    return True


def spoil_a_record(world: World, name: str = "") -> None:
    """Damage a record: a random one, or flip a bit in the newest one whose path ends with `name`."""
    world.history.faults.add("unreadable")
    written = [write for write in world.history.writes if write.path.endswith(name)]
    generations = [write for write in written if isinstance(write.record, Generation)]
    if written:
        write = written[-1] if name or world.rng.random() < 0.5 else world.rng.choice(written)
        if generations and Random(f"which {world.now}").random() < 0.3:
            write = generations[-1]
        dice = Random(f"damage {write.path} {world.now}")
        # A group has no settings, so its members follow such a record.
        may_ask = isinstance(write.record, Join | Generation) and not world.setup.groups
        damages = DAMAGES | WRONG_SETTINGS if may_ask else DAMAGES
        said = next(iter(damages)) if name else dice.choice([*damages])
        world.disk.spoilt[write.path] = damages[said](encode(write.record), dice)
        world.say(said.format(write.path))


def maybe_kill(world: World, process: Process) -> None:
    """Half of the time kill and restart a node, so that it must read everything again."""
    if world.rng.random() < 0.5:
        world.history.faults.add("crash")
        world.kill(process, "killed")
        world.start(process.rank, 0.2 + world.rng.random())


def start_elsewhere(world: World, rank: int) -> None:
    """Start a rank on another host, even if it is running."""
    world.history.faults.add("twin")
    world.hosts[rank] += "b"
    if Random(f"claim {world.now}").random() < 0.5:
        world.claiming.add(rank)
    world.start(rank, 0.0)


def race_for_a_rank(world: World, process: Process) -> None:
    """Sometimes hold up a start that claims its rank, in the create of its join record, while another start of the rank joins."""
    if not world.healed and Random(f"race {world.now}").random() < 0.3:
        process.mishap = Mishap("block", 1, seconds=1.0, verb="create", inside="/joins/")
        world.hosts[process.rank] += "b"
        world.start(process.rank, 0.3)


def fail_disk(world: World, strike: Strike) -> None:
    """Make a node's operations fail for a while: all of them, or only those that need space."""
    world.history.faults.add("outage")
    code = errno.ENOSPC if strike.whole else errno.EIO
    for process in [p for p in world.processes if p.up and p.rank == strike.rank]:
        world.say(
            f"node {process.rank}: the filesystem fails for {strike.seconds:g} s ({errno.errorcode[code]})"
        )
        process.trouble.set_outage(code)
        world.history.outages.append((process.rank, world.now, world.now + strike.seconds))
        world.after(strike.seconds, partial(_end_outage, world, process, strike.seconds))


def _end_outage(world: World, process: Process, seconds: float) -> None:
    """The filesystem is well again; whoever looked in vain for longer than `outage_s` has ended (I6).

    A group's member has the deadlines of its caller's calls instead (`typed_ends`).
    """
    since, code = world.now - seconds, process.trouble.outage
    looked = process.up and process.joined and not process.paused and process.held_look is None
    looked = looked and not world.setup.groups
    began_before = process.woke_at < since and process.started < since
    longest_s = world.paces.outage_s + HIDDEN_LOOKS * world.beat_s
    if looked and began_before and code == errno.EIO and seconds > longest_s:
        world.history.stuck.append(f"node {process.rank} goes on after an outage of {seconds:g} s")
    process.trouble.set_outage(None)


def cut_power(world: World, struck: list[Process], *, again: bool) -> None:
    """Cut the power of these processes' hosts at once; `again`: restart most of them."""
    world.history.faults.add("power")
    for process in struck:
        world.kill(process, "its host lost power", host=True)
        process.client.drop_caches()
    hosts = {process.client.host for process in struck}
    if not any(process.up for process in world.processes):
        # Without a live process all hosts lose power, since they may be one machine.
        hosts = set(world.clients)
    for path in world.disk.lose_power(hosts, world.rng):
        world.say(f"{path} was not flushed and is lost or torn")
    for process in struck if again else ():
        maybe_again(world, process)


def maybe_again(world: World, process: Process) -> None:
    if world.rng.random() < 0.7:
        world.start(process.rank, 0.2 + world.rng.random() * world.rng.choice((1.0, 25.0)))


def plan_an_old_view(world: World, seed: int) -> None:
    """Sometimes plan a mount that shows nothing newer for a while. Rows then last long enough for a node restarted there to believe the
    others dead and go on alone."""
    planned = draw_old_view(seed, world.setup.mix, world.setup.nodes, world.setup.iterations)
    if planned:
        world.strikes += planned
        world.lengths = (0.1, 5.0, 9.0)
        world.rules = replace(world.rules, limits=replace(world.rules.limits, join_timeout_s=HASTY_S))


def plan_a_stranger(world: World, seed: int) -> None:
    """In a long run, sometimes plan a node that the others do not take in, on a mount that shows nothing newer. It waits while they go on
    and remove old facts, and then goes on where it believes that they died."""
    setup, dice = world.setup, Random(f"stranger {seed}")
    if not {"old", "version"} <= setup.mix or setup.iterations < 8 or dice.random() < 0.4:
        return
    rank = dice.randrange(1, setup.nodes)
    limits = replace(world.rules.limits, join_timeout_s=40.0, last_call_s=None)
    world.rules = replace(world.rules, on_node_failure="shrink", min_nodes=1, limits=limits)
    world.lengths = (0.5, 1.0)

    def come() -> None:
        client = next(
            (client for host, (client, _) in world.clients.items() if host == world.hosts[rank]), None
        )
        if not world.healed and client is not None and not lives(world, rank):
            world.history.faults.add("old")
            show_nothing_newer(world, rank, client, 60.0)
            start_with_other_code(world, rank)

    def die() -> None:
        for process in [process for process in world.processes if process.rank == rank]:
            world.history.faults.add("crash")
            world.kill(process, "killed")

    world.strikes = []
    world.awaited = [StrikeOnEntry(rank, 1, dice.randint(2, 12), 0.0, die), StrikeOnEntry(0, 2, 5, 0.0, come)]


def ask_to_stop(world: World, *, now: bool) -> None:
    world.history.faults.add("stop")
    world.say(f"an operator asks to stop{' at once' if now else ''}")
    world.history.stopped_at = world.now
    path = cast(SimPath, PATHS.stops / f"{len(world.history.writes):06d}.json")
    world.disk.make_dir(path.parent)
    last = {process.rank: process for process in world.processes if process.joined}
    starts = tuple(Member(rank, process.loop.node.incarnation) for rank, process in last.items())
    request = StopRequest(now, "operator", starts=starts)
    world.disk.watch(path, request, world.disk.write(path, request, "operator", True))
