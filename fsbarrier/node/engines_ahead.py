"""Preloads the policy that the first rollout will probably need, while the nodes still join.

A wrong guess costs only time. A phase that serves weights takes over the preload if it is for exactly its policy, ends it if not, and asks
the engines in either case.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.engine import command
from fsbarrier.engine.model import inspect
from fsbarrier.errors import ProgramFailed
from fsbarrier.node.job import RowJob, Workplace
from fsbarrier.node.weights import checked_weights
from fsbarrier.program import Program, ServeWeights
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.sections import Settings

if TYPE_CHECKING:
    from fsbarrier.engine.engine import EngineInfo

# How often a phase that waits for the preload checks whether it was cancelled.
LOOK_S = 0.1
# How long ending the preload may take: a server ends within seconds, a read from a hanging directory perhaps never.
STOP_S = 30.0

#: the engines that serve a policy now, and the journal's lines about them
Loaded = tuple[Sequence["EngineInfo"], list[dict[str, object]]]


def begin_ahead(
    workplace: Workplace, record: RunRecord, settings: Settings, program: Program, accelerators: int
) -> None:
    """Start the preload. If that is impossible, the phase that needs the engines reports why."""
    with contextlib.suppress(OSError, ProgramFailed):
        first = first_policy(record, settings, program, accelerators)
        if first is not None:
            workplace.ahead = EnginesAhead(first, partial(load_policy, workplace=workplace))


def first_policy(
    record: RunRecord, settings: Settings, program: Program, accelerators: int
) -> ServeWeights | None:
    """The policy to preload; None if the engines would be in the way, or if it is not known yet.

    Raises OSError, ProgramFailed.
    """
    if settings.rl_phase not in program.serves_first or not settings.manages_engine or record.model is None:
        return None
    made = checkpoints.served_policy(record.log_path)
    version = made.number if made else 0
    model = record.paths.checkpoint(version, made.generation) / "model" if made else Path(record.model)
    # The number of nodes that share this host's cores is known only once they have joined.
    alone = accelerators or settings.num_nodes == 1 or command.useful_threads(inspect(model)) == 1
    return ServeWeights(model, version, threads=len(os.sched_getaffinity(0))) if alone else None


class EnginesAhead:
    """A running preload of `work`'s policy. `load` is what a phase does itself without a preload."""

    def __init__(self, work: ServeWeights, load: Callable[[ServeWeights, RowJob], Loaded]) -> None:
        self._policy, self._load, self._job = (work.folder, work.policy_version), load, RowJob()
        self._loaded: Loaded | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="engines-ahead", daemon=True)
        self._thread.start()

    def take(self, work: ServeWeights | None, job: RowJob) -> Loaded | None:
        """Wait for the preload on behalf of `job`, if it is for exactly the policy of `work`; else end it and return None.

        Raises the preload's exception if it fails during the wait. If it failed earlier, returns None, and the phase tries again. Raises
        Cancelled; the preload then goes on.
        """
        wanted = work is not None and (work.folder, work.policy_version) == self._policy
        waited = wanted and self._thread.is_alive()
        if not wanted:
            self._job.cancel.set()
        try:
            while self._thread.is_alive():
                # If the preload hangs in the shared directory, so does the phase.
                job.doing, job.alive_at, job.progress = (
                    self._job.doing,
                    self._job.alive_at,
                    self._job.progress,
                )
                job.stop_if_cancelled()
                self._thread.join(LOOK_S)
        finally:
            job.doing = ""
        if waited and self._error is not None:
            raise self._error
        return self._loaded if wanted else None

    def stop(self) -> None:
        """End the preload. The engines stop a server that it has started."""
        self._job.cancel.set()
        self._thread.join(STOP_S)

    def _run(self, work: ServeWeights) -> None:
        try:
            self._loaded = self._load(work, self._job)
        except Exception as error:
            self._error = error


def take_from_ahead(work: ServeWeights | None, job: RowJob, workplace: Workplace) -> Loaded | None:
    """The result of the preload, if it is what `work` asks for. Afterwards no preload is running."""
    if workplace.ahead is None:
        return None
    loaded = workplace.ahead.take(work, job)
    workplace.ahead = None
    return loaded


def load_policy(work: ServeWeights, job: RowJob, workplace: Workplace) -> Loaded:
    """Make all engines serve the policy of `work`; returns the engines and lines for the journal."""
    serving = f"engine: policy version {work.policy_version}"
    job.progress = {"note": serving}
    folder, checked = checked_weights(work.folder, job, workplace, work.policy)

    def show(ready: int) -> None:
        job.progress = {"note": f"{serving}, {ready} ready"}

    infos = workplace.own_engines.ensure(
        folder, work.policy_version, threads=work.threads, cancel=job.cancel, show=show
    )
    return infos, checked
