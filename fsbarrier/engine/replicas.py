"""All engines of a node: each replica is a vLLM server with its own accelerators (or cores). Operations run in parallel.

replicas = Replicas(settings.engine, log_dir=..., work_dir=...)
infos = replicas.ensure(folder, policy_version, threads=8, cancel=event)   # all of them serve exactly these weights now
with replicas.kept_alive() as keeper: ...                                  # those that die are started again
replicas.release(cancel=event)
replicas.stop()
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

from fsbarrier.engine.engine import Engine, EngineInfo, Release
from fsbarrier.engine.placement import ANYWHERE, placements
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.host.accelerator_device import Accelerator
from fsbarrier.protocol.facts import Payload
from fsbarrier.settings.sections import EngineSettings

# Maximum restarts of a replica during one program. An engine that dies twice is likely to die again, and the phase is retried anyway.
RESTARTS = 1
# How quickly the end of a server is noticed.
LOOK_S = 0.25

T = TypeVar("T")


class Replicas:
    """The engines by number. Thread-safe; calls that change the weights are serialized."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        external: bool = False,
        log_dir: Path,
        work_dir: Path,
        devices: Sequence[Accelerator] = (),
        python: str = sys.executable,
        secrets_named: Collection[str | None] = (),
    ) -> None:
        """`devices`: the accelerators that this node may use. `secrets_named`: variables with secrets, which the servers do not get.

        Raises UsageError if there are too few accelerators.
        """
        cpus = sorted(os.sched_getaffinity(0))
        own = [ANYWHERE] if external else placements(settings, devices, os.environ, cpus)
        self.engines = [
            Engine(
                settings,
                external=external,
                log_file=log_dir / log_name(number),
                work_dir=work_dir,
                python=python,
                placement=placement,
                secrets_named=secrets_named,
            )
            for number, placement in enumerate(own)
        ]

    def ensure(
        self,
        weights: Path,
        policy_version: int,
        *,
        threads: int = 0,
        cancel: threading.Event,
        show: Callable[[int], None] = lambda ready: None,
    ) -> list[EngineInfo]:
        """Make every replica serve the model folder `weights` as `policy_version`; `show` receives the number of ready replicas.

        `threads`: total compute threads on a CPU. Raises ProgramFailed with the first failure; the other replicas are then ready, and a
        retry does not restart them.
        """
        for engine in self.engines:
            engine.threads = max(1, threads // len(self.engines)) if threads else 0
        lock, ready = threading.Lock(), 0

        def bring(engine: Engine) -> EngineInfo:
            nonlocal ready
            info = engine.ensure(weights, policy_version, cancel=cancel)
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

    def kept_alive(self) -> Keeper:
        return Keeper(self.engines)

    def _side_by_side(self, call: Callable[[Engine], T]) -> list[T]:
        """Run `call` for all engines in parallel. Raises the first exception after all have returned."""
        if len(self.engines) == 1:
            return [call(self.engines[0])]
        with ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine") as threads:
            futures = [threads.submit(call, engine) for engine in self.engines]
        return [_result(number, future) for number, future in enumerate(futures)]


class Keeper:
    """Restarts engines that die while a program uses them, with one thread per engine. Meanwhile the program moves the work to the other
    engines; a restarted engine has the same address."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        # For the journal: restarts, and engines given up.
        self.events: list[Payload] = []
        self._engines = engines
        self._over = threading.Event()
        self._given_up: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=self._keep, args=(number,), name=f"engine-{number}", daemon=True)
            for number in range(len(engines))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # This also aborts a restart in progress, because the next phase may need the accelerator.
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def problem(self) -> str:
        """Why no engine is left; "" while one is alive or may come back."""
        none_left = len(self._given_up) == len(self._engines)
        return next(iter(self._given_up.values()), "") if none_left else ""

    def _keep(self, number: int) -> None:
        engine = self._engines[number]
        for _ in range(RESTARTS):
            how = self._wait_for_end(engine)
            if not how:
                return
            self._note(number, f"is being restarted: {how.splitlines()[0]}")
            try:
                engine.revive(self._over)
            except (ProgramFailed, StoreError, OSError) as error:
                how = str(error)
                break
        else:
            how = self._wait_for_end(engine)
        if how and not self._over.is_set():
            self._given_up[number] = f"engine {number} keeps failing and is not restarted again: {how}"
            self._note(number, f"keeps failing and is not restarted again: {how.splitlines()[0]}")

    def _wait_for_end(self, engine: Engine) -> str:
        """Wait until the engine's server ends by itself, and return how; "" when the program is over."""
        while not self._over.wait(LOOK_S):
            if how := engine.how_it_ended():
                return how
        return ""

    def _note(self, number: int, what: str) -> None:
        self.events.append(
            {"event": "engine_restarted", "replica": number, "engine_note": f"engine {number} {what}"}
        )


def log_name(number: int) -> str:
    """The log file name of replica `number`, in the node's log folder."""
    return f"vllm-{number}.log" if number else "vllm.log"


def _result(number: int, future: Future[T]) -> T:
    """The result of a call for engine `number`. Adds the engine's number to a failure."""
    try:
        return future.result()
    except ProgramFailed as error:
        raise ProgramFailed(f"engine {number}: {error}") from None
