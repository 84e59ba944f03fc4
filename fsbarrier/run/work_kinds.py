"""Does the work that a row asks for, with one function for each kind of work. run/job_runner.py calls it in a thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from fsbarrier.decisions import PublishDecision
from fsbarrier.errors import ProgramFailed
from fsbarrier.host.rendezvous import LOOPBACK, port_of
from fsbarrier.program import (
    Command,
    Context,
    OpenRendezvous,
    ProbeAddresses,
    PublishFile,
    PublishWeights,
    ReleaseEngine,
    ServeWeights,
    Steps,
    Value,
    Work,
)
from fsbarrier.protocol.facts import Payload
from fsbarrier.run.job import Result, RowJob, Workplace, journal_line
from fsbarrier.run.weights import checked_weights
from fsbarrier.run.worker_program import run_program
from fsbarrier.rundir import checkpoints, journal, retention
from fsbarrier.store import files


def carry_out(work: Work, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Do `work`; returns its result. Raises Cancelled, NodeUnfit, FsbarrierError, and any other exception of the work."""
    job.stop_if_cancelled()
    match work:
        case Value(value, events):
            job.events += _checked_lines(events)
            return dict(value)
        case Steps(works):
            return _one_after_the_other(works, context, job, workplace)
        case ServeWeights():
            return _serve_weights(work, context, job, workplace)
        case ReleaseEngine():
            return workplace.engines.release(cancel=job.cancel) if workplace.engines else {}
        case OpenRendezvous(addresses):
            workplace.close_rendezvous()
            workplace.rendezvous = workplace.host.listen(addresses)
            port = port_of(workplace.rendezvous[0])
            if addresses != LOOPBACK:
                job.events.append({"event": "listens", "port": port})
            return {"port": port}
        case ProbeAddresses(addresses, port):
            return {"reached": workplace.host.reachable(addresses, port)}
        case PublishWeights():
            with job.using_directory(f"publishing {work.folder.name}"):
                return _publish_weights(work, context, job, workplace)
        case PublishFile(source, name):
            with job.using_directory(f"publishing {name.name}"):
                last_look = partial(_refuse_if_outdated, context)
                workplace.patiently(job, partial(files.link_or_copy, source, name, last_look, job.live_on))
            return {}
        case Command():
            return run_program(work, context, job, workplace)


def _checked_lines(events: object) -> list[Payload]:
    """The user's lines for the journal. Raises TypeError for what is none."""
    given = events if isinstance(events, list | tuple) else (events,)
    lines = [line for line in given if isinstance(line, Mapping) and isinstance(line.get("event"), str)]
    if len(lines) < len(given):
        raise TypeError(
            'the events of a Value are lines for the journal, a list of objects with an "event" each'
        )
    if taken := sorted({line["event"] for line in lines} & journal.OWN):
        raise TypeError(f"the event {taken[0]!r} is one that daemons write themselves; choose another name")
    json.dumps(lines)
    return lines


def _one_after_the_other(
    works: tuple[Work, ...], context: Context, job: RowJob, workplace: Workplace
) -> Result:
    """The merged results."""
    merged: Result = {}
    for work in works:
        merged |= carry_out(work, context, job, workplace)
    return merged


def _serve_weights(work: ServeWeights, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Make all of this node's engines serve one policy version; returns when they do."""
    serving = f"engine: policy version {work.policy_version}"
    job.progress = {"note": serving}
    folder, lines = checked_weights(work.folder, job, workplace, work.policy)
    published = context.published if context.node_rank == context.leader else None
    if published is not None and published.folder_name == work.folder.parent.name:
        with job.using_directory("looking at model.pt"):
            mend = partial(checkpoints.mend_link, workplace.log_path, work.folder.parent)
            workplace.patiently(job, partial(mend, partial(_refuse_if_outdated, context)))

    def show(ready: int) -> None:
        job.progress = {"note": f"{serving}, {ready} ready"}

    infos = workplace.own_engines.ensure(
        folder, work.policy_version, threads=work.threads, cancel=job.cancel, show=show
    )
    workplace.engine_access = [{"url": i.url, "api_key": i.api_key, "model": i.model} for i in infos]
    # Known only if the weights have just been verified: once after each update.
    source = {"weights_from": lines[-1]["weights_from"]} if lines else {}
    ready = [
        {
            "event": "engine_ready",
            "replica": number,
            "serving": work.policy_version,
            "engine_action": info.action,
            "engine_s": round(info.seconds, 3),
            **source,
            **({"engine_note": info.note} if info.note else {}),
        }
        for number, info in enumerate(infos)
        if info.note or info.action != "kept"
    ]
    job.events += [*(line for line in lines if line["note"]), *ready]
    return {
        "engines": len(infos),
        "engine_s": round(max(info.seconds for info in infos), 3),
    }


def _refuse_if_outdated(context: Context) -> None:
    """Check, right before a step that publishes a result, that this generation is still the newest. Raises ProgramFailed, OSError.

    Example: the leader's host is suspended for a minute, and the others go on as the next generation and publish new weights. When
    the old leader wakes up, it must not replace them with its own. Nobody reads its failure, which is fine.
    """
    if context.newest() > context.generation:
        raise ProgramFailed(f"generation {context.generation} has ended; nothing of it is published any more")


def _publish_weights(work: PublishWeights, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Check that the new policy version is complete, publish it, then remove old versions.

    Each node that serves it verifies its content before an engine loads it.
    """
    log_path, last_look = workplace.log_path, partial(_refuse_if_outdated, context)
    patiently = partial(workplace.patiently, job)
    manifest = patiently(partial(checkpoints.check_sizes, work.folder))
    patiently(partial(checkpoints.publish_link, log_path, work.folder, last_look))
    decision = PublishDecision(work.policy_version, str(work.folder), manifest.digest, work.best)
    value = decision.as_json()
    job.events.append(journal_line("weights_published", value))
    patiently(last_look)
    needed = (work.best.folder if work.best is not None else None, manifest.state_in)
    retention.remove_old_versions(log_path, work.keep, work.folder, work.keep_every, needed, job.live_on)
    patiently(last_look)
    removed = retention.remove_old(
        log_path,
        work.trained_on,
        batches=work.keep,
        trajectories=work.keep_trajectories,
        between=job.live_on,
    )
    if removed:
        job.events.append({"event": "trajectories_removed", "iterations": removed})
    return value
