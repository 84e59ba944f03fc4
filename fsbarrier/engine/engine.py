"""One replica of what serves the policy on this node, from the daemon's side: brought to the right weights, released, stopped.

    engine = Engine(settings.engine, log_file=..., work_dir=...)
    info = engine.ensure(folder, policy_version, cancel=event)     # it serves exactly these weights now
    engine.release(cancel=event)                                   # the trainer has the accelerator's memory
    engine.stop()

replicas.py holds all of a node's; server.py is the vLLM process; external.py a server of the user's own.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier import files
from fsbarrier.engine import command, external
from fsbarrier.engine.model import ModelFolder, inspect
from fsbarrier.engine.own_head import with_own_head
from fsbarrier.engine.placement import ANYWHERE, ReplicaPlacement
from fsbarrier.engine.server import Server
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.host import accelerators
from fsbarrier.host.own_folder import SHORT_PLACE, own_folder
from fsbarrier.settings.sections import EngineSettings
from fsbarrier.supervision.secret_variables import without_secrets

# As many bytes as the path of a socket may have, by unix(7), less the end of the text.
SOCKET_PATH_BYTES = 107
# vLLM names the sockets between its processes by a UUID.
SOCKET_NAME_BYTES = 36

# What became of a release, for the journal: "action" (keep, sleep, stop, none, external), "reason", and where something
# was waited for, "seconds" and "seen": how it is known that the memory is free.
Release = dict[str, str | float]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What serves the policy now. `seconds`: what `ensure` took. `note`: what people should know.

    `action`: started, reloaded (new weights in place), kept (it served these weights already) or external (debug mode).
    """

    url: str
    api_key: str = field(repr=False)
    model: str
    policy_version: int
    pid: int
    seconds: float
    action: str
    note: str = ""

    @property
    def started(self) -> bool:
        """Whether a server was started for it."""
        return self.action == "started"


class Engine:
    """One vLLM server at most. Any thread may call; one call works at a time, and `stop` ends the one under way.

    `external`: the server is the user's, to be used and not managed. `log_file` gets all that our server says; `work_dir` is private
    and on this node. `threads`: at most, for computing on a CPU; 0: all that this process may use but one; the environment's
    OMP_NUM_THREADS wins over both. It may be changed before a start.

    Address and key stay the same when the server is started again, so that programs which use it find it there.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        external: bool = False,
        log_file: Path,
        work_dir: Path,
        python: str = sys.executable,
        threads: int = 0,
        placement: ReplicaPlacement = ANYWHERE,
        secrets_named: Collection[str | None] = (),
    ) -> None:
        self.settings, self.external = settings, external
        self.log_file, self.work_dir, self.python, self.threads = log_file, work_dir, python, threads
        # The server needs none of the user's keys.
        self._environ = placement.environment(without_secrets(os.environ, secrets_named))
        # The next `ensure` starts the server again even if it answers.
        self.distrusted = False
        self._server: Server | None = None
        self._api_key = secrets.token_urlsafe(24)
        self._socket = work_dir / f"{log_file.stem}.sock"
        self._short_folder = ExitStack()
        self._lock = threading.RLock()
        self._stopping = threading.Event()

    def ensure(self, weights: Path, policy_version: int, *, cancel: threading.Event) -> EngineInfo:
        """Serve the model folder `weights` as `policy_version`: start, reload in place, restart, or leave as it is.

        Returns once the server answers with these weights, `engine.start_timeout_s` at most. Raises ProgramFailed with the last lines
        of the server's log (a damaged folder, a server that does not come up), also when `cancel` is set.
        """
        begin = time.monotonic()
        with self._lock:
            self._stopping.clear()
            if self.external:
                client, pid, action = external.connect(self.settings), 0, "external"
                name, note = external.what_it_serves(client, weights, policy_version, cancel)
            else:
                deadline = begin + self.settings.start_timeout_s
                server, action, note = self._bring_to(inspect(weights), policy_version, deadline, cancel)
                client, pid, name = server.client, server.child.pid, command.SERVED_NAME
            seconds = time.monotonic() - begin
            return EngineInfo(client.url, client.api_key, name, policy_version, pid, seconds, action, note)

    def release(self, *, cancel: threading.Event) -> Release:
        """Give the accelerator's memory to the trainer, as `engine.release` says, and see that it is free.

        Raises ProgramFailed where it does not come free even after a stop.
        """
        with self._lock:
            self._stopping.clear()
            server, wish = self._server, self.settings.release
            if self.external:
                return {"action": "external", "reason": "debug mode: this server is not ours"}
            if server is None:
                return {"action": "none", "reason": "no server is running"}
            if wish == "keep":
                return {"action": "keep", "reason": "engine.release=keep"}
            if wish == "auto" and not server.accelerators_before:
                return {"action": "keep", "reason": "no accelerator: a CPU's memory is not in the way"}
            if wish == "stop":
                return self._stop_and_verify(server, "engine.release=stop", cancel)
            if not server.can_sleep:
                return self._stop_and_verify(server, "this server cannot sleep", cancel)
            begin = time.monotonic()
            outcome = server.fall_asleep(cancel)
            if isinstance(outcome, str):
                return self._stop_and_verify(server, outcome, cancel)
            return _released("sleep", "", begin, outcome)

    def stop(self) -> None:
        """End the server and everything that belongs to it; returns when nothing is left. A call under way fails."""
        # Set before the lock is taken: the call under way holds the lock, and gives up when it sees this.
        self._stopping.set()
        with self._lock:
            self._stop_server()
            if self._socket.parent != self.work_dir:
                self._short_folder.close()
                self._socket = self.work_dir / self._socket.name

    def how_it_ended(self) -> str:
        """How a server of ours has ended by itself, "" while it lives, or where there is none."""
        server = self._server
        return server.how_it_ended() if server is not None and server.child.poll() is not None else ""

    def revive(self, cancel: threading.Event) -> None:
        """Start a server that has ended by itself with what it served. Raises ProgramFailed where it does not come up; StoreError and
        OSError where its log or its folder cannot be written."""
        with self._lock:
            server = self._server
            if server is None or server.serving is None or not self.how_it_ended():
                return
            folder, policy_version = server.serving
            self._stop_server()
            deadline = time.monotonic() + self.settings.start_timeout_s
            try:
                self._start(inspect(folder), policy_version, deadline, cancel)
            except (ProgramFailed, StoreError, OSError):
                # Keep it, so that the next `ensure` says that the server was gone, and not that there never was one.
                self._server = server
                raise

    def alive(self) -> bool:
        """Whether the server answers."""
        if self.external:
            return external.connect(self.settings).healthy()
        server = self._server
        return server is not None and server.child.poll() is None and server.client.healthy()

    def _bring_to(
        self, model: ModelFolder, policy_version: int, deadline: float, cancel: threading.Event
    ) -> tuple[Server, str, str]:
        """A server of ours that serves `model`, with the action that was needed and a note."""
        server, note = self._server, ""
        if server is not None:
            if self.distrusted:
                reason = "its log-probabilities were not the trainer's"
            elif not server.healthy(cancel):
                reason = f"the server was gone ({server.how_it_ended()})"
            elif server.serving == (model.path, policy_version) and not server.asleep:
                return server, "kept", ""
            else:
                reason = server.reload(self._as_served(model, policy_version), cancel)
                if not reason:
                    server.serving = (model.path, policy_version)
                    return server, "reloaded", ""
            note = f"restarted: {reason}"
            self._stop_server()
        return self._start(model, policy_version, deadline, cancel), "started", note

    def _as_served(self, model: ModelFolder, policy_version: int) -> ModelFolder:
        return with_own_head(model, policy_version, self.work_dir / "served")

    def _start(
        self, model: ModelFolder, policy_version: int, deadline: float, cancel: threading.Event
    ) -> Server:
        """Start a server and wait until it answers."""
        files.make_dirs(self.work_dir)
        before = accelerators.detect(self._environ)
        served = self._as_served(model, policy_version)
        self._server = server = Server.launch(
            self._plan(served, before),
            self.log_file,
            self.work_dir,
            api_key=self._api_key,
            environ=self._environ,
            stopping=self._stopping,
            accelerators_before=before,
        )
        problem = server.wait_until_it_answers(deadline, cancel)
        if problem:
            message = server.failure_text(problem)
            self._stop_server()
            raise ProgramFailed(message)
        server.serving = (model.path, policy_version)
        self.distrusted = False
        return server

    def _plan(self, model: ModelFolder, devices: list[accelerators.Accelerator]) -> command.ServerPlan:
        # vLLM's sleep mode is CUDA's. A model that is still tied is restarted in any case, so it need not sleep.
        nvidia = any(device.kind == "nvidia" for device in devices)
        return command.ServerPlan(
            python=self.python,
            model=model,
            settings=self.settings,
            socket=str(self._short_socket()),
            seed=secrets.randbits(31),
            accelerated=bool(devices),
            sleeps=nvidia and self.settings.release in ("auto", "sleep") and not model.tied,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            # One core is left for the API server.
            threads=self.threads or max(1, len(os.sched_getaffinity(0)) - 1),
        )

    def _short_socket(self) -> Path:
        """Where the server listens: in the work folder, or where a temporary directory's path is too long, in a folder of its own."""
        longest_name = max(SOCKET_NAME_BYTES, len(os.fsencode(self._socket.name)))
        if len(os.fsencode(self._socket.parent)) + 1 + longest_name > SOCKET_PATH_BYTES:
            folder = self._short_folder.enter_context(own_folder(SHORT_PLACE, "s"))
            self._socket = folder / self._socket.name
        return self._socket

    def _stop_and_verify(self, server: Server, reason: str, cancel: threading.Event) -> Release:
        begin = time.monotonic()
        # Asked before the stop: afterwards nobody can say whose the memory was.
        pids = server.child.pids()
        self._stop_server()
        outcome = accelerators.wait_released(
            pids, before=server.accelerators_before, environ=self._environ, cancel=cancel
        )
        if isinstance(outcome, accelerators.StillHeld):
            raise ProgramFailed(f"vLLM is stopped ({reason}), but {outcome}")
        return _released("stop", reason, begin, outcome)

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()


def _released(action: str, reason: str, begin: float, outcome: accelerators.Released) -> Release:
    return {"action": action, "reason": reason, "seconds": time.monotonic() - begin, "seen": outcome.how}
