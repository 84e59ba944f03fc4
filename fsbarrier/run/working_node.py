"""Carries out the calls of a row's function, in the job's thread. fsbarrier/node.py describes the interface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from fsbarrier.context import Context
from fsbarrier.decisions import JsonRecord, PublishDecision
from fsbarrier.engine.frozen import address
from fsbarrier.errors import ProgramFailed
from fsbarrier.network.listening import LOOPBACK, port_of
from fsbarrier.node import Node, Port, Publication, Weights
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.run.job import RowJob, Workplace, plain_values
from fsbarrier.run.weights import load_weights, ready_lines
from fsbarrier.run.worker_program import ProgramRun
from fsbarrier.rundir import checkpoints, journal, retention
from fsbarrier.specs import EngineAddress, Launch, PolicyEngine, Spec
from fsbarrier.store import files

R = TypeVar("R", bound=JsonRecord)


@dataclass(frozen=True)
class WorkingNode(Node):
    """Each call raises Cancelled, NodeUnfit, FsbarrierError, and any other exception of the work."""

    context: Context
    job: RowJob
    workplace: Workplace

    @property
    def log_dir(self) -> Path:  # type: ignore[override]
        return self.workplace.log_dir

    @property
    def weights_dir(self) -> Path | None:  # type: ignore[override]
        copy = self.workplace.weights
        return None if copy is None else copy.folder

    def seeing(self, context: Context) -> Self:
        return replace(self, context=context)

    def event(self, name: str, *fields: JsonRecord | Mapping[str, object]) -> None:
        if name in journal.OWN:
            raise TypeError(f"the event {name!r} is one that daemons write themselves; choose another name")
        line: JsonObject = {}
        for some in fields:
            line |= plain_values(some.as_json()) if isinstance(some, JsonRecord) else some
        # Refuse values that are not JSON here, where the traceback shows the row's function.
        json.dumps(line)
        self.job.events.append({**line, "event": name})

    # --- programs ---

    def run(
        self,
        spec: Spec[R],
        launch: Launch | None = None,
        *,
        in_flight: Weights | None = None,
        calls_engines: bool = False,
    ) -> R:
        started = ProgramRun(
            launch or spec.launch,
            spec.as_json(),
            self.context,
            self.job,
            self.workplace,
            in_flight=in_flight,
            calls_engines=calls_engines,
        )
        result = started.run()
        self.job.add_times(result)
        return spec.report_type().from_json(result)

    def command(self, launch: Launch, spec: JsonRecord | None = None) -> None:
        own = {} if spec is None else spec.as_json()
        program_spec = {**self.context.identity.as_json(), **own}
        ProgramRun(launch, program_spec, self.context, self.job, self.workplace, reports=False).run()

    # --- engines ---

    def serve(self, weights: Weights) -> tuple[PolicyEngine, ...]:
        job, workplace = self.job, self.workplace
        job.stop_if_cancelled()
        serving = f"waiting for vLLM to serve policy version {weights.policy_version}"
        job.progress = {"note": serving}

        def show(ready: int) -> None:
            job.progress = {"note": f"{serving}, {ready} ready"}

        infos, lines = load_weights(weights, job, workplace, self.context.settings, show=show)
        # There are lines only if the weights have just been verified, which is once after each update.
        source = {"weights_from": lines[-1]["weights_from"]} if lines else {}
        ready = ready_lines(infos, serving=weights.policy_version, **source)
        job.events += [*(line for line in lines if line["note"]), *ready]
        job.add_times({"engine_s": round(max(info.seconds for info in infos), 3)})
        return tuple(PolicyEngine(info.url, info.api_key, info.model) for info in infos)

    def serve_frozen(self, name: str, *, threads: int, devices: tuple[int, ...] | None) -> None:
        self.job.stop_if_cancelled()
        engine, folder = self.workplace.frozen[name], self.context.settings.engines[name].model
        self.job.progress = {"note": f"waiting for vLLM to serve engines.{name}"}
        infos = engine.ensure(Path(str(folder)), devices, threads=threads, cancel=self.job.cancel)
        self.job.events += ready_lines(infos, engine=name)

    def frozen_engines(self) -> Mapping[str, EngineAddress]:
        own = {name: self.workplace.frozen[name].address for name in self.context.frozen}
        elsewhere = [name for name in self.context.settings.engines if name not in own]
        return own | {name: self._offered(name) for name in elsewhere}

    def _offered(self, name: str) -> EngineAddress:
        """The address of an engine on another node. The choice depends on this node's rank. Raises ProgramFailed if none can be
        reached."""
        context = self.context
        holders, patience_s = [*context.holders_of(name)], context.settings.engines[name].start_timeout_s
        tried = []
        for turn in range(len(holders)):
            join = context.joins[holders[(context.node_rank + turn) % len(holders)]]
            offer = join.engines.get(name)
            if offer is None:
                continue
            reached = self.workplace.host.reachable(join.addresses, int(offer["port"]))
            if reached:
                return address(reached[0], offer, name, patience_s)
            tried.append(
                f"node {join.rank} ({join.host}) at {', '.join(join.addresses)} port {offer['port']}"
            )
        raise ProgramFailed(
            f"engines.{name} is not reached: {'; '.join(tried) or 'no node offers it to others'}"
        )

    def release_engines(self, frozen: Sequence[str] = ()) -> JsonObject:
        self.job.stop_if_cancelled()
        cancel, engines = self.job.cancel, self.workplace.engines
        for name in frozen:
            released = self.workplace.frozen[name].release(cancel=cancel)
            self.job.events.append({"event": "engine_released", "engine": name, **released})
        return engines.release(cancel=cancel) if engines else {}

    # --- the meeting of an update's programs ---

    def listen(self, addresses: tuple[str, ...]) -> Port:
        self.job.stop_if_cancelled()
        workplace = self.workplace
        workplace.close_rendezvous()
        workplace.rendezvous = workplace.host.listen(addresses)
        port = port_of(workplace.rendezvous[0])
        if addresses != LOOPBACK:
            self.job.events.append({"event": "listens", "port": port})
        return port

    def reachable(self, addresses: tuple[str, ...], port: Port) -> Sequence[str]:
        self.job.stop_if_cancelled()
        return self.workplace.host.reachable(addresses, int(port))

    # --- publications ---

    def _refuse_if_outdated(self) -> None:
        """Check, right before a step that publishes a result, that this generation is still the newest. Raises ProgramFailed, OSError.

        Example: the leader's host is suspended for a minute, and the others go on as the next generation and publish new weights. When
        the old leader wakes up, it must not replace them with its own. Nobody reads its failure, which is fine.
        """
        generation = self.context.generation
        if self.context.newest() > generation:
            raise ProgramFailed(f"generation {generation} has ended; nothing of it is published any more")

    def publish_file(self, source: Path, name: Path) -> None:
        job = self.job
        job.stop_if_cancelled()
        with job.using_directory(f"publishing {name.name}"):
            self.workplace.patiently(job, partial(files.link, source, name, self._refuse_if_outdated))

    def publish_weights(self, publication: Publication) -> PublishDecision:
        """Each node that serves the version verifies its content before an engine loads it."""
        job, folder, best = self.job, publication.folder, publication.best
        job.stop_if_cancelled()
        with job.using_directory(f"publishing {folder.name}"):
            log_path, last_look = self.workplace.log_path, self._refuse_if_outdated
            patiently = partial(self.workplace.patiently, job)
            manifest = patiently(partial(checkpoints.check_sizes, folder))
            publish_link = partial(checkpoints.publish_link, log_path, folder, last_look)
            # model.pt names the newest version that any program can load.
            patiently(publish_link if manifest.whole else last_look)
            known = folder.name, manifest.digest, best, publication.previous
            decision = PublishDecision(publication.policy_version, *known)
            best_fields = {"best_policy_version": best.version, "best_reward": best.reward} if best else {}
            moved = {**checkpoints.moved_bytes(manifest), "updates_at_risk": len(manifest.trained_since)}
            self.event("weights_published", decision, best_fields, moved)
            patiently(last_look)
            best_folder = best.folder if best is not None else None
            retention.remove_old_versions(
                log_path, publication.keep, folder, publication.keep_every, best_folder, job.live_on
            )
            patiently(last_look)
            removed = retention.remove_old(
                log_path,
                publication.trained_on,
                batches=publication.keep_batches,
                trajectories=publication.keep_trajectories,
                between=job.live_on,
            )
            if removed:
                self.event("trajectories_removed", {"iterations": removed})
            return decision
