"""A barrier group for your own scripts: the same core as the daemon, with the names of torch.distributed.

    with fsbarrier.join("/shared/group", node_rank=1, num_nodes=3, timeout_s=600) as group:
        config = group.broadcast(config, src=0)
        group.barrier()
        sizes = group.all_gather(len(mine))

Each collective is a row with one number, passed by all members of the current generation; what they exchange is JSON. A background
thread beats and looks at the directory, so that the others do not take a node that computes for an hour for dead. After PeerLost the
living call `regroup()` and go on as the next generation. Standard library and the light dependencies only. See docs/group.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsbarrier.errors import NodeError, PeerLost, StoreError
from fsbarrier.group.bounded_wait import BoundedWait
from fsbarrier.group.collective_work import CollectiveWork
from fsbarrier.group.json_objects import to_json
from fsbarrier.group.member_threads import MemberThreads
from fsbarrier.host.identity import boot_id, host_name
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.observer import Observer, Paces, eagerness
from fsbarrier.protocol.facts import Beat, Fact, Generation, Join, Payload, Position
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.rows import Row, Table
from fsbarrier.protocol.state import Rules
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S
from fsbarrier.retry import retry, until_seen
from fsbarrier.rundir.names import FACT
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

ROW = "collective"


#: the group's program: one row, over and over; each member's work is what its caller offers
_TABLE = Table("group", (Row(0, ROW, each="offer", transient=True),))


class Group:
    """This process's membership. Use `fsbarrier.join`; not for use from several threads at once."""

    def __init__(
        self,
        agent: NodeLoop,
        work: CollectiveWork,
        timeout_s: float,
        beat_s: float,
        earlier_beats: Mapping[int, Beat],
    ) -> None:
        self._paths, self._join = agent.observer.paths, agent.join
        # The caller's thread only lists and reads files with it. What it has learned belongs to the looking thread.
        self._observer = agent.observer
        self._timeout_s = timeout_s
        self._threads = MemberThreads(agent, work, beat_s, earlier_beats)
        #: the generation that the caller knows of, and the row of its next collective there
        self._entered: Generation | None = None
        self._position = Position(1, 0)
        #: what this node contributed to that row, until its collective ends, and how that failed
        self._unfinished: Payload | None = None
        self._failure: NodeError | None = None
        self._left = False

    # --- what callers use ---

    @property
    def node_rank(self) -> int:
        return self._join.rank

    @property
    def generation(self) -> int:
        """The number of the generation that this node is in."""
        return self._current.number

    @property
    def members(self) -> tuple[int, ...]:
        """The node ranks of this generation, in order."""
        return self._current.ranks

    @property
    def joiners(self) -> tuple[int, ...]:
        """The node ranks that are alive and wait to be taken in by a `regroup()`, as far as this node knows by now."""
        return self._threads.snapshot.joiners

    def barrier(self) -> None:
        """Return once every member has called it. Raises PeerLost, BarrierTimeout, Fenced, StoreError."""
        self._collective({"call": "barrier()"}, objects_of=())

    def all_gather(self, obj: object) -> list[Any]:
        """Every member's object (JSON data), in the order of `members`. Raises as `barrier`; TypeError, ValueError for an object
        that cannot be sent."""
        return self._collective({"call": "all_gather()", "obj": to_json(obj)}, objects_of=self.members)

    def broadcast(self, obj: object = None, src: int = 0) -> Any:
        """The object of node rank `src` (JSON data), on every member. Raises as `all_gather`, and ValueError for a `src` that is no
        member."""
        if src not in self.members:
            raise ValueError(f"src={src} is not a member of generation {self.generation}: {self.members}")
        call = f"broadcast(src={src})"
        mine = {"call": call, "obj": to_json(obj)} if src == self.node_rank else {"call": call}
        return self._collective(mine, objects_of=(src,))[0]

    def regroup(self) -> None:
        """Go on as the next generation: the living members and the nodes that wait to join. Every living member must call it.

        Returns once this node is in it; the first to call makes it. Raises Fenced, BarrierTimeout, StoreError.
        """
        before = self._current
        self._check_usable()
        self._threads.regroup(before.number)
        try:
            wait = BoundedWait(self._threads, self._timeout_s, "regroup()")
            while (now := self._threads.snapshot.node.generation) is None or now == before:
                wait.for_news()
        finally:
            self._threads.look_rarely()
        self._enter(now)

    def leave(self) -> None:
        """End this membership and tell the others. Safe to call twice. Never raises."""
        self._leave("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave("" if kind is None else f"{kind.__name__}: {error}"[:500])

    # --- joining and leaving ---

    def _begin(self) -> None:
        """Wait for the first generation. Raises as `join`."""
        self._threads.start()
        try:
            wait = BoundedWait(self._threads, self._timeout_s, "join()")
            while (first := self._threads.snapshot.node.generation) is None:
                self._check_same_arguments()
                wait.for_news()
            self._check_same_arguments()
        except BaseException as error:
            self._leave(f"{type(error).__name__} while joining")
            raise
        finally:
            self._threads.look_rarely()
        self._enter(first)

    def _check_same_arguments(self) -> None:
        """All must have joined with the same arguments: the members of this generation or, before there is one, all nodes here.

        Earlier sessions leave their joins behind, so only a node counts as here that joined or wrote a heartbeat after this node's
        first look. One heartbeat is enough: a node that refuses this one's arguments leaves at once, and may write only one.
        """
        snapshot, threads = self._threads.snapshot, self._threads
        generation = snapshot.node.generation
        for rank, join in snapshot.joins.items():
            if generation is not None:
                concerned = rank in generation.ranks
            else:
                seen = snapshot.ledger.seen.get(rank)
                beaten = (
                    seen is not None
                    and seen.beat.incarnation == join.incarnation
                    and seen.beat != threads.earlier_beats.get(rank)
                )
                concerned = beaten or threads.earlier_joins.get(rank) != join
            for name, mine in self._join.choices.items() if concerned else ():
                if (theirs := join.choices.get(name)) != mine:
                    raise ValueError(
                        f"node {rank} ({join.host}) joined {self._paths.root} with {name}={theirs}, "
                        f"node {self.node_rank} with {name}={mine}: all must give the same"
                    )

    def _leave(self, why: str) -> None:
        if not self._left:
            self._left = True
            self._threads.leave(why)

    def _enter(self, generation: Generation) -> None:
        self._entered, self._position = generation, generation.start
        self._unfinished = self._failure = None

    @property
    def _current(self) -> Generation:
        assert self._entered is not None
        return self._entered

    def _check_usable(self) -> None:
        if self._left:
            raise RuntimeError(f"node {self.node_rank} has left the group at {self._paths.root}; join again")
        if self._threads.snapshot.failure is not None:
            raise self._threads.snapshot.failure

    # --- collectives ---

    def _collective(self, mine: Payload, objects_of: Sequence[int]) -> list[Any]:
        """Contribute to the next row, wait until all members came to it, and read the objects of some of them.

        The row has ended for this node only when all that is read. If a read fails, the same call comes back to this row: were it
        to go on with the next one, each later call would be paired with another one of the other members.
        """
        self._check_usable()
        generation, position = self._current, self._position
        name = f"{mine['call']} no. {position.iteration}"
        if self._unfinished is None:
            self._unfinished = mine
            self._threads.contribute(generation.number, position, mine)
        elif self._unfinished == mine:
            self._threads.look_often()
        else:
            # The others may have read what this node contributed. So it must repeat that collective, or regroup().
            raise self._failure or RuntimeError(
                f"node {self.node_rank}: {self._unfinished['call']} no. {position.iteration} was interrupted: "
                "call it again, or regroup()"
            )
        try:
            wait = BoundedWait(self._threads, self._timeout_s, name)
            while not self._passed(generation, position, name):
                wait.for_news()
            found = [self._object_of(rank, generation, position, mine["call"]) for rank in objects_of]
        except NodeError as error:
            self._failure = error
            raise
        finally:
            self._threads.look_rarely()
        self._unfinished = self._failure = None
        self._position = Position(position.iteration + 1, 0)
        self._remove_old_facts(generation, position)
        return found

    def _passed(self, generation: Generation, position: Position, name: str) -> bool:
        """Whether all members have come to a row. Raises PeerLost where one will not."""
        snapshot = self._threads.snapshot
        node = snapshot.node
        here = node.generation == generation
        if here and node.position is not None and node.position > position:
            return True
        lost = next((one for one in snapshot.missing if one.lost_because), None)
        if snapshot.failure is not None or node.generation is None or (here and lost is None):
            return False
        # All facts are there, so the others may have passed this row before they went on. This node passes it too.
        if self._all_there(generation, position):
            return True
        if here and lost is not None:
            member = lost.member
            raise PeerLost(
                f"node {self.node_rank}: {name}: node {member.rank} ({member.host}) is lost: {lost.lost_because}; "
                "regroup() goes on without it",
                member.rank,
                member.host,
                lost.silent_s,
            )
        raise self._superseded(generation, node.generation, name)

    def _superseded(self, old: Generation, new: Generation, name: str) -> PeerLost:
        """Another member regrouped before this one."""
        hosts = {m.rank: m.host for m in (*old.members, *new.members)}
        gone = [m for m in old.members if new.incarnation_of(m.rank) != m.incarnation]
        ledger, now = self._threads.snapshot.ledger, time.monotonic()
        maker = f"node {new.created_by} ({hosts.get(new.created_by, '')})"
        names = ", ".join(f"node {m.rank} ({m.host})" for m in gone)
        what = f"{maker} regrouped without {names}" if gone else f"{maker} regrouped"
        message = (
            f"node {self.node_rank}: {name}: generation {old.number} is over: {what}; regroup() goes along"
        )
        if gone:
            return PeerLost(message, gone[0].rank, gone[0].host, ledger.age(gone[0], now))
        return PeerLost(message, new.created_by, hosts.get(new.created_by, ""))

    # --- facts on disk ---

    def _row(self, generation: Generation, iteration: int) -> Path:
        return self._paths.phase(generation.number, iteration, 0, ROW)

    def _fact(self, generation: Generation, iteration: int, rank: int) -> Path:
        return self._row(generation, iteration) / FACT.build(rank, "done")

    def _all_there(self, generation: Generation, position: Position) -> bool:
        try:
            names = set(self._observer.store.names(self._row(generation, position.iteration)))
        except OSError:
            return False
        return names.issuperset(FACT.build(rank, "done") for rank in generation.ranks)

    def _object_of(self, rank: int, generation: Generation, position: Position, call: str) -> Any:
        """What node `rank` contributed to a row that was passed by this node's `call`. Raises StoreError, RuntimeError."""
        path = self._fact(generation, position.iteration, rank)
        host = next(m.host for m in generation.members if m.rank == rank)
        began, dead_s = time.monotonic(), self._threads.rules.limits.dead_s
        try:
            # The fact is there. Its writer may be writing it once more at this moment (REPEAT_S), so try again.
            value = retry(lambda: self._observer.must_read(path, Fact).value, within_s=dead_s)
        except OSError as error:
            what = f"what node {rank} ({host}) gave cannot be read: {path}: {error}"
            raise StoreError(f"node {self.node_rank}: {what}", rank, host, time.monotonic() - began) from None
        if value.get("call") != call:
            raise RuntimeError(
                f"the members are out of step: node {rank} ({host}) called {value.get('call')} as no. {position.iteration} "
                f"of generation {generation.number}, node {self.node_rank} {call}"
            )
        return json.loads(value["obj"])

    def _remove_old_facts(self, generation: Generation, position: Position) -> None:
        """Remove facts that nobody reads again: whoever came to this row had ended the one before it (invariant I9).

        Each member removes its own fact. The leader removes the folder one row later, when all have done so.
        """
        start, before = generation.start.iteration, position.iteration - 1
        with contextlib.suppress(OSError):
            if before >= start:
                self._fact(generation, before, self.node_rank).unlink()
            if before > start and generation.leader == self.node_rank:
                folder = self._row(generation, before - 1)
                folder.rmdir()
                folder.parent.rmdir()


def join(
    path: str | os.PathLike[str],
    *,
    node_rank: int,
    num_nodes: int,
    timeout_s: float = 600.0,
    beat_s: float = BEAT_S,
    suspect_s: float = SUSPECT_S,
    dead_s: float = DEAD_S,
) -> Group:
    """Join the group of `num_nodes` nodes at `path` on a shared filesystem; returns once all of them are here.

    `timeout_s` bounds this and every later wait. Raises BarrierTimeout (who is missing), StoreError, Fenced, ValueError.
    """
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank={node_rank} is not in 0..{num_nodes - 1} (num_nodes={num_nodes})")
    if not 0 < beat_s < suspect_s < dead_s:
        raise ValueError(f"0 < beat_s < suspect_s < dead_s must hold: {beat_s}, {suspect_s}, {dead_s}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be more than 0")
    paths = RunPaths(Path(path).absolute())
    if os.path.lexists(paths.record):
        raise ValueError(f"{paths.root} is the directory of a run; give the group one of its own")
    alike = {"num_nodes": num_nodes, "beat_s": beat_s, "suspect_s": suspect_s, "dead_s": dead_s}
    here = Join(node_rank, 0, host_name(), os.getpid(), boot_id(), choices=alike)
    limits = Limits(suspect_s, dead_s, 2 * beat_s, join_timeout_s=float("inf"), outage_s=dead_s)
    rules = Rules(_TABLE, num_nodes, on_node_failure="hold", limits=limits)
    members_s = min(0.05 * max(1.0, num_nodes / 16), beat_s / 2)
    paces = Paces(members_s, beat_s / 2, 1.5 * beat_s, eagerness(num_nodes), watchers=num_nodes)
    store, work = PosixStore(), CollectiveWork()
    observer = Observer(store, paths, _TABLE, paces)
    agent = NodeLoop(store, observer, rules, work, here, lambda event, node, fields: None)
    try:
        until_seen(observer.prepare, timeout_s)
        earlier_beats = observer.read_beats()[0]
        until_seen(lambda: agent.start(time.monotonic()), timeout_s)
    except OSError as error:
        message = f"node {node_rank}: cannot join the group at {path}: {error}"
        raise StoreError(message, node_rank, here.host, 0.0) from None
    group = Group(agent, work, timeout_s, beat_s, earlier_beats)
    group._begin()
    return group
