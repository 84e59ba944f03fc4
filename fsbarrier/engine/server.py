"""One vLLM server of this node: its process, the HTTP calls to it, and what it serves. engine.py decides what becomes of it.

New weights go into the running server where that is known to be right: same architecture and shapes, and an output head of its
own. vLLM keeps the *old* head of a model with tied embeddings and says nothing: it gets such a model with a head of its own
(own_head.py), and one that cannot be given one is never reloaded in place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fsbarrier.engine import command
from fsbarrier.engine import log as engine_log
from fsbarrier.engine.client import CalledOff, EngineClient, Refused, Unreachable
from fsbarrier.engine.model import ModelFolder
from fsbarrier.errors import ProgramFailed
from fsbarrier.host import accelerators
from fsbarrier.openai_http import UNIX
from fsbarrier.retry import Backoff
from fsbarrier.supervision.supervisor import Child

# Pauses between two looks at a server that starts, or whose last requests are leaving.
LOOKS = Backoff(0.05, 0.5)
# vLLM ends within 2 s of SIGTERM.
STOP_GRACE_S = 5.0
SLEEP_TIMEOUT_S = 120.0
# How long the requests of a killed rollout may take to leave the server before a reload.
IDLE_S = 30.0
# What a sleeping server may hold on a device: it keeps its context and its graphs.
ASLEEP_BYTES = 2 << 30
# How many of the last lines of its log are searched for the reason why it failed.
CAUSE_LINES = 400
# vLLM logs this as a warning, and answers the reload with 200.
NOT_LOADED = "Following weights were not loaded from checkpoint"


@dataclass
class Server:
    """A server that was started. `first_model` is the folder it was started with, to which others must be alike; `environ` says
    which accelerators it may see."""

    child: Child
    client: EngineClient
    first_model: ModelFolder
    start_timeout_s: float
    environ: Mapping[str, str]
    # The accelerators as they were before the server took memory of them.
    accelerators_before: list[accelerators.Accelerator]
    can_sleep: bool
    # Set when the daemon ends: whatever waits here gives up.
    stopping: threading.Event
    # The policy's model folder and the version that it answers with; None where that is not known to be whole.
    serving: tuple[Path, int] | None = None
    asleep: bool = False

    @classmethod
    def launch(
        cls,
        plan: command.ServerPlan,
        log_file: Path,
        cwd: Path,
        *,
        api_key: str,
        environ: Mapping[str, str],
        stopping: threading.Event,
        accelerators_before: list[accelerators.Accelerator],
    ) -> Self:
        """Start the process; it serves nothing yet. Raises StartFailed, StoreError."""
        # A server that was killed left its socket, and none can be made in its place.
        Path(plan.socket).unlink(missing_ok=True)
        child = Child.start(
            command.argv(plan),
            env=command.environment(plan, environ, api_key),
            cwd=cwd,
            log_file=log_file,
            name="vllm",
        )
        url = UNIX + plan.socket
        return cls(
            child=child,
            client=EngineClient(url, api_key, ended=lambda: child.poll() is not None),
            first_model=plan.model,
            start_timeout_s=plan.settings.start_timeout_s,
            environ=environ,
            accelerators_before=accelerators_before,
            can_sleep=plan.sleeps,
            stopping=stopping,
        )

    def wait_until_it_answers(self, deadline: float, cancel: threading.Event) -> str:
        """ "" once the server answers as it should; else what went wrong."""
        pauses = iter(LOOKS)
        while not self.client.healthy(cancel=cancel):
            code = self.child.poll()
            if code is not None:
                return f"ended with {'signal' if code < 0 else 'exit code'} {abs(code)} while it started"
            if self.stopping.is_set() or cancel.is_set():
                return "was stopped while it started"
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return f"did not answer within {self.start_timeout_s:g} s (engine.start_timeout_s)"
            cancel.wait(min(next(pauses), left_s))
        try:
            self.client.model(cancel=cancel)
        except (Refused, Unreachable, CalledOff) as error:
            return f"answers, but not as it should: {error}"
        return ""

    def healthy(self, cancel: threading.Event) -> bool:
        return self.child.poll() is None and self.client.healthy(30.0, cancel)

    def how_it_ended(self) -> str:
        code = self.child.poll()
        if code is None:
            return "it does not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def failure_text(self, what: str) -> str:
        """One line on what happened, then the end of the log and where the whole of it is."""
        cause = engine_log.cause(self.child.last_log_lines(CAUSE_LINES))
        lines = [f"vLLM {what}{f': {cause}' if cause else ''}", *self.child.last_log_lines()]
        return "\n".join([*lines, f"(from {self.child.log_file})"])

    def reload(self, model: ModelFolder, cancel: threading.Event) -> str:
        """Put other weights into the running server; "" if that is done, else why it must be restarted."""
        if model.tied or self.first_model.tied:
            return "its output head is tied to the embedding, which vLLM does not reload"
        if model.signature is None or model.signature != self.first_model.signature:
            return "the new weights have another configuration or other shapes"
        log_file = self.child.log_file
        log_size = engine_log.size(log_file)
        # Until all is done, some weights may be new and some old.
        self.serving = None
        try:
            self._load(model, cancel)
        except (Refused, Unreachable) as error:
            return str(error)
        except CalledOff:
            raise ProgramFailed("vLLM was called off while it took new weights") from None
        if NOT_LOADED in engine_log.since(log_file, log_size):
            return "vLLM says that it did not load all weights"
        return ""

    def _load(self, model: ModelFolder, cancel: threading.Event) -> None:
        """vLLM's own order: memory for the weights first, then the weights, then memory for the cache."""

        def post(path: str, body: object = None) -> None:
            self.client.call("POST", path, body, timeout_s=self.start_timeout_s, cancel=cancel)

        if self.asleep:
            # What trainers that stay have of the accelerator by now, they will have when this server sleeps the next time.
            self.accelerators_before = accelerators.detect(self.environ)
            post("/wake_up?tags=weights")
        post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model.path)}})
        if self.asleep:
            post("/wake_up?tags=kv_cache")
            self.asleep = False
        self._forget_prefixes(cancel)

    def _forget_prefixes(self, cancel: threading.Event) -> None:
        """Drop what the old weights cached. It cannot be done while requests of a killed rollout are still leaving."""
        deadline = time.monotonic() + IDLE_S
        for pause_s in LOOKS:
            answer = self.client.call("POST", "/reset_prefix_cache", timeout_s=60.0, cancel=cancel)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            if time.monotonic() >= deadline:
                raise Unreachable(f"requests are still running {IDLE_S:.0f} s after their rollout")
            if cancel.wait(pause_s) or self.stopping.is_set():
                raise CalledOff("called off")

    def fall_asleep(self, cancel: threading.Event) -> accelerators.Released | str:
        """Give the accelerator's memory back and keep the process; why that is not enough, where it is not."""
        # Level 2 drops the weights: new ones are loaded from disk in any case.
        self.serving = None
        try:
            self.client.call("POST", "/sleep?level=2", timeout_s=SLEEP_TIMEOUT_S, cancel=cancel)
        except (Refused, Unreachable) as error:
            return f"it did not fall asleep: {error}"
        except CalledOff:
            raise ProgramFailed("vLLM was called off while it fell asleep") from None
        self.asleep = True
        outcome = accelerators.wait_released(
            self.child.pids(),
            before=self.accelerators_before,
            environ=self.environ,
            budget_bytes=ASLEEP_BYTES,
            cancel=cancel,
        )
        return f"asleep, but {outcome}" if isinstance(outcome, accelerators.StillHeld) else outcome

    def stop(self) -> None:
        """End it; returns when nothing of it is left."""
        self.child.stop(STOP_GRACE_S)
