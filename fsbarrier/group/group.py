"""A barrier group for your own scripts: the same core as the daemon, with the names of torch.distributed.

    with fsbarrier.join("/shared/group", node_rank=1, num_nodes=3, timeout_s=600) as group:
        config = group.broadcast(config, src=0)
        group.barrier()
        sizes = group.all_gather(len(mine))

Each collective is one numbered row, which all members of the current generation pass together. Members exchange JSON. The caller's
thread looks at the directory while it waits, and a background thread only writes heartbeats, so a node may compute for an hour without
looking dead. After PeerLost the living members call `regroup()` and go on as the next generation. Needs only light dependencies. See
docs/group.md.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from fsbarrier.coordination.loop import LookAgain
from fsbarrier.coordination.polling import LookWaits, Pace
from fsbarrier.errors import BarrierTimeout, Fenced, NodeError, StoreError
from fsbarrier.group.collective import BARRIER, Collective, to_json
from fsbarrier.group.member import Awaited, GroupMember, make_member
from fsbarrier.network.this_host import boot_id, host_name
from fsbarrier.protocol.facts import Generation, Join, Position
from fsbarrier.protocol.membership import BEAT_S, DEAD_S, SUSPECT_S, Limits
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.retry import Backoff, fails_or_hides, patiently

T = TypeVar("T")

#: how long the last heartbeat may take on a hanging filesystem
LEAVE_S = 5.0
#: the first pause while a caller waits, for each member: members on one host compete for CPU time
PAUSE_FOR_EACH_S = 0.0003
LONGEST_PAUSE_S = 0.05
#: the largest number of nodes that use hints: members on one host wake each other, N x N times a barrier
HINTED_NODES = 16


class HeartbeatThread:
    """The thread that writes heartbeats, also while the caller computes. A daemon thread: it keeps no interpreter alive.

    It writes one every `beat_s` seconds from `start` to `end`, but not while a look hangs: the others should not wait for ever."""

    def __init__(self, member: GroupMember, beat_s: float) -> None:
        self._member, self._beat_s, self._ending = member, beat_s, threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, name="fsbarrier-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, why: str, within_s: float) -> None:
        """Tell the others that this member leaves, and why; give up after `within_s`, as on a filesystem that hangs. Never raises."""
        self._member.work.leaving = why
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _write_heartbeats(self) -> None:
        member, last = self._member, False
        # A newer start has this rank, or the others went on: nobody reads this heartbeat any more.
        while not last and not isinstance(member.failure, Fenced):
            last = self._ending.is_set()
            pause_s = member.beat(time.monotonic(), self._beat_s, last=last)
            if not last:
                self._ending.wait(pause_s)


class Group:
    """This process's membership; `fsbarrier.join` makes one. Not thread-safe."""

    def __init__(
        self,
        member: GroupMember,
        timeout_s: float,
        heartbeats: HeartbeatThread,
        waits: LookWaits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait for the first generation. `member`: has begun to join. The simulator has its own `waits` and `clock`. Raises as `join`."""
        self._member, self._timeout_s, self._clock = member, timeout_s, clock
        self._root, self._join = member.loop.observer.paths.root, member.loop.join
        num_nodes = member.loop.rules.num_nodes
        self._pauses = Backoff(PAUSE_FOR_EACH_S * max(1, num_nodes - 2), LONGEST_PAUSE_S)
        self._hinted = num_nodes <= HINTED_NODES
        self._pace, self._waits, self._heartbeats = Pace(member.loop), waits, heartbeats
        #: the function that a wait tries after each look, its last result, and the error of the last look
        self._find: Callable[[], Any] = lambda: None
        self._found: Any = None
        self._trouble: OSError | None = None
        #: the last call and its error if it failed; the caller may repeat that call
        self._failed: tuple[Collective, NodeError] | None = None
        self._left = False
        self._heartbeats.start()
        try:
            self._enter(self._wait("join()", member.first_generation))
        except NodeError as error:
            self._leave(f"{type(error).__name__} while joining")
            raise

    # --- what callers use ---

    @property
    def node_rank(self) -> int:
        return self._join.rank

    @property
    def generation(self) -> int:
        """The number of the generation that this node is in."""
        return self._generation.number

    @property
    def members(self) -> tuple[int, ...]:
        """The node ranks of this generation, in order."""
        return self._generation.ranks

    @property
    def joiners(self) -> tuple[int, ...]:
        """The live node ranks that wait for a `regroup()` to join, of whom this node has seen two heartbeats."""
        if not self._left:
            with suppress(NodeError, OSError):
                self._look_until_idle(self._clock())
        return self._member.joiners

    def barrier(self) -> None:
        """Return once every member has called it. Raises PeerLost, BarrierTimeout, Fenced, OutOfStep, StoreError."""
        self._collective(BARRIER, None, objects_of=())

    def all_gather(self, obj: object) -> list[Any]:
        """Every member's object (JSON data), in the order of `members`. Raises as `barrier`, and TypeError or ValueError for an object
        that cannot be sent."""
        return self._collective("all_gather()", to_json(obj), objects_of=self.members)

    def broadcast(self, obj: object = None, src: int = 0) -> Any:
        """The object of node rank `src` (JSON data), on every member. Raises as `all_gather`, and ValueError if `src` is not a
        member."""
        if src not in self.members:
            raise ValueError(f"src={src} is not a member of generation {self.generation}: {self.members}")
        # True and 1.0 also mean rank 1.
        src = int(src)
        json = to_json(obj) if src == self.node_rank else None
        return self._collective(f"broadcast(src={src})", json, objects_of=(src,))[0]

    def regroup(self) -> None:
        """Go on as the next generation, with the living members and the nodes that wait to join. Every living member must call it.

        The first call creates the generation; each call returns when its node is in it. Raises Fenced, BarrierTimeout, StoreError.
        """
        self._check_usable()
        member, before = self._member, self._generation
        member.regroup(before)
        self._enter(
            self._wait("regroup()", lambda: None if member.generation == before else member.generation)
        )

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

    # --- membership ---

    def _enter(self, generation: Generation) -> None:
        """Go on in a new generation, at its first row. A call that failed in the last generation no longer has to be repeated."""
        self._generation, self._position, self._failed = generation, generation.start, None

    def _leave(self, why: str) -> None:
        if not self._left:
            self._left = True
            self._waits.close()
            self._heartbeats.end(why, min(LEAVE_S, self._timeout_s))

    def _check_usable(self) -> None:
        if self._left:
            raise RuntimeError(f"node {self.node_rank} has left the group at {self._root}; join again")

    # --- waiting ---

    def _collective(self, call: str, json: str | None, objects_of: tuple[int, ...]) -> list[Any]:
        """Send this member's object in the next row, wait until all members have reached it, and return the objects of some of them.

        If that fails, only the same call may be made next, and for the same row, since the others may have read this member's object. If
        another call went on to the next row, each later call would be paired with a different call of the other members.
        """
        self._check_usable()
        collective = Collective(self._generation, self._position, call, json, objects_of)
        if self._failed is not None and self._failed[0] != collective:
            raise self._failed[1]
        self._member.work.asked = collective
        try:
            objects = self._wait(collective.name, partial(self._member.outcome, collective))
        except NodeError as error:
            self._failed = collective, error
            raise
        self._failed, self._position = None, Position(collective.position.iteration + 1, 0)
        return list(objects)

    def _wait(self, call: str, find: Callable[[], T | None]) -> T:
        """Look until `find` returns something. `call`: the waiting call, for messages.

        Raises the errors of `find`, the error that ended the membership, BarrierTimeout, and StoreError if looks fail for `dead_s` or still
        at the timeout. Any other exception, such as a signal handler's, ends the membership, since it may have interrupted a look.
        """
        self._find, dead_s = find, self._member.loop.rules.limits.dead_s
        until, failing_since = self._clock() + self._timeout_s, None
        try:
            while True:
                now = self._clock()
                again = self._look(now)
                if self._found is not None:
                    return self._found  # type: ignore[no-any-return]
                failing_since = (failing_since or now) if self._trouble is not None else None
                if failing_since is not None and (now >= until or now - failing_since >= dead_s):
                    raise self._store_error(call, now - failing_since)
                if now >= until:
                    raise self._timeout(call, now)
                pause_s = min(self._pace.next_pause(now, self._pauses, again), until - now)
                self._waits.wait(pause_s, hints=self._hinted and pause_s >= self._pauses.most_s)
        except NodeError:
            raise
        except BaseException as error:
            self._leave(f"{type(error).__name__} in {call}")
            raise

    def _look(self, now: float) -> LookAgain:
        """Look until there is nothing left to do, then try `find`. An OSError is kept in `_trouble`, and the next look tries again."""
        self._found = self._trouble = None
        try:
            again = self._look_until_idle(now)
            self._found = self._find()
        except OSError as error:
            self._trouble = error
            return LookAgain.AT_USUAL_PACE
        return again

    def _look_until_idle(self, now: float) -> LookAgain:
        """Run ticks until nothing is left to do. That is soon in a group, since only this caller's next call begins another row."""
        while (again := self._member.tick(now)) is LookAgain.NOW:
            now = self._clock()
        return again

    def _store_error(self, call: str, failing_s: float) -> StoreError:
        why = f"{self._root} has failed for {failing_s:.3g} s: {self._trouble}"
        return StoreError(f"node {self.node_rank}: {call}: {why}", self.node_rank, self._join.host, failing_s)

    def _timeout(self, call: str, now: float) -> BarrierTimeout:
        here = Awaited(self.node_rank, self._join.host, 0.0, f"{self._join.host}, this node")
        awaited = self._member.awaited(now) or [here]
        names = ", ".join(f"node {node.rank} ({node.known})" for node in awaited)
        message = (
            f"node {self.node_rank}: {call}: not passed within {self._timeout_s:g} s; waiting for {names}"
        )
        first = awaited[0]
        silent_s = self._timeout_s if first.silent_s is None else first.silent_s
        return BarrierTimeout(message, first.rank, first.host, silent_s)


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

    `timeout_s` limits this wait and every later one. A node writes a heartbeat every `beat_s`, is suspected after `suspect_s` of silence,
    and lost after `dead_s`; these and `num_nodes` must be the same on all nodes. Raises BarrierTimeout (naming the missing nodes),
    StoreError, Fenced, ValueError, and TypeError if a rank or number of nodes is not an integer.
    """
    node_rank, num_nodes = operator.index(node_rank), operator.index(num_nodes)
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
    own_start = Join(node_rank, 0, host_name(), os.getpid(), boot_id(), choices=alike)
    limits = Limits(suspect_s, dead_s, 2 * beat_s, join_timeout_s=float("inf"))
    member = make_member(PosixStore(), paths, own_start, num_nodes, limits, beat_s)
    try:
        patiently(lambda: member.begin(time.monotonic()), min(dead_s, timeout_s), passes=fails_or_hides)
    except OSError as error:
        message = f"node {node_rank}: cannot join the group at {paths.root}: {error}"
        raise StoreError(message, node_rank, own_start.host, 0.0) from None
    waits = LookWaits(member.loop, threading.Event())
    return Group(member, timeout_s, HeartbeatThread(member, beat_s), waits)
