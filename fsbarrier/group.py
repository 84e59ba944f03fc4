"""A barrier group for anybody's own scripts, on the same core as the daemon and named as torch.distributed names things.

    with fsbarrier.join("/shared/run", node_rank=1, num_nodes=3, timeout_s=600) as group:
        config = group.broadcast(config, src=0)
        group.barrier()
        sizes = group.all_gather(len(mine))

Each collective is a row with one number, passed by all members of the current generation; what they exchange is JSON. A background
thread beats and looks at the directory, so that a node that computes for an hour is not taken for dead. After PeerLost the
living call `regroup()` and go on as the next generation. Standard library and the light dependencies only.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsbarrier.errors import Fenced, FsbarrierError, StoreError
from fsbarrier.node.agent import Agent
from fsbarrier.node.host import boot_id
from fsbarrier.node.observer import Observer, Paces
from fsbarrier.node.store import PosixStore
from fsbarrier.paths import RunPaths
from fsbarrier.program import Context, Phase, Program, Value
from fsbarrier.protocol.facts import Generation, Join, Member, Payload, Position, encode
from fsbarrier.protocol.membership import Limits, losses, silence
from fsbarrier.protocol.state import Exit, Node, Part, Rules, Stage, WorkReport

POLL_MIN_S, POLL_MAX_S, POLL_GROWTH = 0.001, 0.05, 1.5


class PeerError(FsbarrierError):
    """A collective that cannot end because of another node: `rank`, `host`, and `age_s`, the seconds without news of it."""

    def __init__(self, message: str, rank: int = -1, host: str = "", age_s: float | None = None) -> None:
        super().__init__(message)
        self.rank, self.host, self.age_s = rank, host, age_s


class PeerLost(PeerError):
    """A member is dead, left, or was restarted; `regroup()` goes on without it."""

    exit_code = 5


class BarrierTimeout(PeerError):
    """A member is alive but did not come within `timeout_s`."""

    exit_code = 5


def _do_nothing(context: Context) -> Value:
    return Value({})


class _OneRow(Program):
    """The group's program: one row, over and over."""

    def __post_init__(self) -> None:
        pass


_PROGRAM = _OneRow("group", (Phase(0, "collective", each=_do_nothing),))


@dataclass
class _Offer:
    """The WorkRunner of a group: the work of row n is done once the caller offered a value for collective n."""

    value: Payload | None = None
    offered_at: Position | None = None
    row: Position | None = None

    def launch(self, node: Node, part: Part) -> None:
        self.row = node.position

    def cancel(self) -> None:
        self.value = self.row = None

    def report(self) -> WorkReport | None:
        if self.value is None or self.offered_at != self.row:
            return None
        return WorkReport(Part.EACH, True, self.value, 0.0)

    def progress(self) -> Payload:
        return {}


@dataclass
class _Passed:
    """A collective that was released: where."""

    generation: Generation
    position: Position


class Group:
    """This process's membership. Use `fsbarrier.join`; not for use from several threads at once."""

    def __init__(self, agent: Agent, timeout_s: float, beat_s: float) -> None:
        self._agent, self._timeout_s, self._beat_s = agent, timeout_s, beat_s
        self._offer: _Offer = agent.work  # type: ignore[assignment]
        self._changed = threading.Condition()
        self._failure: FsbarrierError | None = None
        self._leaving = threading.Event()
        self._hurry = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"fsbarrier-{name}", daemon=True)
            for name, target in (("look", self._look), ("beat", self._beat))
        ]

    # --- what callers use ---

    @property
    def node_rank(self) -> int:
        return self._agent.node.rank

    @property
    def generation(self) -> int:
        """The number of the generation that this node is in."""
        return self._generation().number

    @property
    def members(self) -> tuple[int, ...]:
        """The node ranks of this generation, in order."""
        return self._generation().ranks

    def barrier(self) -> None:
        """Return once every member has called it. Raises PeerLost, BarrierTimeout, Fenced, StoreError."""
        self._collective(None)

    def all_gather(self, obj: Any) -> list[Any]:
        """Every member's object (JSON data), in the order of `members`. Raises as `barrier`."""
        passed = self._collective(obj)
        return [self._value(passed, rank) for rank in passed.generation.ranks]

    def broadcast(self, obj: Any = None, src: int = 0) -> Any:
        """The object of node rank `src` (JSON data), on every member. Raises as `barrier`; ValueError for a `src` that is no member."""
        if src not in self.members:
            raise ValueError(f"src={src} is not a member of generation {self.generation}: {self.members}")
        return self._value(self._collective(obj if src == self.node_rank else None), src)

    def regroup(self) -> None:
        """After PeerLost: the living form the next generation. Returns once this node is in it. Raises as `barrier`."""
        before, deadline = self.generation, time.monotonic() + self._timeout_s
        with self._changed:
            if self._lost():
                self._agent.rules = replace(self._agent.rules, on_node_failure="regroup")
                self._hurry.set()
                while self._agent.node.generation is None or self.generation == before:
                    self._wait(deadline, "regroup")
                self._agent.rules = replace(self._agent.rules, on_node_failure="hold")

    def leave(self) -> None:
        """End this membership; the others are told. Safe to call twice."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._hurry.set()
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    # --- collectives ---

    def _begin(self, num_nodes: int) -> None:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + self._timeout_s
        try:
            with self._changed:
                while self._agent.node.generation is None:
                    self._wait(deadline, f"joining ({num_nodes} nodes expected)")
        except FsbarrierError:
            self.leave()
            raise

    def _generation(self) -> Generation:
        generation = self._agent.node.generation
        if generation is None:
            raise Fenced(f"node {self.node_rank} is in no generation now (it was taken for dead); join again")
        return generation

    def _collective(self, obj: Any) -> _Passed:
        value = json.loads(
            json.dumps({"obj": obj})
        )  # what cannot be sent fails here, on the node that sends it
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if self._failure is not None:
                raise self._failure
            generation, position = self._generation(), self._agent.node.position
            assert position is not None
            self._offer.value, self._offer.offered_at = value, position
            self._hurry.set()
            while self._agent.node.generation is generation and self._agent.node.position == position:
                self._raise_if_lost(position)
                self._wait(deadline, f"collective {position.iteration}")
            if self._agent.node.generation is not generation:
                raise PeerLost(
                    f"node {self.node_rank}: generation {generation.number} ended during a collective; regroup"
                )
            return _Passed(generation, position)

    def _value(self, passed: _Passed, rank: int) -> Any:
        try:
            reports = self._agent.observer.reports(passed.generation.number, passed.position, (rank,))
        except OSError as error:
            raise StoreError(
                f"node {self.node_rank}: what node {rank} gave to collective {passed.position.iteration} cannot be read: {error}"
            ) from None
        return reports[rank]["obj"]

    def _wait(self, deadline: float, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if (
            not self._changed.wait(max(0.0, min(self._beat_s, deadline - time.monotonic())))
            and time.monotonic() >= deadline
        ):
            now = time.monotonic()
            missing = self._missing(now)
            names = ", ".join(
                f"node {m.rank} ({m.host}, last heartbeat {age:.1f} s ago)" for m, age in missing
            )
            first, age = missing[0] if missing else (Member(-1, 0), None)
            message = f"node {self.node_rank}: {what} not passed within {self._timeout_s:g} s; waiting for {names or 'nobody known'}"
            raise BarrierTimeout(message, first.rank, first.host, age)

    def _missing(self, now: float) -> list[tuple[Member, float]]:
        node, ledger = self._agent.node, self._agent.observer.ledger
        if node.generation is None:  # joining
            num_nodes, joins = self._agent.rules.num_nodes, self._agent.observer.joins
            absent = [rank for rank in range(num_nodes) if rank not in joins and rank != node.rank]
            return [(Member(rank, 0, "never seen"), now - node.since) for rank in absent]
        waiting = self._agent.waiting_for(now)
        members = node.generation.members if node.generation else ()
        return [(m, silence(m, ledger, node.since, now)) for m in members if m.rank in waiting]

    def _raise_if_lost(self, position: Position) -> None:
        lost = self._lost()
        if lost:
            member, why, age = lost[0]
            message = f"node {self.node_rank}: node {member.rank} ({member.host}) is lost: {why} (collective {position.iteration})"
            raise PeerLost(message, member.rank, member.host, age)

    def _lost(self) -> list[tuple[Member, str, float]]:
        """The members that are gone and had not passed the row that this node is in."""
        node, observer, now = self._agent.node, self._agent.observer, time.monotonic()
        if node.generation is None or node.position is None:
            return []
        ledger, limits, lost = observer.ledger, self._agent.rules.limits, []
        for loss in losses(
            node.generation.members, node.rank, observer.joins, ledger, node.since, now, limits
        ):
            seen = ledger.seen.get(loss.member.rank)
            passed = seen is not None and seen.beat.iteration > node.position.iteration
            if not passed:
                lost.append((loss.member, loss.why, silence(loss.member, ledger, node.since, now)))
        return lost

    # --- background ---

    def _look(self) -> None:
        interval = POLL_MIN_S
        while not self._leaving.is_set():
            busy = False
            try:
                with self._changed:
                    before = self._agent.node
                    busy = self._agent.tick(time.monotonic())
                    if before.generation is not None and self._agent.node.generation is None:
                        self._failure = Fenced(
                            f"node {self.node_rank} was taken for dead and the others went on; join again"
                        )
                    elif self._agent.exit is not None:
                        self._failure = _as_error(self._agent.exit, self.node_rank)
                    self._changed.notify_all()
            except (OSError, FsbarrierError) as error:
                with self._changed:
                    self._failure = (
                        error
                        if isinstance(error, FsbarrierError)
                        else StoreError(f"node {self.node_rank}: {error}")
                    )
                    self._changed.notify_all()
            if self._failure is not None:
                return
            interval = POLL_MIN_S if busy else min(interval * POLL_GROWTH, POLL_MAX_S)
            if self._hurry.wait(interval):
                self._hurry.clear()
                interval = POLL_MIN_S

    def _beat(self) -> None:
        path, store = self._agent.observer.paths.beat(self.node_rank), self._agent.store
        while True:
            last = self._leaving.is_set() or self._failure is not None
            if last and self._agent.exit is None:
                self._agent.exit = Exit(0, "left", "left")
            try:
                store.put(path, encode(self._agent.beat()))
            except OSError:
                pass  # the looking thread meets the same filesystem, and tells
            if last:
                return
            joining = self._agent.node.stage is Stage.JOINING
            self._leaving.wait(self._beat_s / 10 if joining else self._beat_s)


def join(
    path: str | os.PathLike[str],
    *,
    node_rank: int,
    num_nodes: int,
    timeout_s: float = 600.0,
    beat_s: float = 2.0,
    suspect_s: float = 6.0,
    dead_s: float = 15.0,
) -> Group:
    """Join the group of `num_nodes` nodes at `path` on a shared filesystem; returns once all of them are here.

    `timeout_s` bounds this and every later wait. Raises BarrierTimeout (who is missing), StoreError, ValueError.
    """
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank={node_rank} is not in 0..{num_nodes - 1}")
    if not 0 < beat_s < suspect_s < dead_s:
        raise ValueError(f"beat_s < suspect_s < dead_s must hold: {beat_s}, {suspect_s}, {dead_s}")
    limits = Limits(suspect_s, dead_s, 2 * beat_s, join_timeout_s=float("inf"))
    rules = Rules(_PROGRAM, 0, 0, num_nodes, on_node_failure="hold", limits=limits)
    paces = Paces(members_s=0.05, beats_s=beat_s / 2, blind_s=1.5 * beat_s)
    store = PosixStore()
    observer = Observer(store, RunPaths(Path(path).absolute()), _PROGRAM, paces)
    here = Join(node_rank, 0, socket.gethostname(), os.getpid(), boot_id())
    agent = Agent(store, observer, rules, _Offer(), here, lambda event, node, fields: None)
    try:
        agent.start(time.monotonic())
    except OSError as error:
        raise StoreError(f"node {node_rank}: cannot join the group at {path}: {error}") from None
    group = Group(agent, timeout_s, beat_s)
    group._begin(num_nodes)
    return group


def _as_error(exit: Exit, rank: int) -> FsbarrierError:
    if exit.code == Fenced.exit_code:
        return Fenced(exit.reason)
    return PeerError(f"node {rank}: {exit.reason}", rank)
