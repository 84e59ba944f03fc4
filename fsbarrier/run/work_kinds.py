"""All about each kind of work that a row may ask for: how it is done, how a dry run describes it, and what is known of its result before.

KINDS, at the end, is the table. run/job_runner.py does the work in a thread; cli/start/dryrun.py describes it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsbarrier.decisions import PublishDecision
from fsbarrier.engine import accelerators, command, model, tool_format
from fsbarrier.engine.placement import replicas
from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.rendezvous import LOOPBACK, port_of
from fsbarrier.program import (
    Command,
    Context,
    OpenRendezvous,
    ProbeAddresses,
    PublishFile,
    PublishWeights,
    ReleaseEngine,
    ServeFrozen,
    ServeWeights,
    Steps,
    Value,
    Work,
)
from fsbarrier.protocol.facts import Payload
from fsbarrier.run.job import Result, RowJob, Workplace, journal_line
from fsbarrier.run.weights import checked_weights, ready_lines
from fsbarrier.run.worker_program import run_program
from fsbarrier.rundir import checkpoints, journal, retention
from fsbarrier.settings.sections import ServerSettings, Settings
from fsbarrier.store import files

# What a dry run shows in place of values that are only known in a run, and how much of a value.
PORT, SOCKET, SHOWN_CHARACTERS = "PORT", "SOCKET", 160


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of work. `expected`: its result, as far as it is known in advance."""

    run: Callable[[Any, Context, RowJob, Workplace], Result]
    describe: Callable[[Any, Settings], list[str]]
    expected: Callable[[Any], Mapping[str, object]] = lambda work: {}


def execute(work: Work, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Do `work`; returns its result. Raises Cancelled, NodeUnfit, FsbarrierError, and any other exception of the work."""
    job.stop_if_cancelled()
    return KINDS[type(work)].run(work, context, job, workplace)


def describe(work: Work, settings: Settings) -> list[str]:
    """The work as text, with placeholders for values that are only known in a run."""
    return KINDS[type(work)].describe(work, settings)


def expected(work: Work) -> Mapping[str, object]:
    """The result of the work, as far as it is known in advance."""
    return KINDS[type(work)].expected(work)


# --- values and steps -------------------------------------------------------------------------------------------------------


def _give_value(work: Value, context: Context, job: RowJob, workplace: Workplace) -> Result:
    job.events += _checked_lines(work.events)
    return dict(work.value)


def _describe_value(work: Value, settings: Settings) -> list[str]:
    text = json.dumps(work.value, default=str)
    return (
        [f"decide {text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}...'}"]
        if work.value
        else []
    )


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


def _run_steps(work: Steps, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """The merged results."""
    merged: Result = {}
    for step in work.works:
        merged |= execute(step, context, job, workplace)
    return merged


# --- the engines ------------------------------------------------------------------------------------------------------------


def _serve_weights(work: ServeWeights, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Make all of this node's engines serve one policy version; returns when they do."""
    serving = f"engine: policy version {work.policy_version}"
    job.progress = {"note": serving}
    folder, lines = checked_weights(work.folder, job, workplace, work.policy)

    def show(ready: int) -> None:
        job.progress = {"note": f"{serving}, {ready} ready"}

    workplace.own_engines.use(work.devices)
    infos = workplace.own_engines.ensure(
        folder, work.policy_version, threads=work.threads, cancel=job.cancel, show=show, span=work.span
    )
    workplace.engine_access = [{"url": i.url, "api_key": i.api_key, "model": i.model} for i in infos]
    # Known only if the weights have just been verified: once after each update.
    source = {"weights_from": lines[-1]["weights_from"]} if lines else {}
    ready = ready_lines(infos, serving=work.policy_version, **source)
    job.events += [*(line for line in lines if line["note"]), *ready]
    return {
        "engines": len(infos),
        "engine_s": round(max(info.seconds for info in infos), 3),
    }


def _serve_frozen(work: ServeFrozen, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Make this node's servers of a frozen engine answer; returns when they do."""
    engine, folder = workplace.frozen[work.name], context.settings.engines[work.name].model
    job.progress = {"note": f"engines.{work.name}: starting"}
    infos = engine.ensure(Path(str(folder)), work.devices, threads=work.threads, cancel=job.cancel)
    job.events += ready_lines(infos, engine=work.name)
    return {}


def _describe_frozen(work: ServeFrozen, settings: Settings) -> list[str]:
    own = settings.engines[work.name]
    return [
        f"engines.{work.name}: serve {own.model}",
        *_servers(Path(str(own.model)), own, work.threads, work.name),
    ]


def _describe_serving(work: ServeWeights, settings: Settings) -> list[str]:
    """With the vLLM command line on this machine. Later policy versions are loaded into the running server."""
    serve = f"engine: serve {work.folder} as policy version {work.policy_version}"
    if work.policy_version:
        return [serve]
    if settings.debug_mode:
        return [serve, "engine: use your own server (--debug-mode)"]
    if not work.folder.is_dir():
        return [serve, "engine: start vLLM on the model, once the run has created it"]
    wanted, known = settings.rollout.tool_parser, tool_format.recognised(work.folder)
    parser = tool_format.parser_of(work.folder, wanted)
    how = (
        "rollout.tool_parser"
        if wanted
        else "by the chat template"
        if known
        else "the chat template names none"
    )
    calls = [f"calls of tools: read by vLLM's parser {parser} ({how})"] if settings.rollout.agent else []
    return [serve, *calls, *_servers(work.folder, settings.engine, work.threads, tool_parser=parser)]


def _servers(
    folder: Path,
    settings: ServerSettings,
    threads: int,
    name: str = command.SERVED_NAME,
    tool_parser: str = "",
) -> list[str]:
    """The command line of a server on this machine, and how many there are."""
    devices = accelerators.detect()
    count = replicas(settings, len(devices))
    plan = command.ServerPlan(
        python=sys.executable,
        model=model.inspect(folder),
        settings=settings,
        socket=SOCKET,
        seed=0,
        accelerated=bool(devices),
        sleeps=False,
        threads=max(1, threads // count),
        served_name=name,
        tool_parser=tool_parser,
    )
    words = command.argv(plan)
    words[words.index("--seed") + 1] = "SEED"
    own = [f"engine: {count} servers like this, each on its own accelerators or cores"] if count > 1 else []
    return [*own, shlex.join(words)]


def _release_engine(work: ReleaseEngine, context: Context, job: RowJob, workplace: Workplace) -> Result:
    for name in work.frozen:
        job.events.append(
            {"event": "engine_released", "engine": name, **workplace.frozen[name].release(cancel=job.cancel)}
        )
    return workplace.engines.release(cancel=job.cancel) if workplace.engines else {}


# --- the meeting of an update's programs ------------------------------------------------------------------------------------


def _open_rendezvous(work: OpenRendezvous, context: Context, job: RowJob, workplace: Workplace) -> Result:
    workplace.close_rendezvous()
    workplace.rendezvous = workplace.host.listen(work.addresses)
    port = port_of(workplace.rendezvous[0])
    if work.addresses != LOOPBACK:
        job.events.append({"event": "listens", "port": port})
    return {"port": port}


def _describe_rendezvous(work: OpenRendezvous, settings: Settings) -> list[str]:
    where = "loopback only" if work.addresses == LOOPBACK else "all interfaces"
    return [f"listen on a free port ({where}) for the update"]


def _probe_addresses(work: ProbeAddresses, context: Context, job: RowJob, workplace: Workplace) -> Result:
    return {"reached": workplace.host.reachable(work.addresses, int(work.port))}


# --- publications -----------------------------------------------------------------------------------------------------------


def _refuse_if_outdated(context: Context) -> None:
    """Check, right before a step that publishes a result, that this generation is still the newest. Raises ProgramFailed, OSError.

    Example: the leader's host is suspended for a minute, and the others go on as the next generation and publish new weights. When
    the old leader wakes up, it must not replace them with its own. Nobody reads its failure, which is fine.
    """
    if context.newest() > context.generation:
        raise ProgramFailed(f"generation {context.generation} has ended; nothing of it is published any more")


def _publish_file(work: PublishFile, context: Context, job: RowJob, workplace: Workplace) -> Result:
    last_look = partial(_refuse_if_outdated, context)
    with job.using_directory(f"publishing {work.name.name}"):
        workplace.patiently(job, partial(files.link, work.source, work.name, last_look))
    return {}


def _publish_weights(work: PublishWeights, context: Context, job: RowJob, workplace: Workplace) -> Result:
    """Check that the new policy version is complete, publish it, then remove old versions.

    Each node that serves it verifies its content before an engine loads it.
    """
    with job.using_directory(f"publishing {work.folder.name}"):
        log_path, last_look = workplace.log_path, partial(_refuse_if_outdated, context)
        patiently = partial(workplace.patiently, job)
        manifest = patiently(partial(checkpoints.check_sizes, work.folder))
        patiently(partial(checkpoints.publish_link, log_path, work.folder, last_look))
        known = work.folder.name, manifest.digest, work.best, work.previous
        decision = PublishDecision(work.policy_version, *known)
        value = decision.as_json()
        best = (
            {"best_policy_version": work.best.version, "best_reward": work.best.reward} if work.best else {}
        )
        job.events.append(journal_line("weights_published", {**value, **best}))
        patiently(last_look)
        best_folder = work.best.folder if work.best is not None else None
        retention.remove_old_versions(
            log_path, work.keep, work.folder, work.keep_every, best_folder, job.live_on
        )
        patiently(last_look)
        removed = retention.remove_old(
            log_path,
            work.trained_on,
            # Without the processes that hold the trainer's state, an update trains these again.
            batches=work.keep and max(work.keep, context.settings.checkpoint.trainer_every),
            trajectories=work.keep_trajectories,
            between=job.live_on,
        )
        if removed:
            job.events.append({"event": "trajectories_removed", "iterations": removed})
        return value


def _describe_publication(work: PublishWeights, settings: Settings) -> list[str]:
    every = f", every {work.keep_every}th" if work.keep_every else ""
    kept = f"keep the newest {work.keep}{every}, and the best evaluated"
    return [f"verify {work.folder}, publish it as policy version {work.policy_version}, {kept}"]


# --- programs ---------------------------------------------------------------------------------------------------------------


def _describe_command(work: Command, settings: Settings) -> list[str]:
    words = [f"{name}={value}" for name, value in work.env.items()]
    return [shlex.join([*words, *(word.replace("{spec}", "SPEC.json") for word in work.argv)])]


# --- the table --------------------------------------------------------------------------------------------------------------

KINDS: Mapping[type[Any], Kind] = {
    Value: Kind(_give_value, _describe_value, lambda work: work.value),
    Steps: Kind(
        _run_steps,
        lambda work, settings: [text for step in work.works for text in describe(step, settings)],
        lambda work: {key: value for step in work.works for key, value in expected(step).items()},
    ),
    Command: Kind(run_program, _describe_command, lambda work: work.extra),
    ServeWeights: Kind(_serve_weights, _describe_serving),
    ServeFrozen: Kind(_serve_frozen, _describe_frozen),
    ReleaseEngine: Kind(_release_engine, lambda work, settings: ["engine: free the accelerator's memory"]),
    OpenRendezvous: Kind(_open_rendezvous, _describe_rendezvous, lambda work: {"port": PORT}),
    ProbeAddresses: Kind(
        _probe_addresses,
        lambda work, settings: [f"connect to {', '.join(work.addresses)} port {work.port}"],
        lambda work: {"reached": list(work.addresses)},
    ),
    PublishFile: Kind(_publish_file, lambda work, settings: [f"publish {work.source} as {work.name}"]),
    PublishWeights: Kind(
        _publish_weights,
        _describe_publication,
        lambda work: {"folder": work.folder.name, "policy_version": work.policy_version},
    ),
}
