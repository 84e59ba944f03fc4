"""An environment of an agent's episodes: servers of the user's own command, on each node for as long as its rollout lasts.

The command has an interpreter and packages of its own; nothing of it is imported here. A server that ends is started again on another
port: its episodes are begun again, and no others.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from fsbarrier.errors import ProgramFailed
from fsbarrier.processes import last_words
from fsbarrier.processes.addresses import owners_of_port
from fsbarrier.processes.fork_server import Job
from fsbarrier.processes.listening import on_loopback
from fsbarrier.processes.rendezvous import port_of
from fsbarrier.processes.secret_variables import without_variables
from fsbarrier.processes.supervisor import Child
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.rollout_spec import RolloutSpec
from fsbarrier.rollouts.session_quota import SessionQuota
from fsbarrier.settings.sections import EnvironmentSettings, Settings
from fsbarrier.store.trusted_folder import user_name

# Pause between two looks at a server, and how long an answer to a look may take.
LOOK_S, ANSWER_S = 0.1, 5.0
# How long a server may take to end after SIGTERM.
GRACE_S = 2.0


# By identity: two sessions on one server are different ones.
@dataclass(eq=False)
class Session:
    """An episode's place on a server. `lost`: that the server ended, if it did so before the episode."""

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
        """`quota`: of its sessions, if they are limited."""
        self.settings, self.quota = settings, quota
        # In messages, and as in settings.
        self.called = f"environment {name}".strip()
        self.table = f"environments.{name}" if name else "environment"
        first = f"environment_{name}" if name else "environment"
        names = [first, *(f"{first}-{n}" for n in range(1, settings.replicas))]
        self.servers = [Server(log_dir / f"{one}.log") for one in names]
        # What happened, as lines for the journal.
        self.events: list[JsonObject] = []
        # Episodes that this node is to run and that have not ended; whether there will be no others in this round.
        self.episodes, self.all_known = 0, False
        self.waiting = 0
        # Called when what is displayed has changed.
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
        """Returns when nothing of the servers is left."""
        for one in self._keeping:
            one.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self.servers.clear()
        if kind is None and self.quota is not None and self.quota.folder is not None:
            await asyncio.to_thread(self.quota.exchange, 0)

    @property
    def used(self) -> int:
        """Sessions of this node."""
        return sum(len(server.sessions) for server in self.servers)

    @property
    def state(self) -> JsonObject:
        """For display, as that of a frozen engine. `most`: how many sessions this node may use now; None: any number."""
        return {
            "states": ["up" if server.url else "starting" for server in self.servers],
            "sessions": self.used,
            "most": None if self.quota is None else self.quota.mine,
            "waiting": self.waiting,
            "restarts": self.settings.restarts - max(0, self._restarts_left),
            "why": self._why,
        }

    def begin_round(self, number: int) -> None:
        """Round `number` of a phase begins once everybody is done with the one before."""
        self.all_known = False
        if self.quota is not None:
            self.quota.begin_round(number)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A place on the server with the fewest sessions, once there is one. Raises ProgramFailed if there will be none."""
        self.waiting += 1
        try:
            while not (free := self._free()):
                if self._failed:
                    raise ProgramFailed(self._failed)
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.waiting -= 1
        server = min(free, key=lambda one: len(one.sessions))
        session = Session(server.url)
        server.sessions.add(session)
        self.on_change()
        try:
            yield session
        finally:
            server.sessions.discard(session)
            self._has_changed()

    def _free(self) -> list[Server]:
        """The servers that may have another session now."""
        if self.quota is not None and self.used >= self.quota.mine:
            return []
        most = self.settings.sessions_per_server or sys.maxsize
        return [one for one in self.servers if one.url and len(one.sessions) < most]

    def _has_changed(self) -> None:
        self._changed.set()
        self.on_change()

    async def _share(self, quota: SessionQuota) -> None:
        """Agree with the other nodes on the sessions."""
        while True:
            need = max(1, min(quota.most, self.episodes)) if self.all_known else quota.most
            held_back = self.waiting and self.used >= quota.mine
            await asyncio.to_thread(quota.exchange, need)
            if held_back:
                # Waiting for other nodes counts as progress.
                self._has_changed()
            await asyncio.sleep(quota.pause_s)

    async def _keep(self, server: Server) -> None:
        """Run a server, again and again."""
        while not self._failed:
            try:
                how, lines = await self._serve(server)
            except ProgramFailed as error:
                # It cannot be started at all.
                self._failed = str(error)
                break
            self.events.append(
                {"event": "environment_ended", "environment": self.table, "why": how, "log": lines}
            )
            print(f"the {self.called} {how} ({server.log_file})", file=sys.stderr)
            if not self._restarts_left:
                # One line, because the last one of a program's output is its message.
                self._failed = ": ".join((f"the {self.called} {how} ({server.log_file})", *lines[-1:]))
            self._restarts_left, self._why = self._restarts_left - 1, how
        self._has_changed()

    async def _serve(self, server: Server) -> tuple[str, list[str]]:
        """Run a server to its end; returns how it ended, and its last lines."""
        port = free_port()
        # A path to our package must not lead another interpreter there.
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
        """Say when it is ready; returns how it ended."""
        begin, limit_s = time.monotonic(), self.settings.start_timeout_s
        while (code := child.poll()) is None:
            if not server.url:
                answers = await self._answers(port)
                # Its command line tells everybody the port, so that another user may be the one who answers.
                if others := owners_of_port(port) - {0, os.geteuid()}:
                    return f"did not get its port: {user_name(min(others))} listens on it"
                if answers:
                    server.url = f"http://127.0.0.1:{port}"
                    self._has_changed()
            if not server.url and time.monotonic() - begin > limit_s:
                return f"did not answer within {limit_s:g} s ({self.table}.start_timeout_s)"
            await asyncio.sleep(LOOK_S)
        return last_words.how_it_ended(code)

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
    """The environments by name. `most`: how many episodes there may be here at a time. Raises OSError."""
    sampling, rank = [node for node, share in spec.shares.items() if share], spec.identity.node_rank
    folder = spec.claims if len(sampling) > 1 else None

    def quota(number: int, sessions: int | None) -> SessionQuota | None:
        if sessions is None:
            return None
        weights = {node: settings.rank_weights[node] for node in sampling}
        return SessionQuota(sessions, weights, rank, most=most, folder=folder, number=number)

    named = sorted(settings.all_environments.items())
    return {
        name: Environment(one, spec.log_dir, name, quota(number, one.sessions))
        for number, (name, one) in enumerate(named)
    }


def free_port() -> int:
    """A port of loopback that nobody uses now. If somebody is faster, the server ends, and is started again."""
    with on_loopback() as listener:
        return port_of(listener)
