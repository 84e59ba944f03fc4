"""The faults of a schedule: which are drawn, where they strike, and what each does to the world."""

from __future__ import annotations

import errno
from functools import partial
from typing import cast

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Generation, Join, Member, StopRequest
from sim.damage import DAMAGES, WRONG_SETTINGS, flip_a_bit
from sim.disk import SimPath
from sim.process import Process
from sim.schedule import Mishap, Start
from sim.setup import PATHS
from sim.store import MAKING, WRITING, Outage
from sim.world import OnEntry, OnFact, World

UPDATE = PHASE_NAMES.index("update")
#: The longest pause between two looks, in heartbeats, and some more between the first in vain and the last
HIDDEN_LOOKS = 4
PAUSES_S = (0.3, 2.0, 4.0, 5.0, 8.0, 13.0, 16.0, 18.0, 22.0, 30.0, 45.0)
STRIKES = (
    "crash",
    "crash",
    "pause",
    "pause",
    "slow",
    "power",
    "outage",
    "room",
    "busy",
    "leave",
    "twin",
    "stop",
    "unreadable",
    "version",
)


class StruckWorld(World):
    """A schedule with the faults of its setup."""

    #: what a strike may be bound to: rows of an iteration, beside times
    rows = True

    def plan_faults(self) -> None:
        """Zero to five faults, half of them in a chosen phase of a node, up to the session's last iteration."""
        rng, mix, until = self.rng, self.setup.mix, self.sessions[-1].until
        kinds = [kind for kind in STRIKES if kind in mix]
        if self.rows and "crash" in mix and rng.random() < 0.15:
            kill_in_an_update(self, until - rng.randrange(until if len(self.sessions) == 1 else 1))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 5)) if kinds else 0):
            kind = rng.choice(kinds)
            if kind == "stop" and rng.random() < 0.7:
                continue
            rank = None if kind == "power" and rng.random() < 0.5 else rng.randrange(self.setup.nodes)
            seconds, whole = rng.choice(PAUSES_S), rng.random() < 0.5
            step = rng.randint(1, 14) if kind in ("crash", "pause", "slow") and rng.random() < 0.5 else 0
            action = partial(self.strike, kind, rank, seconds, whole, step)
            if self.rows and rng.random() < 0.6:
                delay = rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 2.0)))
                iteration = until - rng.randrange(until if len(self.sessions) == 1 else 1)
                self.awaited.append(OnEntry(rank, iteration, rng.randint(0, 13), delay, action))
            else:
                self.after(rng.uniform(0.0, 15.0 * until if self.rows else 30.0), action)

    def strike(self, kind: str, rank: int | None, seconds: float, whole: bool, step: int) -> None:
        """`rank` None: all nodes. `whole`: the whole host, or only the daemon. `step`: strike in the `step`-th operation from now on; 0:
        at once."""
        if self.healed:
            return
        self.history.faults.add(kind)
        if kind == "crash" and self.rng.random() < 0.3:
            kill_a_role(self)
        elif kind == "power":
            cut_power(self, self.of(rank), again=True)
        elif kind == "stop":
            ask_to_stop(self, now=whole)
            if "unreadable" in self.setup.mix and self.rng.random() < 0.2:
                # The request is the last record.
                spoil_a_record(self, self.history.writes[-1].path)
        elif kind == "room":
            # For one node, as by a quota, or for all.
            for one in range(self.setup.nodes) if whole or rank is None else (rank,):
                fail_disk(self, one, seconds, self.rng.choice(WITHOUT_ROOM))
        elif kind == "busy":
            keep_busy(self, None if whole else rank, seconds)
        elif kind == "unreadable" and whole:
            if not (self.rng.random() < 0.3 and damage_weights(self)):
                spoil_a_record(self)
            for process in self.of(rank):
                self._restart_sometimes(process)
        else:
            for process in self.of(rank):
                self._strike(kind, process, seconds, whole, step)

    def _strike(self, kind: str, process: Start, seconds: float, whole: bool, step: int) -> None:
        match kind:
            case "crash" if step:
                process.mishap = Mishap(self.rng.choice(("crash", "crash-after")), step)
                start_again_sometimes(self, process.rank)
            case "crash":
                process.kill("killed")
                start_again_sometimes(self, process.rank)
            case "pause" if step:
                process.mishap = Mishap("block", step, seconds=seconds, stopped=True)
            case "pause":
                process.pause(seconds, frozen=whole)
            case "slow":
                # Half of them block while they end their work, or in a group while they give something.
                verb = "" if not whole else "put" if self.setup.groups else "cancel"
                inside = "/gen-" if verb == "put" else ""
                process.mishap = Mishap("block", max(1, step * (not verb)), seconds, verb, inside)
            case "leave":
                process.signal()
            case "twin":
                start_elsewhere(self, process.rank, claims=self.rng.random() < 0.5)
            case "outage":
                fail_disk(self, process.rank, seconds, Outage(errno.EIO))
            case "unreadable":
                hide(self, process.rank)
                self._restart_sometimes(process)
            case "version":
                self.history.faults.add("crash")
                process.kill("killed")
                start_with_other_code(self, process.rank, self.rng.random() * 5)

    def _restart_sometimes(self, process: Start) -> None:
        """Half of the time kill and restart a node, so that it must read everything again."""
        if self.rng.random() < 0.5:
            self.history.faults.add("crash")
            process.kill("killed")
            self.start(process.rank, 0.2 + self.rng.random())


def start_again_sometimes(world: World, rank: int) -> None:
    if world.rng.random() < 0.7:
        world.start(rank, 0.2 + world.rng.random() * world.rng.choice((1.0, 25.0)))


def kill_a_role(world: World) -> None:
    """Kill all nodes that hold a role, at once or one after the other, and start some again; perhaps also a node without it."""
    roles, rng = [role.holders for role in world.rules.roles], world.rng
    holders = sorted(rng.choice(roles)) if roles else [rng.randrange(world.setup.nodes)]
    rng.shuffle(holders)
    if rng.random() < 0.2:
        holders.append(rng.randrange(world.setup.nodes))
    at, apart_s = 0.0, rng.choice((0.0, 2.0, 25.0))
    for rank in holders:
        world.after(at, partial(_kill, world, rank))
        at += rng.random() * apart_s


def kill_in_an_update(world: World, iteration: int) -> None:
    """Kill one or two nodes while the others train, or around the moment at which one of these is done, perhaps also in the next
    generation's update."""
    rng, nodes = world.rng, range(world.setup.nodes)
    for least in (1,) if rng.random() < 0.5 else (1, 2):
        for _ in range(rng.choice((1, 1, 2))):
            row = rng.choice((None, *nodes)), iteration, UPDATE
            delay = rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)))
            kill = partial(_kill, world, rng.choice((0, *nodes)))
            if least == 1 and rng.random() < 0.5:
                world.awaited.append(OnEntry(*row, delay, kill))
            else:
                world.awaited_facts.append(OnFact(*row, least, delay, kill))


def _kill(world: World, rank: int) -> None:
    for process in world.of(rank) if not world.healed else ():
        world.history.faults.add("crash")
        process.kill("killed")
        start_again_sometimes(world, rank)


def start_with_other_code(world: World, rank: int, delay: float = 0.0) -> None:
    world.history.faults.add("version")
    world.codes[rank] = "other"
    world.start(rank, delay)


def start_elsewhere(world: World, rank: int, *, claims: bool = False) -> None:
    """Start a rank on another host, even if it is running."""
    world.history.faults.add("twin")
    world.hosts[rank] += "b"
    world.claiming |= {rank} if claims else set()
    world.start(rank, 0.0)


def hide(world: World, rank: int) -> None:
    """Make all generations unreadable on a node's host, until `World.mend`."""
    world.history.faults.add("unreadable")
    world.say(f"node {rank}'s host can read no generation's record")
    if (client := world.clients.get(world.hosts[rank])) is not None:
        client.cannot_read = str(PATHS.generations)


def spoil_a_record(world: World, name: str = "") -> None:
    """Damage a record: a random one, or flip a bit in the newest one whose path ends with `name`."""
    world.history.faults.add("unreadable")
    rng, written = world.rng, [write for write in world.history.writes if write.path.endswith(name)]
    if not written:
        return
    generations = [write for write in written if isinstance(write.record, Generation)]
    write = written[-1] if name or rng.random() < 0.5 else rng.choice(written)
    if generations and not name and rng.random() < 0.3:
        write = generations[-1]
    # A group has no settings, so its members follow such a record.
    may_ask = isinstance(write.record, Join | Generation) and not world.setup.groups
    damages = DAMAGES | WRONG_SETTINGS if may_ask else DAMAGES
    damage = next(iter(damages)) if name else rng.choice([*damages])
    world.disk.spoilt[write.path] = damages[damage](encode(write.record), rng)
    world.say(damage.format(write.path))


def damage_weights(world: World) -> bool:
    """Flip a bit in the weights of a version: of a whole one, perhaps the anchor of others, or in a delta. False if there is none."""
    there = world.artifacts.weights_on_disk()
    if not there:
        return False
    path = world.rng.choice(there)
    data = path.read_bytes()
    world.artifacts.damaged.setdefault(path, data)
    path.write_bytes(flip_a_bit(data, world.rng))
    world.history.reached.add(f"damaged {path.parent.name}")
    world.say(f"a bit flips in {path.relative_to(world.artifacts.root)}")
    return True


#: a full disk, no quota left, or folders that became read-only: of the rows, or of all
WITHOUT_ROOM = (
    Outage(errno.ENOSPC, MAKING),
    Outage(errno.ENOSPC, MAKING),
    Outage(errno.EDQUOT, MAKING),
    Outage(errno.EROFS, WRITING, "/gen-"),
    Outage(errno.EROFS, WRITING),
)
#: the longest operation that changes something while the disk is busy, so that a node's heartbeat is not late by itself
BUSY_S = 2.5


def fail_disk(world: World, rank: int, seconds: float, outage: Outage) -> None:
    """Make operations of a node fail for a while."""
    world.history.faults.add("room" if outage.verbs else "outage")
    where = f" in {outage.inside}" if outage.inside else ""
    for process in world.of(rank):
        world.say(
            f"node {rank}: the filesystem fails for {seconds:g} s ({errno.errorcode[outage.code]}{where})"
        )
        process.client.outage = outage
        world.history.outages.append((rank, world.now, world.now + seconds))
        if "rename" in outage.verbs or not outage.verbs:
            world.history.silenced.append((process.number, world.now, world.now + seconds))
        world.after(seconds, partial(_end_outage, world, process, seconds))


def keep_busy(world: World, rank: int | None, seconds: float) -> None:
    """Let each operation of a node (None: of all) that changes something take up to `BUSY_S` for a while."""
    world.history.faults.add("busy")
    for process in world.of(rank):
        world.say(f"node {process.rank}: the disk is busy for {seconds:g} s")
        process.client.slow_s = BUSY_S
        world.after(seconds, partial(setattr, process.client, "slow_s", 0.0))


def _end_outage(world: World, process: Start, seconds: float) -> None:
    """The filesystem is well again; whoever looked in vain for longer than `outage_s` has ended (I6). A member of a group has the
    deadlines of its caller's calls instead."""
    since, outage = world.now - seconds, process.client.outage
    looked = (
        process.up
        and process.joined
        and not process.paused
        and process.hung_at < since
        and not world.setup.groups
    )
    began_before = process.woke_at < since and process.started < since
    longest_s = world.draw.intervals.outage_s + HIDDEN_LOOKS * world.draw.beat_s
    if looked and began_before and outage == Outage(errno.EIO) and seconds > longest_s:
        world.history.stuck.append(f"node {process.rank} goes on after an outage of {seconds:g} s")
    process.client.outage = None


def cut_power(world: World, struck: list[Start], *, again: bool) -> None:
    """Cut the power of these processes' hosts at once; `again`: restart most of them."""
    world.history.faults.add("power")
    for process in struck:
        process.kill("its host lost power", host=True)
        process.client.drop_caches()
    hosts = {process.host for process in struck}
    if not world.of(None):
        # Without a live process all hosts lose power, since they may be one machine.
        hosts = set(world.clients)
    for path in world.disk.lose_power(hosts, world.rng):
        world.say(f"{path} was not flushed and is lost or torn")
    for process in struck if again else ():
        start_again_sometimes(world, process.rank)


def ask_to_stop(world: World, *, now: bool) -> None:
    world.history.faults.add("stop")
    world.say(f"an operator asks to stop{' at once' if now else ''}")
    world.history.stopped_at = world.now
    for process in world.of(None):
        if (
            isinstance(process, Process)
            and process.joined
            and (position := process.loop.node.position) is not None
        ):
            world.history.reached.add(f"a stop in row {position.phase}")
    path = cast(SimPath, PATHS.stops / f"{len(world.history.writes):06d}.json")
    world.disk.make_dir(path.parent)
    starts: dict[int, int] = {}
    for write in world.history.writes:
        if isinstance(write.record, Join):
            starts[write.record.rank] = write.record.incarnation
    request = StopRequest(now, "operator", starts=tuple(Member(*start) for start in starts.items()))
    world.disk.watch(path, request, world.disk.write(path, request, "operator", True))
