"""Tries a policy that a run has trained, with the run's own settings: for `fsbarrier eval`, `serve` and `chat`.

An evaluation is a small run of its own, in a folder that is removed. `serve` and `chat` start one engine of this node, as a run would.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.cli.start import policy_export
from fsbarrier.cli.start.policy_export import VersionToExport
from fsbarrier.engine import accelerators
from fsbarrier.engine.answer_format import Parsers
from fsbarrier.engine.engine import Engine, EngineInfo
from fsbarrier.engine.placement import check_arguments, placements
from fsbarrier.errors import UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force, newest_settings
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings, known_names
from fsbarrier.settings.sources import ChosenValue, from_words, name_in
from fsbarrier.settings.value_types import frozen_engine, scoring_engines
from fsbarrier.store import trusted_folder
from fsbarrier.store.local_folders import scratch_dir, user_dir

#: the groups of settings that say how a policy answers and how its answers are scored
GROUPS = ("eval.", "reward.", "judge.", "engine.", "environment.", "environments.", "custom.")
#: the settings of the rollout that say it too; the others are about training
ROLLOUT = (
    *("max_tokens", "stop", "chat_template_kwargs", "tool_parser", "concurrency", "agent", "task_timeout_s"),
    *("max_error_share", "seed", "reproducible", "temperature", "reasoning_parser", "thinking"),
    *("max_thinking_tokens", "renderer"),
)


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """A policy version of a run, and the settings of the run that say how it answers, by dotted name."""

    record: RunRecord
    chosen: VersionToExport
    kept: Mapping[str, object]

    @property
    def named(self) -> str:
        return f"policy version {self.chosen.version} of run {self.record.run_id}"

    def settings(self, words: Sequence[str]) -> Settings:
        """The run's settings, changed by `key=value` words. Raises UsageError."""
        return resolve(from_words(words, known_names()), self.kept, cross_checks=False)


def find(log_path: Path, version: int | None, *, shared_group: bool, trust_mount: bool) -> TrainedPolicy:
    """A policy version (None: the one that the run serves now). Raises UsageError, also if somebody else could have written the run,
    whose settings name programs; ProgramFailed if the version is incomplete."""
    trusted_folder.check(
        log_path,
        shared_group=shared_group,
        trust_mount=trust_mount,
        named="--log-path",
        inside=runrecord.STEERING,
    )
    record = runrecord.load(log_path)
    chosen = policy_export.find(record, version, "--version")
    settings = in_force(record.settings, newest_settings(record.paths))
    return TrainedPolicy(record, chosen, _kept(settings))


def _kept(settings: Settings) -> dict[str, object]:
    judge = frozen_engine(settings.judge.model)
    scorers = {*scoring_engines(settings.reward.kind), *([judge] if judge else [])}
    kept: dict[str, object] = {"debug_mode": settings.debug_mode}
    for name, value in settings.flat().items():
        scores = name.startswith("engines.") and name_in(name) in scorers
        if value in ({}, None) or name == "engine.nodes" or name.endswith(".placement"):
            continue
        if name.startswith(GROUPS) or name in {f"rollout.{leaf}" for leaf in ROLLOUT} or scores:
            kept[name] = value
    return kept


# --- an evaluation as a run of its own --------------------------------------------------------------------------------------------


def evaluation(
    policy: TrainedPolicy, model: Path, words: Sequence[str], data: Path | None, log_path: Path
) -> tuple[tuple[ChosenValue, ...], dict[str, object]]:
    """What a user would choose for a run in `log_path` that only evaluates this policy, and the defaults below that.

    `model`: the policy's folder, with all weights. `data`: a task file to use instead of the run's, or a folder with a test file.
    Raises UsageError.
    """
    recorded, kept = policy.record.settings, dict(policy.kept)
    data_path = str(recorded.data_path) if recorded.data_path is not None else None
    if data is not None:
        kept = {name: value for name, value in kept.items() if not name.startswith("eval.sets.")}
        data_path = str(data if data.is_dir() else data.parent)
        if not data.is_dir():
            kept[f"eval.sets.{re.sub('[^A-Za-z0-9_-]', '_', data.stem)}.file"] = str(data)
    if data_path is None:
        raise UsageError("--data: this run has no task files of its own; name one")
    own_program = recorded.program.endswith(".py")
    values: dict[str, object] = {
        "log_path": str(log_path),
        "data_path": data_path,
        "model": str(model),
        "program": recorded.program if own_program else "rl",
        "rl_phase": "rollout",
        "rollout_split": "eval-only",
        "iterations": 1,
    }
    chosen = [ChosenValue(name, value, f"--{name.replace('_', '-')}") for name, value in values.items()]
    return (*chosen, *from_words(words, known_names())), kept


# --- one engine -------------------------------------------------------------------------------------------------------------------


@contextmanager
def served(
    chosen: VersionToExport, settings: Settings, *, external: bool = False, api_key: str = ""
) -> Iterator[tuple[EngineInfo, Engine]]:
    """An engine that serves the policy version, on the first accelerators of this node, until the block ends. `external`: use the server
    at `engine.url` instead. `api_key`: "": a new one. Raises UsageError, ProgramFailed."""
    wanted = replace(settings.engine, replicas=1)
    if not external:
        check_arguments(wanted)
    devices, cpus = accelerators.detect(), sorted(os.sched_getaffinity(0))
    placement = {} if external else placements(wanted, devices, os.environ, cpus)[0]
    with scratch_dir(user_dir(), "serve") as folder:
        engine = Engine(
            wanted,
            external=external,
            log_file=folder / "vllm.log",
            work_dir=folder,
            placement=placement,
            secrets_named=(settings.judge.api_key_env, settings.engine.api_key_env),
            parsers=Parsers.of(settings.rollout),
            api_key=api_key,
        )
        model = chosen.model if external else policy_export.made_whole(chosen, folder / "model")
        try:
            yield engine.ensure(model, chosen.version, cancel=threading.Event()), engine
        finally:
            engine.stop()
