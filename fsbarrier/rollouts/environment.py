"""Runs the servers of an environment for agents' episodes: the user's own command, on each node for the duration of its rollout.

The command has its own interpreter and packages; nothing of it is imported here. If a server ends, it is restarted on another port, and
only its episodes begin again.

An environment may have a limited number of sessions (`environment.sessions`), which the nodes divide. Each node publishes, in the name of a
file, how many sessions it can still use at a time. This number only falls during a round. `divided` computes each node's part from all
these numbers; a node's part never shrinks because another node needs less. A node that learns late of a new number therefore uses too few
sessions, never too many, and needs no locks. The files are in the claims folder (claims.py) and are valid for its generation only, so those
of a dead node expire too.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from fsbarrier.errors import ProgramFailed
from fsbarrier.network.listening import on_loopback, port_of
from fsbarrier.network.this_host import owners_of_port
from fsbarrier.processes import failure_reason
from fsbarrier.processes.fork_server import Job
from fsbarrier.processes.supervisor import Child
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.claims import FULL_RATE
from fsbarrier.rollouts.claims import LOOK_S as CLAIMS_LOOK_S
from fsbarrier.rollouts.rollout_spec import RolloutSpec
from fsbarrier.rundir.names import SESSIONS
from fsbarrier.settings.secrecy import without_variables
from fsbarrier.settings.sections import EnvironmentSettings, Settings
from fsbarrier.store import files
from fsbarrier.store.trusted_folder import user_name

# Polling interval of a server, and the timeout of a health check.
LOOK_S, ANSWER_S = 0.1, 5.0
# Time for a server to end after SIGTERM.
GRACE_S = 2.0


# Compared by identity: two sessions on one server have equal fields.
@dataclass(eq=False)
class Session:
    """An episode's session on a server. `lost`: how the server ended, if it ended before the episode."""

    url: str
    job: Job | None = None
    lost: str = ""

    def end(self, how: str) -> None:
        self.lost = how
        if self.job is not None:
            self.job.close()


@dataclass(eq=False)
class Server:
    """One server; `url` is empty until it is ready."""

    log_file: Path
    url: str = ""
    #: another user listened on its port before it did
    lost_port: bool = False
    sessions: set[Session] = field(default_factory=set)


class Environment:
    """All servers of an environment on this node (`environment.*`, or `environments.NAME.*`)."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        log_dir: Path,
        name: str = "",
        quota: SessionQuota | None = None,
    ) -> None:
        """`quota`: limits the sessions of all nodes together; None: unlimited."""
        self.settings, self.quota = settings, quota
        # Its name in messages, and its table in the settings.
        self.called = f"environment {name}".strip()
        self.table = f"environments.{name}" if name else "environment"
        first = f"environment_{name}" if name else "environment"
        names = [first, *(f"{first}-{n}" for n in range(1, settings.replicas))]
        self.servers = [Server(log_dir / f"{name}.log") for name in names]
        # Events for the journal.
        self.events: list[JsonObject] = []
        # The number of this node's unfinished episodes, and whether this round brings no others.
        self.episodes, self.all_known = 0, False
        self.waiting = 0
        # Called when `state` has changed.
        self.on_change: Callable[[], None] = lambda: None
        self._restarts_left, self._why = settings.restarts, ""
        self._changed = asyncio.Event()
        self._failed = ""

    async def __aenter__(self) -> Self:
        self._keeping = [asyncio.create_task(self._keep(server)) for server in self.servers]
        if self.quota is not None and self.quota.folder is not None:
            self._keeping.append(asyncio.create_task(self._share(self.quota)))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Returns when all servers have ended."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self.servers.clear()
        if kind is None and self.quota is not None and self.quota.folder is not None:
            await asyncio.to_thread(self.quota.exchange, 0)

    @property
    def used(self) -> int:
        """The number of sessions that this node uses now."""
        return sum(len(server.sessions) for server in self.servers)

    @property
    def state(self) -> JsonObject:
        """The state for display, in the form of a frozen engine's. `most`: the sessions that this node may use now; None: any number."""
        return {
            "states": ["up" if server.url else "starting" for server in self.servers],
            "sessions": self.used,
            "most": None if self.quota is None else self.quota.mine,
            "waiting": self.waiting,
            "restarts": self.settings.restarts - max(0, self._restarts_left),
            "why": self._why,
        }

    def begin_round(self, number: int) -> None:
        """Begin round `number` of a phase; all nodes have finished the previous round."""
        self.all_known = False
        if self.quota is not None:
            self.quota.begin_round(number)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Wait for a session on the server with the fewest sessions. Raises ProgramFailed if the environment has failed."""
        self.waiting += 1
        try:
            while not (free := self._free()):
                if self._failed:
                    raise ProgramFailed(self._failed)
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.waiting -= 1
        server = min(free, key=lambda server: len(server.sessions))
        session = Session(server.url)
        server.sessions.add(session)
        self.on_change()
        try:
            yield session
        finally:
            server.sessions.discard(session)
            self._has_changed()

    def _free(self) -> list[Server]:
        """The servers that can take another session now."""
        if self.quota is not None and self.used >= self.quota.mine:
            return []
        most = self.settings.sessions_per_server or sys.maxsize
        return [server for server in self.servers if server.url and len(server.sessions) < most]

    def _has_changed(self) -> None:
        self._changed.set()
        self.on_change()

    async def _share(self, quota: SessionQuota) -> None:
        """Keep exchanging with the other nodes how many sessions each needs."""
        while True:
            need = max(1, min(quota.most, self.episodes)) if self.all_known else quota.most
            held_back = self.waiting and self.used >= quota.mine
            await asyncio.to_thread(quota.exchange, need)
            if held_back:
                # Waiting for other nodes counts as progress.
                self._has_changed()
            await asyncio.sleep(quota.pause_s)

    async def _keep(self, server: Server) -> None:
        """Run a server, and restart it when it ends.

        A server whose port another user took first is started on another port, as often as it takes within `start_timeout_s`. Only then
        does that count as a restart, because otherwise whoever can read a command line could end the run.
        """
        begin = time.monotonic()
        while not self._failed:
            server.lost_port = False
            try:
                how, lines = await self._serve(server)
            except ProgramFailed as error:
                # The command cannot be started, so a restart would not help.
                self._failed = str(error)
                break
            self.events.append(
                {"event": "environment_ended", "environment": self.table, "why": how, "log": lines}
            )
            print(f"the {self.called} {how} ({server.log_file})", file=sys.stderr)
            if server.lost_port and time.monotonic() - begin < self.settings.start_timeout_s:
                continue
            begin = time.monotonic()
            if not self._restarts_left:
                # This must be one line, because the last line of a program's output is its error message.
                self._failed = ": ".join((f"the {self.called} {how} ({server.log_file})", *lines[-1:]))
            self._restarts_left, self._why = self._restarts_left - 1, how
        self._has_changed()

    async def _serve(self, server: Server) -> tuple[str, list[str]]:
        """Run a server to its end; returns how it ended, and its last lines."""
        port = free_port()
        # Our PYTHONPATH must not make another interpreter import our packages.
        env = without_variables(os.environ, ("PYTHONPATH",))
        words = [word.replace("{port}", str(port)) for word in shlex.split(str(self.settings.command))]
        child = await asyncio.to_thread(
            Child.start, words, env=env, log_file=server.log_file, name=self.called
        )
        how = "was stopped"
        try:
            how = await self._watch(child, server, port)
        finally:
            server.url = ""
            for session in server.sessions:
                session.end(f"the {self.called} {how}")
            await asyncio.to_thread(child.stop, GRACE_S)
        return how, child.last_log_lines()

    async def _watch(self, child: Child, server: Server, port: int) -> str:
        """Set `server.url` once the server is ready; returns how the server ended."""
        begin, limit_s = time.monotonic(), self.settings.start_timeout_s
        while (code := child.poll()) is None:
            if not server.url:
                answers = await self._answers(port)
                # Other users can read the port from the command line and listen on it first.
                if others := owners_of_port(port) - {0, os.geteuid()}:
                    server.lost_port = True
                    return f"did not get its port: {user_name(min(others))} listens on it"
                if answers:
                    server.url = f"http://127.0.0.1:{port}"
                    self._has_changed()
            if not server.url and time.monotonic() - begin > limit_s:
                return f"did not answer within {limit_s:g} s ({self.table}.start_timeout_s)"
            await asyncio.sleep(LOOK_S)
        return failure_reason.how_it_ended(code)

    async def _answers(self, port: int) -> bool:
        path = self.settings.health
        with suppress(OSError, httpx.HTTPError):
            if path is None:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as http:
                return (await http.get(f"http://127.0.0.1:{port}{path}")).is_success
        return False


def environments_of(settings: Settings, spec: RolloutSpec, most: int) -> dict[str, Environment]:
    """The environments by name. `most`: maximum number of concurrent episodes on this node. Raises OSError."""
    sampling, rank = [node for node, share in spec.shares.items() if share], spec.identity.node_rank
    folder = spec.claims if len(sampling) > 1 else None

    def quota(number: int, sessions: int | None) -> SessionQuota | None:
        if sessions is None:
            return None
        weights = {node: settings.rank_weights[node] for node in sampling}
        return SessionQuota(sessions, weights, rank, most=most, folder=folder, number=number)

    named = sorted(settings.all_environments.items())
    return {
        name: Environment(environment, spec.log_dir, name, quota(number, environment.sessions))
        for number, (name, environment) in enumerate(named)
    }


def free_port() -> int:
    """An unused loopback port. If another process takes it first, the server ends and is restarted."""
    with on_loopback() as listener:
        return port_of(listener)


class SessionQuota:
    """This node's part of `total` sessions of environment `number`. `folder=None`: it has all. `most`: how many it can use."""

    def __init__(
        self,
        total: int,
        weights: Mapping[int, float],
        rank: int,
        *,
        most: int,
        folder: Path | None = None,
        number: int = 0,
    ) -> None:
        """`weights`: the weight of each node that samples. Raises OSError."""
        self.total, self.weights, self.rank, self.most = total, weights, rank, most
        self.folder, self.number = folder, number
        if folder is not None:
            files.make_dirs(folder)
        self.begin_round(0)

    @property
    def pause_s(self) -> float:
        """The time to wait until the next `exchange`."""
        return CLAIMS_LOOK_S * max(1.0, len(self.weights) / FULL_RATE)

    def begin_round(self, number: int) -> None:
        """Begin round `number`, in which nodes may need more sessions again; no node uses a session of the previous round any more."""
        self.round = number
        self._needs: dict[int, float] = dict.fromkeys(self.weights, math.inf)
        self._divide()

    def exchange(self, need: int) -> None:
        """Publish that this node needs at most `need` sessions at a time, if the others can use the rest, and read their needs.

        May block on the shared directory. If it cannot be read or written, the next call tries again.
        """
        assert self.folder is not None
        number, needs, own = self.round, self._needs, self.rank
        with suppress(OSError):
            for published in SESSIONS.parse_all(os.listdir(self.folder)):
                if (published.environment, published.round) == (
                    self.number,
                    number,
                ) and published.rank in needs:
                    needs[published.rank] = min(needs[published.rank], published.need)
            # An earlier start of this program may have published 0 and then lost its work.
            needs[own] = max(1, needs[own])
            # Publish only if the others could use the sessions that this node does not need.
            if need < needs[own] and (not need or need < divided(self.total, needs, self.weights)[own]):
                name = SESSIONS.build(own, self.number, number, need)
                files.create_exclusive(self.folder / name, b"", durable=False)
                needs[own] = need
        self._divide()

    def _divide(self) -> None:
        alone = self.folder is None
        self.mine = self.total if alone else divided(self.total, self._needs, self.weights)[self.rank]


def divided(total: int, needs: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, int]:
    """Give out the sessions one by one, each to the node with the greatest weight per session among those that need more."""
    parts = dict.fromkeys(sorted(needs), 0)
    for _ in range(total):
        hungry: Collection[int] = [rank for rank, part in parts.items() if part < needs[rank]]
        if not hungry:
            break
        parts[max(hungry, key=lambda rank: weights[rank] / parts[rank] if parts[rank] else math.inf)] += 1
    return parts
