"""One vLLM server of this node: its process, HTTP calls, and the weights it serves. engine.py controls its life cycle.

New weights are loaded into the running server if that is known to be correct: same architecture and shapes, and a separate
output head. With tied embeddings, vLLM would silently keep the *old* head, so such a model is served with a separate head
(own_head.py), or never reloaded in place if its architecture does not support that. After a start and after a reload, the server must
compute what the trainer computed with these weights, as far as the trainer has said it (rundir/known_logprobs.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from fsbarrier.engine import accelerators, command
from fsbarrier.engine.client import CalledOff, EngineClient, Refused, Unreachable
from fsbarrier.engine.model import ModelFolder
from fsbarrier.engine.openai_http import UNIX, given_logprobs
from fsbarrier.engine.own_head import KNOWN
from fsbarrier.engine.span import Link, PeerLinks
from fsbarrier.errors import ProgramFailed
from fsbarrier.processes import failure_reason
from fsbarrier.processes.supervisor import Child
from fsbarrier.rundir import logs
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.rundir.logs import SHOWN_LINES
from fsbarrier.store.retry import Backoff, patiently

# Polling intervals while a server starts.
LOOKS = Backoff(0.05, 0.5)
# vLLM exits within 2 s after SIGTERM.
STOP_GRACE_S = 5.0
SLEEP_TIMEOUT_S = 120.0
# Memory that a sleeping server may keep on a device, for its context and graphs.
ASLEEP_BYTES = 2 << 30
# vLLM only logs this as a warning, and the reload returns 200.
NOT_LOADED = "Following weights were not loaded from checkpoint"
# How many lines of its log to search after a reload; vLLM writes fewer.
RELOAD_LINES = 1000


@dataclass
class Server:
    """A started server. `first_model`: the folder it was started with, whose signature other models must match; `environ`: selects its
    accelerators."""

    child: Child
    client: EngineClient
    first_model: ModelFolder
    start_timeout_s: float
    # The prefix of its settings' names, for messages.
    group: str
    environ: Mapping[str, str]
    # The state of the accelerators before the server was started.
    accelerators_before: list[accelerators.Accelerator]
    can_sleep: bool
    # Whether it serves adapters beside the model, which it keeps.
    serves_adapters: bool
    # Set when the daemon ends, to abort all waits.
    stopping: threading.Event
    # The model folder and version it serves; None during a change, when the weights may be inconsistent.
    serving: tuple[Path, int] | None = None
    # The names of the adapters that are loaded beside the model, oldest first.
    adapters: list[str] = field(default_factory=list)
    asleep: bool = False
    # The connections to its parts on other nodes; None: it runs on this node alone.
    peers: PeerLinks | None = None

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
        links: Sequence[Link],
    ) -> Self:
        """Start the process, which is not ready yet. `links`: to the nodes that it spans. Raises StartFailed, StoreError."""
        # Remove the socket of a killed server, because it would block a new one.
        Path(plan.socket).unlink(missing_ok=True)
        child = Child.start(
            command.argv(plan),
            env=command.environment(plan, environ, api_key),
            cwd=cwd,
            log_file=log_file,
            name="vllm",
            # A server needs only its socket, unless it has parts on other nodes, which must reach it.
            private_network=plan.settings.private_network and plan.meeting is None,
        )
        url = UNIX + plan.socket
        return cls(
            child=child,
            client=EngineClient(url, api_key, ended=lambda: child.poll() is not None),
            first_model=plan.model,
            start_timeout_s=plan.settings.start_timeout_s,
            group=plan.group,
            environ=environ,
            accelerators_before=accelerators_before,
            can_sleep=plan.sleeps,
            serves_adapters=plan.adapter_rank > 0,
            stopping=stopping,
            peers=PeerLinks(child, links) if links else None,
        )

    def wait_until_it_answers(self, deadline: float, cancel: threading.Event, label: int | None) -> str:
        """Wait until the server is ready; returns "" or the problem. `label`: the policy version for `label()`; None: a frozen engine."""
        pauses = iter(LOOKS)
        while not self.client.healthy(cancel=cancel):
            code = self.child.poll()
            if code is not None:
                return self._how_it_ended(code)
            if self.stopping.is_set() or cancel.is_set():
                return "was stopped during its start"
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return f"did not answer within {self.start_timeout_s:g} s ({self.group}.start_timeout_s)"
            cancel.wait(min(next(pauses), left_s))
        try:
            self.client.model(cancel=cancel)
            if label is not None:
                self.label(label, cancel)
        except (Refused, Unreachable, CalledOff) as error:
            return f"gave an unexpected answer: {error}"
        return ""

    def healthy(self, cancel: threading.Event) -> bool:
        return self.child.poll() is None and self.client.healthy(30.0, cancel)

    def how_it_ended(self) -> str:
        """How the server ended, with the cause from its log and the log's end; a single line if it has not ended."""
        code = self.child.poll()
        if code is None:
            return "vLLM does not answer"
        return self.failure_text(self._how_it_ended(code))

    def _how_it_ended(self, code: int) -> str:
        broken = self.peers is not None and self.peers.broken
        return (
            "was ended because its part on another node ended"
            if broken
            else failure_reason.how_it_ended(code)
        )

    def failure_text(self, what: str) -> str:
        """A message: the problem, the cause that the log gives, the log's path, and the end of the log."""
        lines = self.child.last_log_lines(failure_reason.SEARCHED_LINES)
        cause = failure_reason.cause(lines, killed=(self.child.poll() or 0) < 0)
        return "\n".join(
            [
                f"vLLM {what}{f': {cause}' if cause else ''}",
                f"(from {self.child.log_file})",
                *lines[-SHOWN_LINES:],
            ]
        )

    def not_loadable(
        self, model: ModelFolder, known: KnownLogprobs | None, *, reloads: bool | None, in_flight: bool
    ) -> str:
        """Why the running server cannot load these weights; "" if it can. `known`: what it will be compared with.

        `reloads`: whether a server of this engine computed what it should after a reload in place; None: that was not compared yet. A
        reload in flight needs a comparison before it, since running requests would go on with wrong weights until one is made.
        """
        if self.serves_adapters:
            return ""
        kind = self.first_model.config.get("model_type")
        if reloads is False:
            return f"this vLLM does not serve a {kind} model rightly after a reload in place"
        if model.tied or self.first_model.tied:
            return "its output head is tied to the embedding, which vLLM does not reload"
        if model.signature is None or model.signature != self.first_model.signature:
            return "the new weights have another configuration or other shapes"
        if reloads is None and kind not in KNOWN and (known is None or in_flight):
            return f"whether vLLM reloads a {kind} model rightly is not known yet"
        return ""

    def differs(self, known: KnownLogprobs | None, policy_version: int, cancel: threading.Event) -> str:
        """How its log-probabilities differ from those that the trainer computed with the same weights (`known`); "" if they agree, or if
        none are known.

        vLLM rearranges the weights of some architectures when it loads them, those of experts for example, and then loads new ones wrongly
        without a word. Raises ProgramFailed if it is called off.
        """
        # If it serves adapters, vLLM 0.32 dies on a CPU of a request for the log-probabilities of given tokens.
        if known is None or (self.serves_adapters and not self.accelerators_before):
            return ""
        serves = f"does not serve the weights of policy version {policy_version}, or computes otherwise than the trainer: "
        try:
            gap = known.gap(self._logprobs([sequence.token_ids for sequence in known.sequences], cancel))
        except (Refused, Unreachable, ValueError) as error:
            return f"{serves}{error}"
        except CalledOff:
            raise ProgramFailed("comparing vLLM with the trainer was cancelled") from None
        # The comparison is negated so that NaN counts as bad.
        if not gap <= known.limit:
            limit = f"{known.limit:g} (algorithm.max_logprob_gap)"
            return f"{serves}its log-probabilities differ by {gap:.4f} on average, more than {limit}"
        return ""

    def _logprobs(self, sequences: Sequence[Sequence[int]], cancel: threading.Event) -> list[list[float]]:
        """The log-probability of each token given those before it; 0 of the first one.

        Raises Refused, Unreachable, CalledOff, ValueError.
        """
        name = self.adapters[-1] if self.adapters else command.SERVED_NAME
        body = {"model": name, "prompt": sequences, "prompt_logprobs": 0, "max_tokens": 1}
        answer: Any = self.client.call(
            "POST", "/v1/completions", body, timeout_s=self.start_timeout_s, cancel=cancel
        )
        try:
            return given_logprobs(answer, sequences)
        except ValueError as error:
            raise ValueError(f"it gives {error}") from None

    def reload(
        self, model: ModelFolder, policy_version: int, cancel: threading.Event, *, in_flight: bool
    ) -> str:
        """Load weights that the running server can load; returns "" or the reason why a restart is needed after all. `in_flight`: running
        requests keep their tokens, and go on with the new weights."""
        log_file = self.child.log_file
        log_size = patiently(log_file.stat).st_size
        # During the reload, old and new weights may be mixed.
        self.serving = None
        try:
            self._load(model, policy_version, cancel, "keep" if in_flight else "abort")
        except (Refused, Unreachable) as error:
            return str(error)
        except CalledOff:
            raise ProgramFailed("the reload of weights was cancelled") from None
        if any(NOT_LOADED in line for line in logs.last_lines(log_file, RELOAD_LINES, log_size)):
            return "vLLM reports that it did not load all weights"
        return ""

    def serve_adapter(
        self, adapter: command.Adapter | None, policy_version: int, cancel: threading.Event
    ) -> str:
        """Serve the adapters of a version beside the model (None: the model alone), and unload those of the version before the last one;
        returns "" or the reason why a restart is needed."""
        if self.asleep and (reason := self.wake(cancel)):
            return reason
        try:
            if adapter is not None:
                if adapter.name not in self.adapters:
                    self._post_for_text(
                        "/v1/load_lora_adapter", cancel, adapter.name, lora_path=str(adapter.path)
                    )
                self.adapters = [*(name for name in self.adapters if name != adapter.name), adapter.name]
            while len(self.adapters) > command.MOST_ADAPTERS:
                self._post_for_text("/v1/unload_lora_adapter", cancel, self.adapters.pop(0))
            self.label(policy_version, cancel)
        except (Refused, Unreachable) as error:
            return f"does not serve the adapters of policy version {policy_version}: {error}"
        except CalledOff:
            raise ProgramFailed("loading adapters was cancelled") from None
        return ""

    def label(self, policy_version: int, cancel: threading.Event) -> None:
        """Set the policy version that the server reports with each token from now on. Raises Refused, Unreachable, CalledOff."""
        self._post("/update_weight_version", cancel, {"new_version": str(policy_version)})

    def _post(self, path: str, cancel: threading.Event, body: object = None) -> None:
        self.client.call("POST", path, body, timeout_s=self.start_timeout_s, cancel=cancel)

    def _post_for_text(self, path: str, cancel: threading.Event, name: str, **more: str) -> None:
        """A request about adapters, which vLLM answers with a sentence."""
        body = {"lora_name": name, **more}
        self.client.call("POST", path, body, timeout_s=self.start_timeout_s, cancel=cancel, is_json=False)

    def _load(self, model: ModelFolder, policy_version: int, cancel: threading.Event, running: str) -> None:
        """Reload in the order that vLLM requires: allocate memory for weights, load weights, allocate the cache. `running`: what happens
        to running requests ("keep", "abort")."""
        post = partial(self._post, cancel=cancel)
        if self.asleep:
            # Resident trainers hold memory by now, and will still hold it when this server sleeps the next time.
            self.accelerators_before = accelerators.detect(self.environ)
            post("/wake_up?tags=weights")
        # "abort" ends requests that a killed rollout has left. Both modes empty the token, prefix and image caches. If the server still
        # relied on an image that it cached before the reload, the next request with that image would crash it.
        post(f"/pause?mode={running}")
        kwargs = {"weights_path": str(model.path)}
        post("/collective_rpc", body={"method": "reload_weights", "kwargs": kwargs})
        if self.asleep:
            post("/wake_up?tags=kv_cache")
            self.asleep = False
        self.label(policy_version, cancel)
        post("/resume")

    def wake(self, cancel: threading.Event) -> str:
        """Wake the server, which kept its weights; returns "" or the reason why a restart is needed."""
        self.accelerators_before = accelerators.detect(self.environ)
        try:
            self.client.call("POST", "/wake_up", timeout_s=self.start_timeout_s, cancel=cancel)
        except (Refused, Unreachable) as error:
            return f"waking failed: {error}"
        except CalledOff:
            raise ProgramFailed("vLLM's waking was cancelled") from None
        self.asleep = False
        return ""

    def fall_asleep(
        self, cancel: threading.Event, *, keep_weights: bool = False
    ) -> accelerators.Released | str:
        """Put the server to sleep to free accelerator memory; returns the evidence, or a text if that fails or frees too little."""
        # Level 2 discards the weights.
        if not keep_weights:
            self.serving = None
        level = 1 if keep_weights else 2
        try:
            self.client.call("POST", f"/sleep?level={level}", timeout_s=SLEEP_TIMEOUT_S, cancel=cancel)
        except (Refused, Unreachable) as error:
            return f"sleep failed: {error}"
        except CalledOff:
            raise ProgramFailed("vLLM's sleep was cancelled") from None
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
        """Stop the server; returns when its process tree is gone."""
        self.child.stop(STOP_GRACE_S)
