"""The local vLLM server of a node, from the daemon's side: started, given new weights in place, put to sleep, stopped.

    engine = Engine(settings.engine, log_file=..., work_dir=...)
    info = engine.ensure(folder, policy_version, cancel=event)     # it serves exactly these weights now
    engine.release(cancel=event)                                   # the trainer has the accelerator's memory
    engine.stop()

New weights go into the running server where that is known to be right: same architecture and shapes, and an output head of its
own. vLLM keeps the *old* head of a model with tied embeddings and says nothing, so such a model is restarted instead.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.engine import command as engine_command
from fsbarrier.engine import log as engine_log
from fsbarrier.engine.client import CalledOff, EngineClient, Refused, Unreachable, normal_url, reserved_port
from fsbarrier.engine.model import ModelFolder, inspect
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.machine import accelerators
from fsbarrier.retry import Backoff
from fsbarrier.settings.sections import EngineSettings
from fsbarrier.supervision.supervisor import Child

DEFAULT_URL = "http://127.0.0.1:8000"  # vLLM's own default, for debug mode
PORT_TRIES = 3
# Between two looks at a server that starts.
PAUSES = Backoff(0.05, 0.5)
STOP_GRACE_S = 5.0  # vLLM ends within 2 s of SIGTERM
IDLE_S = 30.0  # how long requests of a killed rollout may take to leave the server before a reload
ASLEEP_BYTES = 2 << 30  # a device: a sleeping server keeps its context and its graphs
LOG_LINES = 20
TAKEN = "address already in use"
NOT_LOADED = "Following weights were not loaded from checkpoint"  # vLLM's warning, with an answer of 200


@dataclass(frozen=True)
class EngineInfo:
    """What serves the policy now. `seconds`: what `ensure` took. `started`: a server was started for it.

    `action`: started, reloaded, kept (it served these weights already) or external (debug mode). `note`: what people should know.
    """

    url: str
    api_key: str = field(repr=False)
    model: str
    policy_version: int
    pid: int
    started: bool
    seconds: float
    action: str
    note: str = ""


@dataclass
class _Server:
    """A server of ours. `loaded` may be fewer weights than it was started with after a failed reload: None then."""

    child: Child
    client: EngineClient
    first: ModelFolder
    loaded: tuple[Path, int] | None
    before: list[accelerators.Accelerator]
    sleeps: bool
    asleep: bool = False


class Engine:
    """One vLLM server at most. Any thread may call; one call works at a time, and `stop` ends the one under way.

    `external`: the server is the user's, to be used and not managed. `log_file` gets all that our server says; `work_dir` is private
    and on this node. `threads`: at most, for computing on a CPU; 0: all that this process may use but one; the environment's
    OMP_NUM_THREADS wins over both. It may be changed before a start.
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
    ) -> None:
        self.settings, self.external = settings, external
        self.log_file, self.work_dir, self.python, self.threads = log_file, work_dir, python, threads
        self._server: _Server | None = None
        self._lock = threading.RLock()
        self._stopping = threading.Event()

    # --- what the daemon calls ---

    def ensure(self, weights: Path, policy_version: int, *, cancel: threading.Event) -> EngineInfo:
        """Serve the model folder `weights` as `policy_version`: start, reload in place, restart, or leave as it is.

        Returns once the server answers with these weights, `engine.start_timeout_s` at most. Raises ProgramFailed with the last lines
        of the server's log (a damaged folder, a server that does not come up), also when `cancel` is set.
        """
        begin = time.monotonic()
        with self._lock:
            self._stopping.clear()
            if self.external:
                return self._external(weights, policy_version, begin, cancel)
            model = inspect(weights)
            note = ""
            if self._server is not None:
                if self._healthy(cancel):
                    if self._server.loaded == (model.path, policy_version) and not self._server.asleep:
                        return self._info(begin, "kept")
                    note = self._reload(model, policy_version, cancel)
                    if not note:
                        return self._info(begin, "reloaded")
                    note = f"restarted: {note}"
                else:
                    note = f"restarted: the server was gone ({self._how_it_ended()})"
                self._stop_server()
            self._start(model, policy_version, begin + self.settings.start_timeout_s, cancel)
            return self._info(begin, "started", note)

    def release(self, *, cancel: threading.Event) -> dict[str, Any]:
        """Give the accelerator's memory to the trainer, as `engine.release` says, and see that it is free.

        The result has "action" (keep, sleep, stop, none, external), "reason" and, where something was waited for, "seconds" and "seen":
        how it is known that the memory is free. Raises ProgramFailed where it does not come free even after a stop.
        """
        with self._lock:
            self._stopping.clear()
            if self.external:
                return {"action": "external", "reason": "debug mode: this server is not ours"}
            server, wish = self._server, self.settings.release
            if server is None:
                return {"action": "none", "reason": "no server is running"}
            if wish == "keep" or (wish == "auto" and not server.before):
                reason = (
                    "engine.release=keep"
                    if wish == "keep"
                    else "no accelerator: a CPU's memory is not in the way"
                )
                return {"action": "keep", "reason": reason}
            if wish != "stop" and server.sleeps:
                outcome = self._sleep(server, cancel)
                if isinstance(outcome, dict):
                    return outcome
                reason = outcome
            else:
                reason = "engine.release=stop" if wish == "stop" else "this server cannot sleep"
            return self._stop_and_verify(server, reason, cancel)

    def stop(self) -> None:
        """End the server and everything that belongs to it; returns when nothing is left. A call under way fails."""
        self._stopping.set()
        with self._lock:
            self._stop_server()

    def alive(self) -> bool:
        """Whether the server answers."""
        server = self._server
        if self.external:
            return self._external_client().healthy()
        return server is not None and server.child.poll() is None and server.client.healthy()

    # --- start ---

    def _start(
        self, model: ModelFolder, policy_version: int, deadline: float, cancel: threading.Event
    ) -> None:
        files.make_dirs(self.work_dir)
        before = accelerators.detect()
        for attempt in range(PORT_TRIES):
            with reserved_port(engine_command.HOST) as port:
                self._launch(model, port, before)
                server = self._server
                assert server is not None
                failure = self._await(server, deadline, cancel)
            if failure is None:
                server.loaded = (model.path, policy_version)
                return
            retry = TAKEN in "\n".join(server.child.last_log_lines(100)).lower() and attempt + 1 < PORT_TRIES
            message = self._failed(failure)
            self._stop_server()
            if not retry or cancel.is_set():
                raise ProgramFailed(message)

    def _launch(self, model: ModelFolder, port: int, before: list[accelerators.Accelerator]) -> None:
        nvidia = any(each.kind == "nvidia" for each in before)
        plan = engine_command.Plan(
            python=self.python,
            model=model,
            settings=self.settings,
            port=port,
            seed=secrets.randbits(31),
            accelerated=bool(before),
            sleeps=nvidia and self.settings.release in ("auto", "sleep") and not model.tied,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            threads=self.threads or max(1, len(os.sched_getaffinity(0)) - 1),  # one for the API server
        )
        api_key = secrets.token_urlsafe(24)
        child = Child.start(
            engine_command.argv(plan),
            env=engine_command.environment(plan, os.environ, api_key),
            cwd=self.work_dir,
            log_file=self.log_file,
            name="vllm",
        )
        client = EngineClient(
            f"http://{engine_command.HOST}:{port}", api_key, ended=lambda: child.poll() is not None
        )
        self._server = _Server(child, client, model, None, before, plan.sleeps)

    def _await(self, server: _Server, deadline: float, cancel: threading.Event) -> str | None:
        """Until the server answers; else what went wrong."""
        pauses = iter(PAUSES)
        while not server.client.healthy(cancel=cancel):
            code = server.child.poll()
            if code is not None:
                return f"ended with {'signal' if code < 0 else 'exit code'} {abs(code)} while it started"
            if self._stopping.is_set() or cancel.is_set():
                return "was stopped while it started"
            if time.monotonic() >= deadline:
                return f"did not answer within {self.settings.start_timeout_s:g} s (engine.start_timeout_s)"
            cancel.wait(min(next(pauses), max(0.0, deadline - time.monotonic())))
        try:
            server.client.model(cancel=cancel)
        except (Refused, Unreachable, CalledOff) as error:
            return f"answers, but not as it should: {error}"
        return None

    # --- new weights in place ---

    def _reload(self, model: ModelFolder, policy_version: int, cancel: threading.Event) -> str:
        """Put other weights into the running server; "" if that is done, else why it must be restarted."""
        server = self._server
        assert server is not None
        if model.tied or server.first.tied:
            return "its output head is tied to the embedding, which vLLM does not reload"
        if model.signature is None or model.signature != server.first.signature:
            return "the new weights have another configuration or other shapes"
        offset = engine_log.size(self.log_file)
        timeout_s = self.settings.start_timeout_s
        server.loaded = None
        try:
            if server.asleep:
                server.client.call("POST", "/wake_up?tags=weights", timeout_s=timeout_s, cancel=cancel)
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(model.path)}}
            server.client.call("POST", "/collective_rpc", arguments, timeout_s=timeout_s, cancel=cancel)
            if server.asleep:
                server.client.call("POST", "/wake_up?tags=kv_cache", timeout_s=timeout_s, cancel=cancel)
                server.asleep = False
            self._forget_prefixes(server, cancel)
        except (Refused, Unreachable) as error:
            return str(error)
        except CalledOff:
            raise ProgramFailed("vLLM was called off while it took new weights") from None
        if NOT_LOADED in engine_log.since(self.log_file, offset):
            return "vLLM says that it did not load all weights"
        server.loaded = (model.path, policy_version)
        return ""

    def _forget_prefixes(self, server: _Server, cancel: threading.Event) -> None:
        """Drop what the old weights cached. It cannot be done while requests of a killed rollout are still leaving."""
        deadline, pauses = time.monotonic() + IDLE_S, iter(PAUSES)
        while True:
            answer = server.client.call("POST", "/reset_prefix_cache", timeout_s=60.0, cancel=cancel)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            if time.monotonic() >= deadline:
                raise Unreachable(f"requests are still running {IDLE_S:.0f} s after their rollout")
            if cancel.wait(next(pauses)) or self._stopping.is_set():
                raise CalledOff("called off")

    # --- the accelerator's memory ---

    def _sleep(self, server: _Server, cancel: threading.Event) -> dict[str, Any] | str:
        """Put it to sleep; why that is not enough, where it is not."""
        begin = time.monotonic()
        server.loaded = None  # level 2 drops the weights: new ones are loaded from disk in any case
        try:
            server.client.call("POST", "/sleep?level=2", timeout_s=120.0, cancel=cancel)
        except (Refused, Unreachable) as error:
            return f"it did not fall asleep: {error}"
        except CalledOff:
            raise ProgramFailed("vLLM was called off while it fell asleep") from None
        server.asleep = True
        outcome = accelerators.wait_released(
            server.child.pids(), before=server.before, budget_bytes=ASLEEP_BYTES, cancel=cancel
        )
        if isinstance(outcome, accelerators.StillHeld):
            return f"asleep, but {outcome}"
        return {"action": "sleep", "reason": "", "seconds": time.monotonic() - begin, "seen": outcome.how}

    def _stop_and_verify(self, server: _Server, reason: str, cancel: threading.Event) -> dict[str, Any]:
        begin = time.monotonic()
        pids = server.child.pids()
        self._stop_server()
        outcome = accelerators.wait_released(pids, before=server.before, cancel=cancel)
        if isinstance(outcome, accelerators.StillHeld):
            raise ProgramFailed(f"vLLM is stopped ({reason}), but {outcome}")
        return {"action": "stop", "reason": reason, "seconds": time.monotonic() - begin, "seen": outcome.how}

    # --- debug mode ---

    def _external_client(self) -> EngineClient:
        name = self.settings.api_key_env
        if name is not None and not os.environ.get(name):
            raise UsageError(f"engine.api_key_env={name}: this variable is not set on this node")
        url = normal_url(self.settings.url or DEFAULT_URL)
        return EngineClient(url, os.environ.get(name, "") if name else "")

    def _external(
        self, weights: Path, policy_version: int, begin: float, cancel: threading.Event
    ) -> EngineInfo:
        """The user's own server: that it answers, and what it serves. It is told nothing."""
        client = self._external_client()
        try:
            model = client.model(cancel=cancel)
        except (Refused, Unreachable, CalledOff) as error:
            raise ProgramFailed(f"the server of debug mode (engine.url) does not serve: {error}") from None
        root = str(model.get("root") or "")
        same = bool(root) and Path(root).exists() and Path(root).resolve() == weights.resolve()
        serves = f"{client.url} serves {root or 'a model of its own'}"
        note = f"debug mode: {serves}; it is not given policy version {policy_version} ({weights})"
        return EngineInfo(
            url=client.url,
            api_key=client.api_key,
            model=model["id"],
            policy_version=policy_version,
            pid=0,
            started=False,
            seconds=time.monotonic() - begin,
            action="external",
            note="" if same else note,
        )

    # --- small things ---

    def _healthy(self, cancel: threading.Event) -> bool:
        server = self._server
        return server is not None and server.child.poll() is None and server.client.healthy(30.0, cancel)

    def _how_it_ended(self) -> str:
        code = self._server.child.poll() if self._server else None
        if code is None:
            return "it does not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.child.stop(STOP_GRACE_S)

    def _info(self, begin: float, action: str, note: str = "") -> EngineInfo:
        server = self._server
        assert server is not None and server.loaded is not None
        return EngineInfo(
            url=server.client.url,
            api_key=server.client.api_key,
            model=engine_command.SERVED_NAME,
            policy_version=server.loaded[1],
            pid=server.child.pid,
            started=action == "started",
            seconds=time.monotonic() - begin,
            action=action,
            note=note,
        )

    def _failed(self, what: str) -> str:
        """One line on what happened, then the end of the log and where the whole of it is."""
        server = self._server
        assert server is not None
        cause = engine_log.cause(server.child.last_log_lines(400))
        lines = [f"vLLM {what}{f': {cause}' if cause else ''}", *server.child.last_log_lines(LOG_LINES)]
        return "\n".join([*lines, f"(from {self.log_file})"])
