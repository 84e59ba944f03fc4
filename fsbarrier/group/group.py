"""A barrier group for anybody's own scripts, on the same core as the daemon and named as torch.distributed names things.

    with fsbarrier.join("/shared/group", node_rank=1, num_nodes=3, timeout_s=600) as group:
        config = group.broadcast(config, src=0)
        group.barrier()
        sizes = group.all_gather(len(mine))

Each collective is a row with one number, passed by all members of the current generation; what they exchange is JSON. A background
thread beats and looks at the directory, so that a node that computes for an hour is not taken for dead. After PeerLost the
living call `regroup()` and go on as the next generation. Standard library and the light dependencies only. See docs/group.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsbarrier.errors import NodeError, PeerLost, StoreError
from fsbarrier.group.presence import Offer, Presence
from fsbarrier.group.waiting import Patience
from fsbarrier.machine.host import boot_id, host_name
from fsbarrier.node.agent import Agent
from fsbarrier.node.observer import Observer, Paces, eagerness, fact_name
from fsbarrier.program import Context, Phase, Program, Value
from fsbarrier.protocol.facts import Fact, Generation, Join, Member, Payload, Position
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Rules
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.store import PosixStore

MAX_OBJECT_BYTES = 24 * 1024 * 1024  # as JSON; a record that holds it, quoted, stays below facts.MAX_BYTES
ROW = "collective"


def _do_nothing(context: Context) -> Value:
    return Value({})


class _OneRow(Program):
    """The group's program: one row, over and over."""

    def __post_init__(self) -> None:
        pass


_PROGRAM = _OneRow("group", (Phase(0, ROW, each=_do_nothing, transient=True),))


class Group:
    """This process's membership. Use `fsbarrier.join`; not for use from several threads at once."""

    def __init__(self, agent: Agent, offer: Offer, timeout_s: float, beat_s: float) -> None:
        self._paths, self._join = agent.observer.paths, agent.join
        self._observer = agent.observer  # only to read and to list: the looking is another thread's
        self._timeout_s = timeout_s
        self._presence = Presence(agent, offer, beat_s)
        self._generation: Generation | None = None  # the one that the caller knows of
        self._at = Position(1, 0)  # the row of the caller's next collective
        self._open: Payload | None = None  # what was offered there, while that collective has not ended
        self._error: NodeError | None = None  # how it failed
        self._left = False

    # --- what callers use ---

    @property
    def node_rank(self) -> int:
        return self._join.rank

    @property
    def generation(self) -> int:
        """The number of the generation that this node is in."""
        return self._mine.number

    @property
    def members(self) -> tuple[int, ...]:
        """The node ranks of this generation, in order."""
        return self._mine.ranks

    @property
    def joiners(self) -> tuple[int, ...]:
        """The node ranks that are alive and wait to be taken in by a `regroup()`, as far as this node knows by now."""
        return self._presence.sight.joiners

    def barrier(self) -> None:
        """Return once every member has called it. Raises PeerLost, BarrierTimeout, Fenced, StoreError."""
        self._collective({"call": "barrier()"})

    def all_gather(self, obj: Any) -> list[Any]:
        """Every member's object (JSON data), in the order of `members`. Raises as `barrier`; TypeError, ValueError for an object
        that cannot be sent."""
        given = {"call": "all_gather()", "obj": _text(obj)}
        generation, position = self._collective(given)
        return [self._given(generation, position, rank, given) for rank in generation.ranks]

    def broadcast(self, obj: Any = None, src: int = 0) -> Any:
        """The object of node rank `src` (JSON data), on every member. Raises as `all_gather`, and ValueError for a `src` that is no
        member."""
        if src not in self.members:
            raise ValueError(f"src={src} is not a member of generation {self.generation}: {self.members}")
        given = {"call": f"broadcast(src={src})"}
        generation, position = self._collective(
            {**given, "obj": _text(obj)} if src == self.node_rank else given
        )
        return self._given(generation, position, src, given)

    def regroup(self) -> None:
        """Go on as the next generation: the living, and whoever waits to join. Every member calls it, after PeerLost or as one.

        Returns once this node is in it; the first to call makes it. Raises Fenced, BarrierTimeout, StoreError.
        """
        before = self._mine
        self._check_usable()
        self._presence.regroup(before.number)
        try:
            patience = Patience(self._presence, self._timeout_s, "regroup()")
            while (now := self._presence.sight.node.generation) is before or now is None:
                patience.wait()
        finally:
            self._presence.rest()
        self._enter(now)

    def leave(self) -> None:
        """End this membership; the others are told. Safe to call twice. Never raises."""
        self._leave("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave("" if kind is None else f"{kind.__name__}: {error}"[:500])

    # --- joining and leaving ---

    def _begin(self) -> None:
        self._presence.start()
        try:
            patience = Patience(self._presence, self._timeout_s, "join()")
            while self._presence.sight.node.generation is None:
                self._check_alike()
                patience.wait()
            self._check_alike()
        except BaseException as error:
            self._leave(f"{type(error).__name__} while joining")
            raise
        finally:
            self._presence.rest()
        assert self._presence.sight.node.generation is not None
        self._enter(self._presence.sight.node.generation)

    def _check_alike(self) -> None:
        """All must have joined with the same arguments: those in this generation, and those that were seen to be about."""
        sight, known = self._presence.sight, self._presence.known
        generation = sight.node.generation
        for rank, join in sight.joins.items():
            member = Member(rank, join.incarnation)
            about = known.get(rank) != join or sight.ledger.moved(member)
            concerns = about if generation is None else rank in generation.ranks
            for name, mine in self._join.choices.items() if concerns else ():
                if (theirs := join.choices.get(name)) != mine:
                    raise ValueError(
                        f"node {rank} ({join.host}) joined {self._paths.root} with {name}={theirs}, "
                        f"node {self.node_rank} with {name}={mine}: all must give the same"
                    )

    def _leave(self, why: str) -> None:
        if not self._left:
            self._left = True
            self._presence.leave(why)

    def _enter(self, generation: Generation) -> None:
        self._generation, self._at = generation, generation.start
        self._open = self._error = None

    @property
    def _mine(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def _check_usable(self) -> None:
        if self._left:
            raise RuntimeError(f"node {self.node_rank} has left the group at {self._paths.root}; join again")
        if self._presence.sight.failure is not None:
            raise self._presence.sight.failure

    # --- collectives ---

    def _collective(self, given: Payload) -> tuple[Generation, Position]:
        """Pass one row: all members came, and what each gave is there."""
        self._check_usable()
        generation, position, name = self._mine, self._at, f"{given['call']} no. {self._at.iteration}"
        if self._open is None:
            self._open = given
            self._presence.offer(generation.number, position, given)
        elif self._open != given:  # what this node gave to the others stays: that collective, or regroup()
            raise self._error or RuntimeError(
                f"node {self.node_rank}: {self._open['call']} no. {position.iteration} was interrupted: call it again, or regroup()"
            )
        else:
            self._presence.hurry()
        try:
            patience = Patience(self._presence, self._timeout_s, name)
            while not self._passed(generation, position, name):
                patience.wait()
        except NodeError as error:
            self._error = error
            raise
        finally:
            self._presence.rest()
        self._open = self._error = None
        self._at = Position(position.iteration + 1, 0)
        self._clean(generation, position)
        return generation, position

    def _passed(self, generation: Generation, position: Position, name: str) -> bool:
        """Whether all members have come. Raises PeerLost where one will not."""
        sight = self._presence.sight
        here = sight.node.generation is generation
        if here and sight.node.position is not None and sight.node.position > position:
            return True
        missing = sight.missing[0] if sight.missing and sight.missing[0].why else None
        if (here and missing is None) or sight.failure is not None or sight.node.generation is None:
            return False
        if self._all_there(generation, position):
            return True  # nobody can have been told otherwise but who gave up before the last one came
        if here and missing is not None:
            member, age = missing.member, missing.age
            raise PeerLost(
                f"node {self.node_rank}: {name}: node {member.rank} ({member.host}) is lost: {missing.why}; regroup() goes on without it",
                member.rank,
                member.host,
                age,
            )
        raise self._superseded(generation, sight.node.generation, name)

    def _superseded(self, old: Generation, new: Generation, name: str) -> PeerLost:
        """Another member regrouped before this one."""
        hosts = {m.rank: m.host for m in (*old.members, *new.members)}
        gone = [m for m in old.members if new.incarnation_of(m.rank) != m.incarnation]
        ledger, now = self._presence.sight.ledger, time.monotonic()
        maker = f"node {new.created_by} ({hosts.get(new.created_by, '')})"
        names = ", ".join(f"node {m.rank} ({m.host})" for m in gone)
        what = f"{maker} regrouped without {names}" if gone else f"{maker} regrouped"
        message = (
            f"node {self.node_rank}: {name}: generation {old.number} is over: {what}; regroup() goes along"
        )
        if gone:
            return PeerLost(message, gone[0].rank, gone[0].host, ledger.age(gone[0], now))
        return PeerLost(message, new.created_by, hosts.get(new.created_by, ""))

    def _row(self, generation: Generation, iteration: int) -> Path:
        return self._paths.phase(generation.number, iteration, 0, ROW)

    def _all_there(self, generation: Generation, position: Position) -> bool:
        try:
            names = set(self._observer.store.names(self._row(generation, position.iteration)))
        except OSError:
            return False
        return names.issuperset(fact_name(rank, "done") for rank in generation.ranks)

    def _given(self, generation: Generation, position: Position, rank: int, mine: Payload) -> Any:
        """What node `rank` gave to a row that was passed."""
        path = self._row(generation, position.iteration) / fact_name(rank, "done")
        host = next(m.host for m in generation.members if m.rank == rank)
        given = self._read(path, rank, host)
        if given.get("call") != mine["call"]:
            raise RuntimeError(
                f"the members are out of step: node {rank} ({host}) called {given.get('call')} as no. {position.iteration} "
                f"of generation {generation.number}, node {self.node_rank} {mine['call']}"
            )
        return json.loads(given["obj"])

    def _read(self, path: Path, rank: int, host: str) -> Payload:
        """The value of a fact that is there; a moment's patience for one that is being written once more. Raises StoreError."""
        dead_s, began, pause = self._presence.rules.limits.dead_s, time.monotonic(), threading.Event()
        while True:
            try:
                return self._observer.must_read(path, Fact).value
            except OSError as error:
                waited = time.monotonic() - began
                if waited > dead_s:
                    what = f"what node {rank} ({host}) gave cannot be read: {path}: {error}"
                    raise StoreError(f"node {self.node_rank}: {what}", rank, host, waited) from None
            pause.wait(0.01)

    def _clean(self, generation: Generation, position: Position) -> None:
        """Remove what nobody reads again: whoever came to this row had ended the one before it (I9).

        Each member takes its own fact away, and the leader the folder one row later, when all have done so.
        """
        start, before = generation.start.iteration, position.iteration - 1
        with contextlib.suppress(OSError):
            if before >= start:
                (self._row(generation, before) / fact_name(self.node_rank, "done")).unlink()
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
    limits = Limits(suspect_s, dead_s, 2 * beat_s, join_timeout_s=float("inf"))
    rules = Rules(_PROGRAM, 0, 0, num_nodes, on_node_failure="hold", limits=limits)
    members_s = min(0.05 * max(1.0, num_nodes / 16), beat_s / 2)
    paces = Paces(members_s, beat_s / 2, 1.5 * beat_s, eagerness(num_nodes), watchers=num_nodes)
    store, offer = PosixStore(), Offer()
    observer = Observer(store, paths, _PROGRAM, paces)
    agent = Agent(store, observer, rules, offer, here, lambda event, node, fields: None)
    try:
        observer.prepare()
        agent.start(time.monotonic())
    except OSError as error:
        message = f"node {node_rank}: cannot join the group at {path}: {error}"
        raise StoreError(message, node_rank, here.host, 0.0) from None
    group = Group(agent, offer, timeout_s, beat_s)
    group._begin()
    return group


def _text(obj: Any) -> str:
    """`obj` as JSON. Raises TypeError, ValueError: what cannot be sent fails here, on the node that sends it."""
    hint = "a group exchanges JSON data: None, bool, int, float, str, lists, and dicts with str keys"
    try:
        text = json.dumps(obj, separators=(",", ":"))
        same = json.loads(text)
    except TypeError as error:
        raise TypeError(f"{error}; {hint}. Write anything else to a file and send its path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this object cannot be sent: {error}; {hint}") from None
    if not _alike(obj, same):
        raise TypeError(f"JSON would change this object (dict keys that are no str?); {hint}")
    if len(text) > MAX_OBJECT_BYTES:
        raise ValueError(
            f"this object is {len(text)} bytes of JSON, at most {MAX_OBJECT_BYTES} can be sent; write it to a file and send its path"
        )
    return text


def _alike(obj: Any, same: Any) -> bool:
    """Whether JSON keeps what it was given; tuples may come back as lists."""
    if isinstance(obj, dict):
        return obj.keys() == same.keys() and all(_alike(value, same[key]) for key, value in obj.items())
    if isinstance(obj, list | tuple):
        return all(map(_alike, obj, same))
    return True
