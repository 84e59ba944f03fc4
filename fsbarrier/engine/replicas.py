"""All engines of a node: each replica is a vLLM server with its own accelerators (or cores). Operations run in parallel.

replicas = Replicas(settings.engine, log_dir=..., work_dir=...)
infos = replicas.ensure(folder, policy_version, threads=8, cancel=event)   # all of them serve exactly these weights now
replicas.none_left()                                                       # why no program can use them any more
replicas.release(cancel=event)
replicas.stop()
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fsbarrier.context import Span
from fsbarrier.engine.accelerators import Accelerator
from fsbarrier.engine.answer_format import NO_CHOICE, Parsers
from fsbarrier.engine.command import SERVED_NAME, Adapter
from fsbarrier.engine.engine import Engine, EngineInfo, Release
from fsbarrier.engine.placement import Placement, placements
from fsbarrier.engine.span import HeadListener
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.settings.sections import ServerSettings

T = TypeVar("T")


class Replicas:
    """The engines by number. Thread-safe; calls that change the weights are serialized."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        external: bool = False,
        log_dir: Path,
        work_dir: Path,
        devices: Sequence[Accelerator] = (),
        python: str = sys.executable,
        secrets_named: Collection[str | None] = (),
        frozen: str = "",
        head_listener: HeadListener | None = None,
        parsers: Parsers = NO_CHOICE,
        adapter_rank: int = 0,
    ) -> None:
        """`devices`: the accelerators that this node may use. `secrets_named`: variables with secrets, which the servers do not get.
        `frozen`: the name of a frozen engine, whose replicas share one key; "": these serve the policy. `head_listener`: where
        the other nodes of an engine connect, if it spans several.

        Raises UsageError if there are too few accelerators.
        """
        self.settings, self._external, self._devices = settings, external, devices
        self.frozen, self._group = frozen, f"engines.{frozen}" if frozen else "engine"
        self.head_listener = head_listener
        self.api_key = secrets.token_urlsafe(24) if frozen else ""
        self._chosen: Sequence[int] | None = None

        def make(number: int, placement: Placement) -> Engine:
            return Engine(
                settings,
                external=external,
                log_file=log_dir / log_name(number, frozen),
                work_dir=work_dir,
                python=python,
                placement=placement,
                secrets_named=secrets_named,
                served_name=frozen or SERVED_NAME,
                api_key=self.api_key,
                head_listener=head_listener,
                parsers=parsers,
                adapter_rank=adapter_rank,
            )

        self._make = make
        self.engines = self._placed(devices)

    def _placed(self, devices: Sequence[Accelerator]) -> list[Engine]:
        """The engines on these accelerators, not started. Raises UsageError."""
        cpus = sorted(os.sched_getaffinity(0))
        own = [{}] if self._external else placements(self.settings, devices, os.environ, cpus, self._group)
        return [self._make(number, placement) for number, placement in enumerate(own)]

    def use(self, devices: Sequence[int] | None) -> None:
        """Place the engines on these accelerators of the node, by number; None: on all. If the choice changes, running ones are stopped.

        Raises UsageError if they are too few.
        """
        if devices == self._chosen:
            return
        self.stop()
        self.engines = self._placed(self._devices if devices is None else [self._devices[n] for n in devices])
        self._chosen = devices

    def ensure(
        self,
        weights: Path,
        policy_version: int,
        *,
        threads: int = 0,
        cancel: threading.Event,
        show: Callable[[int], None] = lambda ready: None,
        in_flight: bool = False,
        span: Span | None = None,
        known: KnownLogprobs | None = None,
        adapter: Adapter | None = None,
    ) -> list[EngineInfo]:
        """Make every replica serve the model folder `weights` as `policy_version`; `show` receives the number of ready replicas.

        `threads`: total compute threads on a CPU. `in_flight`, `span`, `known`, `adapter`: see Engine.ensure. Raises ProgramFailed with the
        first failure; the other replicas are then ready, and a retry does not restart them.
        """
        for engine in self.engines:
            engine.threads = max(1, threads // len(self.engines)) if threads else 0
        lock, ready = threading.Lock(), 0

        def bring(engine: Engine) -> EngineInfo:
            nonlocal ready
            info = engine.ensure(
                weights,
                policy_version,
                cancel=cancel,
                in_flight=in_flight,
                span=span,
                known=known,
                adapter=adapter,
            )
            with lock:
                ready += 1
                show(ready)
            return info

        return self._side_by_side(bring)

    def release(self, *, cancel: threading.Event) -> Release:
        """Free all accelerator memory for the trainer. Raises ProgramFailed if some memory is not freed."""
        outcomes = self._side_by_side(lambda engine: engine.release(cancel=cancel))
        merged: Release = {}
        for name in ("action", "reason", "seen"):
            texts = dict.fromkeys(str(outcome[name]) for outcome in outcomes if name in outcome)
            if texts:
                merged[name] = ", ".join(text for text in texts if text)
        if seconds := [float(outcome["seconds"]) for outcome in outcomes if "seconds" in outcome]:
            merged["seconds"] = max(seconds)
        return merged

    def stop(self) -> None:
        """Stop all servers; returns when all are gone. Calls in progress fail."""
        self._side_by_side(Engine.stop)

    def none_left(self) -> str:
        """How the first server ended, if all have ended; "" while any of them runs, or if they are external."""
        ends = [engine.how_it_ended() for engine in self.engines if engine.ended]
        return ends[0] if len(ends) == len(self.engines) else ""

    def _side_by_side(self, call: Callable[[Engine], T]) -> list[T]:
        """Run `call` for all engines in parallel. Raises the first exception after all have returned."""
        if len(self.engines) == 1:
            return [call(self.engines[0])]
        with ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine") as threads:
            futures = [threads.submit(call, engine) for engine in self.engines]
        return [_result(number, future) for number, future in enumerate(futures)]


def log_name(number: int, frozen: str = "") -> str:
    """The log file name of replica `number`, in the node's log folder."""
    name = f"vllm-{frozen}" if frozen else "vllm"
    return f"{name}-{number}.log" if number else f"{name}.log"


def _result(number: int, future: Future[T]) -> T:
    """The result of a call for engine `number`. Adds the engine's number to a failure."""
    try:
        return future.result()
    except ProgramFailed as error:
        raise ProgramFailed(f"engine {number}: {error}") from None
