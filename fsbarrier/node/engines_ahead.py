"""Has a node's engines load while the nodes still join: the policy that the first rollout will most likely ask for.

It is a guess, and costs only time where it is wrong. A phase that has weights served takes over what was begun for exactly its policy,
ends what was begun for any other, and asks the engines in either case.
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

# How often a phase that waits for the load sees whether it was cancelled.
LOOK_S = 0.1
# How long the end of the load may take: a server ends within seconds, a directory that hangs may never.
STOP_S = 30.0

#: what serves a policy now, and what the journal is told of it
Loaded = tuple[Sequence["EngineInfo"], list[dict[str, object]]]


def begin_ahead(
    workplace: Workplace, record: RunRecord, settings: Settings, program: Program, accelerators: int
) -> None:
    """Have the engines load from now on. If that is not possible, the phase that needs them says why."""
    with contextlib.suppress(OSError, ProgramFailed):
        first = first_policy(record, settings, program, accelerators)
        if first is not None:
            workplace.ahead = EnginesAhead(first, partial(load_policy, workplace=workplace))


def first_policy(
    record: RunRecord, settings: Settings, program: Program, accelerators: int
) -> ServeWeights | None:
    """What the engines of a node that starts now should load; None if they would be in the way, or if that is not known yet.

    Raises OSError, ProgramFailed.
    """
    if settings.rl_phase not in program.serves_first or not settings.manages_engine or record.model is None:
        return None
    made = checkpoints.served_policy(record.log_path)
    version = made.number if made else 0
    model = record.paths.checkpoint(version, made.generation) / "model" if made else Path(record.model)
    # How many nodes share this host, and its cores, is known once they have joined.
    alone = accelerators or settings.num_nodes == 1 or command.useful_threads(inspect(model)) == 1
    return ServeWeights(model, version, threads=len(os.sched_getaffinity(0))) if alone else None


class EnginesAhead:
    """One load of `work`'s policy, under way from now on; `load` is what a phase does itself where nothing was begun."""

    def __init__(self, work: ServeWeights, load: Callable[[ServeWeights, RowJob], Loaded]) -> None:
        self._policy, self._load, self._job = (work.folder, work.policy_version), load, RowJob()
        self._loaded: Loaded | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="engines-ahead", daemon=True)
        self._thread.start()

    def take(self, work: ServeWeights | None, job: RowJob) -> Loaded | None:
        """Wait on behalf of `job` for what is loaded, if it is exactly the policy of `work`; else end the load and give None.

        Raises what the load raised if it failed while it was waited for; an earlier failure gives None, and the phase tries anew.
        Raises Cancelled, and then the load goes on for the next that asks.
        """
        wanted = work is not None and (work.folder, work.policy_version) == self._policy
        waited = wanted and self._thread.is_alive()
        if not wanted:
            self._job.cancel.set()
        try:
            while self._thread.is_alive():
                # Where the load hangs in the shared directory, the phase counts as hanging there.
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
        """End the load. A server that it has started is the engines' to stop."""
        self._job.cancel.set()
        self._thread.join(STOP_S)

    def _run(self, work: ServeWeights) -> None:
        try:
            self._loaded = self._load(work, self._job)
        except Exception as error:
            self._error = error


def take_from_ahead(work: ServeWeights | None, job: RowJob, workplace: Workplace) -> Loaded | None:
    """What the engines have loaded ahead, if it is what `work` asks for. Nothing is under way any more then."""
    if workplace.ahead is None:
        return None
    loaded = workplace.ahead.take(work, job)
    workplace.ahead = None
    return loaded


def load_policy(work: ServeWeights, job: RowJob, workplace: Workplace) -> Loaded:
    """Bring all engines to the policy of `work`; gives what they serve it with, and lines for the journal."""
    serving = f"engine: policy version {work.policy_version}"
    job.progress = {"note": serving}
    folder, checked = checked_weights(work.folder, job, workplace, work.policy)

    def show(ready: int) -> None:
        job.progress = {"note": f"{serving}, {ready} ready"}

    infos = workplace.own_engines.ensure(
        folder, work.policy_version, threads=work.threads, cancel=job.cancel, show=show
    )
    return infos, checked
