"""Finds the folder from which a node's engines load a policy version, and verifies it against the version's manifest.

`InFlight` does this for new weights while a program runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsbarrier.engine.command import Adapter
from fsbarrier.engine.engine import EngineInfo
from fsbarrier.errors import ProgramFailed
from fsbarrier.node import Weights
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.run.job import RowJob, Workplace
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.rundir.known_logprobs import read as read_known
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files
from fsbarrier.training.materialise import another_model
from fsbarrier.training.weights_copy import WeightsCopy

#: files beside weights that no engine reads
NOT_LOADED = (".md", ".log")
#: how often a node looks for weights that its engines take in flight
LOOK_S = 1.0


def load_weights(
    weights: Weights,
    job: RowJob,
    workplace: Workplace,
    settings: Settings,
    *,
    show: Callable[[int], None] = lambda ready: None,
    in_flight: bool = False,
) -> tuple[list[EngineInfo], list[JsonObject]]:
    """Make all of this node's engines serve verified weights; returns what serves them, and lines for the journal about the check.

    `show` is told how many replicas are ready. `in_flight`: requests go on with the new weights. Raises ProgramFailed, Cancelled.
    """
    adapter: Adapter | None = None
    if settings.lora.serve == "adapter":
        folder, adapter, lines = checked_adapter(weights, job, workplace)
    else:
        folder, lines = checked_weights(weights.folder, job, workplace, weights.policy, weights.first_model)
    workplace.own_engines.use(weights.devices)
    # A server that is not this run's is never compared.
    known = known_logprobs(weights.folder, job, workplace, settings) if settings.manages_engine else None
    infos = workplace.own_engines.ensure(
        folder,
        weights.policy_version,
        threads=weights.threads,
        cancel=job.cancel,
        show=show,
        in_flight=in_flight,
        span=weights.span,
        known=known,
        adapter=adapter,
    )
    return infos, lines


def checked_adapter(
    weights: Weights, job: RowJob, workplace: Workplace
) -> tuple[Path, Adapter | None, list[JsonObject]]:
    """The run's first model, the verified adapters that engines serve beside it (`lora.serve=adapter`), and lines for the journal. Without
    adapters (None) they serve the model in `weights` alone, before the first update. Raises ProgramFailed, Cancelled."""
    model, first, began = weights.folder, weights.first_model, job.clock()
    version, adapter = model.parent, Adapter(model.parent.name, model / checkpoints.ADAPTER)
    with job.using_directory(f"checking {version.name}"):
        if first is None or not workplace.patiently(job, (version / checkpoints.MANIFEST).exists):
            return model, None, []
        workplace.patiently(job, partial(checkpoints.check_identity, version, weights.policy))
        if workplace.checked_model == model:
            return first, adapter, []
        part = f"{model.name}/{checkpoints.ADAPTER}/"
        base = workplace.patiently(job, partial(checkpoints.verify, version, part, job.live_on)).base
        copies = workplace.weights or WeightsCopy(workplace.work_dir)
        digest = workplace.patiently(job, partial(copies.digest_of_first, first, job.live_on))
        if base is not None and digest != base.digest:
            raise another_model(version, first)
    workplace.checked_model = model
    return first, adapter, [_checked(version.name, "run directory", job.clock() - began)]


def checked_weights(
    model: Path, job: RowJob, workplace: Workplace, policy: str = "", first_model: Path | None = None
) -> tuple[Path, list[JsonObject]]:
    """The folder to load (this node's own copy of the policy in `model`, else `model` itself), and lines for the journal. Each version's
    files are verified once.

    `policy`: the published identity, which is compared with the folder's each time. The run's first model and a user's model folder have no
    manifest, so they are not verified. `first_model`: to which adapters belong. Raises ProgramFailed, Cancelled.
    """
    copies, version = workplace.weights, model.parent.name
    with job.using_directory(f"checking {version}"):
        workplace.patiently(job, partial(checkpoints.check_identity, model.parent, policy))
    if copies is not None and (here := copies.nearest(model)) != model:
        return here, []
    if model == workplace.checked_model:
        return model, []
    began, why_not = job.clock(), ""
    with job.using_directory(f"checking {version}"):
        if not workplace.patiently(job, (model.parent / checkpoints.MANIFEST).exists):
            return model, []
        if (
            copies is None
            and not workplace.patiently(job, partial(checkpoints.read_manifest, model.parent)).whole
        ):
            # The settings ask for no copies on this node, but an engine needs whole weights.
            copies = workplace.weights = WeightsCopy(workplace.work_dir / "weights")
            files.make_dirs(copies.folder)
        if copies is not None:
            why_not = workplace.patiently(job, partial(copies.confirm, model, job.live_on, first_model))
        if copies is None or why_not:
            # Reading the files here also brings them into the page cache for the engines.
            workplace.patiently(job, partial(_check_all, model, job))
            workplace.checked_model = model
    folder = model if copies is None else copies.nearest(model)
    source = "run directory" if folder == model else "node"
    return folder, [_checked(version, source, job.clock() - began, why_not)]


def _checked(version: str, source: str, seconds: float, note: str = "") -> JsonObject:
    """A line for the journal."""
    fields = {"serving": version, "weights_from": source, "seconds": round(seconds, 3), "note": note}
    return {"event": "weights_checked", **fields}


def known_logprobs(
    model: Path, job: RowJob, workplace: Workplace, settings: Settings
) -> KnownLogprobs | None:
    """The log-probabilities that engines must reproduce with the weights in `model`; None if it is no published version, or its trainer
    wrote none.

    The user's present limit, if one is set, replaces the recorded one. Raises ProgramFailed, Cancelled.
    """
    version, limit = model.parent, settings.algorithm.max_logprob_gap
    with job.using_directory(f"reading what {version.name} computes"):
        if not workplace.patiently(job, (version / checkpoints.MANIFEST).exists):
            return None
        known = workplace.patiently(job, partial(read_known, version))
    return known if known is None or limit is None else replace(known, limit=limit)


def _check_all(model: Path, job: RowJob) -> None:
    """Verify the model's folder. It must have no files beside those of the manifest, since an engine may load any file."""
    version, part = model.parent, f"{model.name}/"
    manifest = checkpoints.verify(version, part, job.live_on)
    for path in sorted(model.iterdir()):
        harmless = path.is_dir() or path.name.startswith(".") or path.suffix in NOT_LOADED
        if not harmless and f"{part}{path.name}" not in manifest.files:
            raise ProgramFailed(
                f"{path} is not listed in {checkpoints.MANIFEST}, and an engine might load it; move it away"
            )


def ready_lines(infos: Sequence[EngineInfo], **more: object) -> list[Payload]:
    """Lines for the journal about the replicas that were changed."""
    return [
        {
            "event": "engine_ready",
            "replica": number,
            **more,
            "engine_action": info.action,
            "engine_s": round(info.seconds, 3),
            **({"engine_note": info.note} if info.note else {}),
        }
        for number, info in enumerate(infos)
        if info.note or info.action != "kept"
    ]


@dataclass
class InFlight:
    """While a program runs, checks now and then whether a policy version is complete, and then loads it into this node's engines."""

    weights: Weights
    job: RowJob
    workplace: Workplace
    settings: Settings
    # The time of the next check; infinite once the engines have the version.
    next_look: float = 0.0

    def load_if_complete(self) -> None:
        """Load the version if it is complete and the last check is long enough ago. Raises ProgramFailed, Cancelled, OSError."""
        weights, job, workplace = self.weights, self.job, self.workplace
        if job.clock() < self.next_look:
            return
        self.next_look = job.clock() + LOOK_S
        with job.using_directory("looking for new weights"):
            if not workplace.patiently(job, partial(checkpoints.is_complete, weights.folder.parent)):
                return
        self.next_look = math.inf
        infos, lines = load_weights(weights, job, workplace, self.settings, in_flight=True)
        job.events += [*lines, *ready_lines(infos, serving=weights.policy_version, in_flight=True)]
