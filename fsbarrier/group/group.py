"""A barrier group for your own scripts: the same core as the daemon, with the names of torch.distributed.

    with fsbarrier.join("/shared/group", node_rank=1, num_nodes=3, timeout_s=600) as group:
        config = group.broadcast(config, src=0)
        group.barrier()
        sizes = group.all_gather(len(mine))

Each collective is one numbered row, which all members of the current generation pass together. Members exchange JSON. A background
thread sends heartbeats, so a node may compute for an hour without looking dead. After PeerLost the living members call `regroup()` and
go on as the next generation. Needs only light dependencies. See docs/group.md.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.paces import Paces, eagerness
from fsbarrier.errors import NodeError, StoreError
from fsbarrier.group.bounded_wait import BoundedWait
from fsbarrier.group.collective import TABLE, Collective, CollectiveWork, Outcome, broadcast_from
from fsbarrier.group.json_objects import to_json
from fsbarrier.group.member import GroupMember, Snapshot
from fsbarrier.group.member_threads import MemberThreads
from fsbarrier.group.noted_store import NotedStore
from fsbarrier.protocol.facts import Generation, Join, Position
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Node, Rules
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store
from fsbarrier.store.identity import boot_id, host_name

#: how long the last heartbeat may take on a hanging filesystem
LEAVE_S = 5.0


class Group:
    """This process's membership; `fsbarrier.join` makes one. Not thread-safe."""

    def __init__(self, threads: MemberThreads, timeout_s: float) -> None:
        self._threads, self._timeout_s = threads, timeout_s
        self._root, self._join = threads.root, threads.here
        #: the generation that the caller knows, and the row of its next collective
        self._entered: Generation | None = None
        self._position = Position(1, 0)
        #: the last call, if it has not succeeded, and its error
        self._unfinished: Collective | None = None
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
        """The live node ranks that wait for a `regroup()` to join, as this node sees them."""
        return self._threads.snapshot.joiners

    def barrier(self) -> None:
        """Return once every member has called it. Raises PeerLost, BarrierTimeout, Fenced, OutOfStep, StoreError."""
        self._collective("barrier", None, objects_of=())

    def all_gather(self, obj: object) -> list[Any]:
        """Every member's object (JSON data), in the order of `members`. Raises as `barrier`, and TypeError or ValueError for an object
        that cannot be sent."""
        return self._collective("all_gather", to_json(obj), objects_of=self.members)

    def broadcast(self, obj: object = None, src: int = 0) -> Any:
        """The object of node rank `src` (JSON data), on every member. Raises as `all_gather`, and ValueError if `src` is not a
        member."""
        if src not in self.members:
            raise ValueError(f"src={src} is not a member of generation {self.generation}: {self.members}")
        # True and 1.0 also mean rank 1.
        src = int(src)
        json = to_json(obj) if src == self.node_rank else None
        return self._collective(broadcast_from(src), json, objects_of=(src,))[0]

    def regroup(self) -> None:
        """Go on as the next generation, with the living members and the nodes that wait to join. Every living member must call it.

        The first call creates the generation; each call returns when its node is in it. Raises Fenced, BarrierTimeout, StoreError.
        """
        before = self._current
        self._check_usable()
        self._threads.regroup(before.number)
        try:
            wait = BoundedWait(self._threads, self._timeout_s, "regroup()")
            now = wait.until(lambda seen: None if seen.node.generation == before else seen.node.generation)
        finally:
            self._threads.look_rarely()
        self._enter(now)

    def leave(self) -> None:
        """End this membership and tell the others. Safe to call twice. Never raises.

        On a hanging filesystem it gives up after 5 s.
        """
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
            first = BoundedWait(self._threads, self._timeout_s, "join()").until(self._first_generation)
        except StoreError as error:
            # On a failing filesystem the others cannot be told.
            self._leave(f"{type(error).__name__} while joining", within_s=0.0)
            raise
        except BaseException as error:
            self._leave(f"{type(error).__name__} while joining")
            raise
        finally:
            self._threads.look_rarely()
        self._enter(first)

    def _first_generation(self, seen: Snapshot) -> Generation | None:
        """The node's generation; None before there is one. Raises ValueError if the nodes joined with different arguments.

        It compares the members of the generation or, before there is one, all nodes that are here: those that joined or wrote a
        heartbeat after this node's first look, since earlier sessions leave their joins behind. One heartbeat is enough, because a
        node that refuses this one's arguments leaves immediately.
        """
        generation, member = seen.node.generation, self._threads.member
        for rank, join in seen.joins.items():
            if generation is not None:
                concerned = rank in generation.ranks
            else:
                item = seen.ledger.seen.get(rank)
                beaten = (
                    item is not None
                    and item.beat.incarnation == join.incarnation
                    and item.beat != member.earlier_beats.get(rank)
                )
                concerned = beaten or member.earlier_joins.get(rank) != join
            for name, mine in self._join.choices.items() if concerned else ():
                if (theirs := join.choices.get(name)) != mine:
                    raise ValueError(
                        f"node {rank} ({join.host}) joined {self._root} with {name}={theirs}, "
                        f"node {self.node_rank} with {name}={mine}: all must give the same"
                    )
        return generation

    def _leave(self, why: str, within_s: float = LEAVE_S) -> None:
        if not self._left:
            self._left = True
            self._threads.leave(why, min(within_s, self._timeout_s))

    def _enter(self, generation: Generation) -> None:
        self._entered, self._position = generation, generation.start
        self._unfinished = self._failure = None

    @property
    def _current(self) -> Generation:
        assert self._entered is not None
        return self._entered

    def _check_usable(self) -> None:
        if self._left:
            raise RuntimeError(f"node {self.node_rank} has left the group at {self._root}; join again")
        if self._threads.snapshot.failure is not None:
            raise self._threads.snapshot.failure

    # --- collectives ---

    def _collective(self, call: str, json: str | None, objects_of: Sequence[int]) -> list[Any]:
        """Send this member's object in the next row, wait until all members have reached it, and return the objects of some of them.

        If reading the objects fails, the same call returns to this row. If it went on to the next one, each later call would be
        paired with a different call of the other members.
        """
        self._check_usable()
        asked = Collective(self._current, self._position, call, json, tuple(objects_of))
        if self._unfinished is not None and not asked.repeats(self._unfinished):
            # The others may have read this member's object, so it must repeat that collective, or regroup().
            raise self._failure or RuntimeError(
                f"node {self.node_rank}: {self._unfinished.name} was interrupted: call it again, or regroup()"
            )
        self._unfinished = asked
        self._threads.ask(asked)

        def ended(seen: Snapshot) -> Outcome | None:
            return seen.outcome if seen.outcome is not None and seen.outcome.of is asked else None

        try:
            outcome = BoundedWait(self._threads, self._timeout_s, asked.name).until(ended)
            if outcome.error is not None:
                raise outcome.error
        except NodeError as error:
            self._failure = error
            raise
        finally:
            self._threads.look_rarely()
        self._unfinished = self._failure = None
        self._position = Position(asked.position.iteration + 1, 0)
        return list(outcome.objects)


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
    """Join the group of `num_nodes` nodes at `path` on a shared filesystem; returns when all nodes have joined.

    `timeout_s` limits this wait and every later one. Raises BarrierTimeout (naming the missing nodes), StoreError, Fenced, ValueError, and
    TypeError if a rank or number of nodes is not an integer.
    """
    node_rank, num_nodes = operator.index(node_rank), operator.index(num_nodes)
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank={node_rank} is not in 0..{num_nodes - 1} (num_nodes={num_nodes})")
    if not 0 < beat_s < suspect_s < dead_s:
        raise ValueError(f"0 < beat_s < suspect_s < dead_s must hold: {beat_s}, {suspect_s}, {dead_s}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be more than 0")
    alike = {"num_nodes": num_nodes, "beat_s": beat_s, "suspect_s": suspect_s, "dead_s": dead_s}
    here = Join(node_rank, 0, host_name(), os.getpid(), boot_id(), choices=alike)
    limits = Limits(suspect_s, dead_s, 2 * beat_s, join_timeout_s=float("inf"))
    store = NotedStore()
    member = make_member(store, RunPaths(Path(path).absolute()), here, num_nodes, limits, beat_s)
    group = Group(MemberThreads(member, store, beat_s), timeout_s)
    group._begin()
    return group


def make_member(
    store: Store, paths: RunPaths, here: Join, num_nodes: int, limits: Limits, beat_s: float
) -> GroupMember:
    """A member that has not joined yet. Does not touch the filesystem."""
    rules = Rules(TABLE, num_nodes, on_node_failure="hold", limits=limits)
    members_s = min(0.05 * max(1.0, num_nodes / 16), beat_s / 2)
    beats_s = min(beat_s, limits.suspect_s / 3)
    paces = Paces(members_s, beats_s, 1.5 * beat_s, limits.dead_s, eagerness(num_nodes))
    work, observer = CollectiveWork(), Observer(store, paths, TABLE, paces)
    loop = NodeLoop(store, observer, rules, work, here, lambda event, node, fields: None)
    return GroupMember(loop, work, Snapshot(Node(here.rank, 0, 0.0, here.host), looked_at=0.0))
