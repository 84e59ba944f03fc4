"""Manages one engine of this node for the daemon: gives it the right weights, frees its accelerators, and stops it.

    engine = Engine(settings.engine, log_file=..., work_dir=...)
    info = engine.ensure(folder, policy_version, cancel=event)     # it serves exactly these weights now
    engine.release(cancel=event)                                   # the trainer has the accelerator's memory
    engine.stop()

replicas.py manages all engines of a node; server.py is the vLLM process; client.py also checks a user's own server.

An engine (`Engine`) lives as long as the daemon; the vLLM process (`Server`) that it runs comes and goes. `state` is
  off        no process: before the first `ensure`, after `stop`, after a failed start, and after a release that had to stop it
  starting   the process serves no version yet; also during a reload, when old and new weights may be mixed
  up         it serves exactly one model folder as one policy version
  asleep     the process runs, and has freed its accelerator memory
  down       the process ended by itself; the next `ensure` starts another
`ensure` does the least that is sufficient: nothing, wake, reload in place, or restart. Reloaded and started servers must compute what the
trainer computed with these weights (`known`). A server that differs after a reload is restarted, and this engine reloads nothing any more.
If a server fails or differs at its start, it is stopped, and ProgramFailed carries the end of its log; the engine itself stays usable.
`release` prefers sleep. If the memory is not freed in that way, it stops the server, and checks again.

`ensure` and `release` are called in the job's thread (through replicas.py, in one thread each if there are several engines), and for a
frozen engine also by its gateway after a death. They hold the lock until they return. Their `cancel` aborts one call; `stop`, which any
thread may call, aborts the current call before it takes the lock. `state`, `ended` and `how_it_ended` take no lock, since the daemon's
loop reads them and must not wait for a start.

The file is longer than others, because every method changes the one state above.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.context import Span
from fsbarrier.engine import accelerators, answer_format, command
from fsbarrier.engine.answer_format import NO_CHOICE, Parsers
from fsbarrier.engine.client import connect, what_it_serves
from fsbarrier.engine.model import ModelFolder, inspect
from fsbarrier.engine.own_head import with_own_head
from fsbarrier.engine.placement import ANYWHERE, Placement, placed
from fsbarrier.engine.server import LOOKS, Server
from fsbarrier.engine.span import HeadListener, Link, Meeting, meet
from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.limits import memory_bytes
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.settings.secrecy import without_secrets
from fsbarrier.settings.sections import EngineSettings, FrozenEngineSettings, ServerSettings
from fsbarrier.store import files
from fsbarrier.store.local_folders import SHORT_PLACE, scratch_dir

# Maximum length of a socket path (unix(7)), without the terminating zero.
SOCKET_PATH_BYTES = 107
# vLLM names the sockets between its processes with a UUID.
SOCKET_NAME_BYTES = 36

# The result of a release, for the journal: "action" (keep, sleep, stop, none, external), "reason", and after a wait
# "seconds" and "seen", the evidence that the memory is free.
Release = dict[str, str | float]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How to reach the server of the current weights, and what `ensure` did. `seconds`: duration of `ensure`. `note`: for the user.

    `action`: started, reloaded (new weights in place), woken, kept (it served these weights already), external (debug mode), or part (this
    node runs a headless part; the engine's head is on another node).
    """

    url: str
    api_key: str = field(repr=False)
    model: str
    policy_version: int
    pid: int
    seconds: float
    action: str
    note: str = ""


class Engine:
    """At most one vLLM server. Thread-safe; calls are serialized, and `stop` aborts the current one.

    `external`: a user's server, which is used but not managed. `log_file` receives our server's output; `work_dir` is a private local
    folder. `threads`: maximum compute threads on a CPU; 0: all available cores but one; OMP_NUM_THREADS takes precedence. It may be changed
    before a start.

    Address and key do not change when the server is restarted, so that clients can reconnect. `served_name`, `api_key`: set for a frozen
    engine, because its replicas share them.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        external: bool = False,
        log_file: Path,
        work_dir: Path,
        python: str = sys.executable,
        threads: int = 0,
        placement: Placement = ANYWHERE,
        secrets_named: Collection[str | None] = (),
        served_name: str = command.SERVED_NAME,
        api_key: str = "",
        head_listener: HeadListener | None = None,
        parsers: Parsers = NO_CHOICE,
        adapter_rank: int = 0,
    ) -> None:
        self._parsers = parsers
        # The rank of the adapters that are served beside the model (lora.serve=adapter); 0: none. And those of the newest version.
        self._adapter_rank = adapter_rank
        self._adapter: command.Adapter | None = None
        self.settings, self.external = settings, external
        self._served_name, self._frozen = served_name, isinstance(settings, FrozenEngineSettings)
        self.log_file, self.work_dir, self.python, self.threads = log_file, work_dir, python, threads
        # The server does not need any of the user's secrets.
        self._environ = placed(without_secrets(os.environ, secrets_named), placement)
        self._server: Server | None = None
        self._api_key = api_key or secrets.token_urlsafe(24)
        self._socket = work_dir / f"{log_file.stem}.sock"
        self._short_folder = ExitStack()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        # The listener for the other nodes of this engine, and those nodes; None: the engine runs on this node alone.
        self._head_listener = head_listener
        self._span: Span | None = None
        # Whether the models of this run can be reloaded in place; None: no reload has been compared with the trainer yet.
        self._reloads: bool | None = None

    def ensure(
        self,
        weights: Path,
        policy_version: int,
        *,
        cancel: threading.Event,
        in_flight: bool = False,
        span: Span | None = None,
        known: KnownLogprobs | None = None,
        adapter: command.Adapter | None = None,
    ) -> EngineInfo:
        """Serve the model folder `weights` as `policy_version`: start, reload in place, restart, or do nothing. `in_flight`: running
        requests go on; if the server would have to be restarted for that, it keeps its weights. `span`: the nodes that share the engine;
        each of them calls this with the same weights. `known`: log-probabilities that our server must reproduce; None: no comparison.
        `adapter`: the version's adapters, which are served beside the model in `weights`.

        Returns when the server serves these weights, within `engine.start_timeout_s`. Raises ProgramFailed with the end of the server's log
        (damaged folder, failed start), also when `cancel` is set.
        """
        begin = time.monotonic()
        with self._lock:
            self._stopping.clear()
            if span != self._span:
                self._stop_server()
                self._span = span
            self._adapter = adapter
            if self.external:
                assert isinstance(self.settings, EngineSettings)
                client, pid, action = connect(self.settings), 0, "external"
                name, note = what_it_serves(client, weights, policy_version, cancel)
            else:
                deadline = begin + self.settings.start_timeout_s
                model = inspect(weights)
                if span is not None and span.place:
                    server, action, note = self._follow(model, span, deadline, cancel), "part", ""
                else:
                    server, action, note = self._bring_to(
                        model, policy_version, deadline, cancel, in_flight, known
                    )
                    if span is not None and server.peers is not None:
                        server.peers.send_serving(span.turn)
                client, pid = server.client, server.child.pid
                name = self._served_name if adapter is None else adapter.name
            seconds = time.monotonic() - begin
            return EngineInfo(client.url, client.api_key, name, policy_version, pid, seconds, action, note)

    def release(self, *, cancel: threading.Event) -> Release:
        """Free the accelerator's memory for the trainer, and verify it: the server sleeps if it can, otherwise it is stopped.

        Raises ProgramFailed if the memory is not freed even after a stop.
        """
        with self._lock:
            self._stopping.clear()
            server = self._server
            if self.external:
                return {"action": "external", "reason": "external server (debug mode or engine.url)"}
            if server is None:
                return {"action": "none", "reason": "no server is running"}
            if not server.accelerators_before:
                return {"action": "keep", "reason": "no accelerator, so no memory needs to be freed"}
            if not server.can_sleep:
                return self._stop_and_verify(server, "this server cannot sleep", cancel)
            begin = time.monotonic()
            # A frozen model's weights stay in the host's memory. A policy's are replaced from disk anyway.
            outcome = server.fall_asleep(cancel, keep_weights=self._frozen or self._adapter_rank > 0)
            if isinstance(outcome, str):
                return self._stop_and_verify(server, outcome, cancel)
            return _released("sleep", "", begin, outcome)

    def stop(self) -> None:
        """Stop the server and its processes; returns when all are gone. A call in progress fails."""
        # Set before acquiring the lock: the current call holds the lock, and aborts when it sees this.
        self._stopping.set()
        with self._lock:
            self._stop_server()
            if self._socket.parent != self.work_dir:
                self._short_folder.close()
                self._socket = self.work_dir / self._socket.name

    @property
    def ended(self) -> bool:
        """Whether our server ended by itself. The next `ensure` starts another one."""
        return self._server is not None and self._server.child.poll() is not None

    @property
    def state(self) -> str:
        """The state of our server: off, starting, up, asleep, or down (it ended by itself)."""
        server = self._server
        if server is None or self.ended:
            return "off" if server is None else "down"
        return "asleep" if server.asleep else "up" if server.serving else "starting"

    def how_it_ended(self) -> str:
        """How our server ended by itself, in several lines: how and why, the log's path, the end of the log. "" if it did not."""
        server = self._server
        return server.how_it_ended() if server is not None and self.ended else ""

    def _bring_to(
        self,
        model: ModelFolder,
        policy_version: int,
        deadline: float,
        cancel: threading.Event,
        in_flight: bool,
        known: KnownLogprobs | None,
    ) -> tuple[Server, str, str]:
        """Make our server serve `model`; returns it, the action taken, and a note."""
        server, note = self._server, ""
        if server is not None:
            if not server.healthy(cancel):
                reason = server.how_it_ended().splitlines()[0]
            elif server.serving == (model.path, policy_version):
                if not server.asleep:
                    return server, "kept", ""
                reason = server.wake(cancel)
                if not reason:
                    return server, "woken", ""
            else:
                served = self._as_served(model, policy_version)
                reason = server.not_loadable(served, known, reloads=self._reloads, in_flight=in_flight)
                if reason and in_flight:
                    return server, "kept", f"keeps its weights: {reason}"
                reason = reason or self._reload(server, served, policy_version, cancel, in_flight, known)
                if not reason:
                    server.serving = (model.path, policy_version)
                    return server, "reloaded", ""
            note = f"restarted: {reason}"
            self._stop_server()
        return self._start(model, policy_version, deadline, cancel, known), "started", note

    def _reload(
        self,
        server: Server,
        served: ModelFolder,
        policy_version: int,
        cancel: threading.Event,
        in_flight: bool,
        known: KnownLogprobs | None,
    ) -> str:
        """Reload in place, and compare; returns "" or the reason for a restart. After one wrong reload this engine reloads no more."""
        if self._adapter_rank:
            reason = server.serve_adapter(self._adapter, policy_version, cancel)
        else:
            reason = server.reload(served, policy_version, cancel, in_flight=in_flight)
        if reason or known is None:
            return reason
        wrong = server.differs(known, policy_version, cancel)
        # If the server died during the comparison, we do not know whether reloads work.
        if not wrong or server.child.poll() is None:
            self._reloads = not wrong
        return wrong

    def _as_served(self, model: ModelFolder, policy_version: int) -> ModelFolder:
        # The copy with its own head is local, and the other nodes of an engine could not read it.
        if self._frozen or self._adapter_rank or self._span is not None:
            return model
        return with_own_head(model, policy_version, self.work_dir / "served")

    def _start(
        self,
        model: ModelFolder,
        policy_version: int,
        deadline: float,
        cancel: threading.Event,
        known: KnownLogprobs | None,
    ) -> Server:
        """Start a server, wait until it is ready, and compare it with the trainer.

        Raises ProgramFailed. The server is then stopped, unless the comparison was cancelled: then it stays, and serves nothing yet.
        """
        links, meeting = list[Link](), None
        if self._span is not None and self._head_listener is not None:
            links, meeting = self._head_listener.gather(self._span, deadline, self._called_off(cancel))
        server = self._launch(self._as_served(model, policy_version), links, meeting)
        label = None if self._frozen else policy_version
        problem = server.wait_until_it_answers(deadline, cancel, label)
        if self._adapter is not None:
            problem = problem or server.serve_adapter(self._adapter, policy_version, cancel)
        problem = problem or server.differs(known, policy_version, cancel)
        if problem:
            message = server.failure_text(problem)
            self._stop_server()
            raise ProgramFailed(message)
        server.serving = (model.path, policy_version)
        return server

    def _follow(self, model: ModelFolder, span: Span, deadline: float, cancel: threading.Event) -> Server:
        """Start this node's headless part if needed, and wait until the head, on another node, serves this turn's weights.

        The part ends with its head, and is then started again to join the new one. Raises ProgramFailed.
        """
        called_off, pauses = self._called_off(cancel), iter(LOOKS)
        if self.ended:
            self._stop_server()
        while True:
            server = self._server
            if server is None or server.child.poll() is not None:
                if server is not None and server.peers is not None and not server.peers.broken:
                    self._server = None
                    raise ProgramFailed(server.how_it_ended())
                link, meeting = meet(span, deadline, called_off)
                server = self._launch(model, [link], meeting)
            if server.peers is not None and server.peers.serving == [*span.turn]:
                return server
            if called_off() or time.monotonic() >= deadline:
                message = server.failure_text("does not serve in time (engine.start_timeout_s)")
                self._stop_server()
                raise ProgramFailed(message)
            cancel.wait(next(pauses))

    def _called_off(self, cancel: threading.Event) -> Callable[[], bool]:
        return lambda: cancel.is_set() or self._stopping.is_set()

    def _launch(self, served: ModelFolder, links: Sequence[Link], meeting: Meeting | None) -> Server:
        files.make_dirs(self.work_dir)
        before = accelerators.detect(self._environ)
        plan = self._plan(served, before)
        if meeting is not None:
            plan = replace(plan, meeting=meeting, seed=meeting.seed, sleeps=False)
        self._server = server = Server.launch(
            plan,
            self.log_file,
            self.work_dir,
            api_key=self._api_key,
            environ=self._environ,
            stopping=self._stopping,
            accelerators_before=before,
            links=links,
        )
        return server

    def _plan(self, model: ModelFolder, devices: list[accelerators.Accelerator]) -> command.ServerPlan:
        # vLLM's sleep mode needs CUDA. A policy with a tied head is restarted anyway, so it need not sleep.
        nvidia = any(device.kind == "nvidia" for device in devices)
        return command.ServerPlan(
            python=self.python,
            model=model,
            settings=self.settings,
            socket=str(self._short_socket()),
            seed=secrets.randbits(31),
            accelerated=bool(devices),
            sleeps=nvidia and (self._frozen or self._adapter_rank > 0 or not model.tied),
            adapter_rank=self._adapter_rank,
            memory_bytes=memory_bytes()[0],
            # Leave one core for the API server.
            threads=self.threads or max(1, len(os.sched_getaffinity(0)) - 1),
            served_name=self._served_name,
            parsers=NO_CHOICE if self._frozen else answer_format.served_by(model.path, self._parsers),
        )

    def _short_socket(self) -> Path:
        """The socket path: in the work folder, or in a separate folder if that path is too long."""
        longest_name = max(SOCKET_NAME_BYTES, len(os.fsencode(self._socket.name)))
        if len(os.fsencode(self._socket.parent)) + 1 + longest_name > SOCKET_PATH_BYTES:
            folder = self._short_folder.enter_context(scratch_dir(SHORT_PLACE, "s"))
            self._socket = folder / self._socket.name
        return self._socket

    def _stop_and_verify(self, server: Server, reason: str, cancel: threading.Event) -> Release:
        begin = time.monotonic()
        # Query the pids before the stop, because afterwards memory cannot be attributed to processes.
        pids = server.child.pids()
        self._stop_server()
        outcome = accelerators.wait_released(
            pids, before=server.accelerators_before, environ=self._environ, cancel=cancel
        )
        if isinstance(outcome, accelerators.StillHeld):
            raise ProgramFailed(f"vLLM was stopped ({reason}), but {outcome}")
        return _released("stop", reason, begin, outcome)

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()


def _released(action: str, reason: str, begin: float, outcome: accelerators.Released) -> Release:
    return {"action": action, "reason": reason, "seconds": time.monotonic() - begin, "seen": outcome.how}
