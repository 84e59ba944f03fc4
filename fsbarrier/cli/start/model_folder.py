"""Finds the initial model of a run, and checks that it fits the settings and the tasks."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.cli.start.preflight import absolute
from fsbarrier.engine import answer_format
from fsbarrier.engine.answer_format import Parsers
from fsbarrier.engine.model import classifies, inspect, max_positions, sees, untrainable_parts
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.planning.model_shape import examine, run_check
from fsbarrier.settings.checks import answer_lengths
from fsbarrier.settings.value_types import ENGINE, TEACHER, frozen_engine, scoring_engines
from fsbarrier.store import reading

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

Environ = Mapping[str, str]
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def find_model(
    name: str,
    data_path: Path | None,
    environ: Environ,
    setting: str = "--model",
    tokenizer: Collection[str] = _TOKENIZERS,
) -> Path:
    """The folder of a Hugging Face model: a path, a folder below the data path, or a name in a local Hugging Face cache. It must have
    one of the files in `tokenizer`, if any are given."""
    named = f"{setting} {name}" if setting.startswith("--") else f"{setting}={name}"
    candidates = [absolute(name)]
    if data_path is not None:
        candidates.append(data_path / name)
    for candidate in candidates:
        if candidate.is_dir():
            _check_model(named, candidate, tokenizer)
            return candidate
        if candidate.is_file():
            raise UsageError(f"{named}: {candidate} is a file; give the folder with config.json")
    for cache in _caches(data_path, environ):
        snapshot = cached(cache, name, named)
        if snapshot is not None:
            _check_model(named, snapshot, tokenizer)
            return snapshot
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise UsageError(
        f"{named}: no such folder (looked at {looked}, and in the local Hugging Face cache); nothing is "
        "downloaded unless a run is started with --download: give a folder with config.json, weights and tokenizer"
    )


def is_here(name: str, data_path: Path | None, environ: Environ) -> bool:
    """Whether `find_model` would find a folder of this name."""
    folders = [absolute(name), *([data_path / name] if data_path else [])]
    return any(folder.exists() for folder in folders) or any(
        cached(cache, name, name) is not None for cache in _caches(data_path, environ)
    )


def hub_cache(environ: Environ) -> Path:
    """Where the client of the Hugging Face Hub keeps what it downloads."""
    hub = environ.get("HF_HUB_CACHE")
    return absolute(hub) if hub else absolute(environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"


def _caches(data_path: Path | None, environ: Environ) -> list[Path]:
    return [hub_cache(environ), *([data_path, data_path / "hub"] if data_path else [])]


def cached(cache: Path, name: str, named: str, kind: str = "models") -> Path | None:
    """The folder of a model, or of another kind of repository, in a cache: its main revision; if the cache has none, its only one.

    Raises UsageError if it has several."""
    folder = cache / f"{kind}--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    if revision and (folder / "snapshots" / revision).is_dir():
        return folder / "snapshots" / revision
    commits = sorted(path for path in folder.glob("snapshots/*") if path.is_dir())
    if len(commits) > 1:
        raise UsageError(
            f"{named}: {folder} has no refs/main and several commits ({', '.join(path.name for path in commits)}); "
            f"give the folder of one, such as {commits[0]}"
        )
    return commits[0] if commits else None


def _check_model(named: str, folder: Path, tokenizer: Collection[str]) -> None:
    try:
        # This also checks that each weight file is there, and as long as its header says.
        config = inspect(folder).config
    except ProgramFailed as error:
        raise UsageError(f"{named}: {error}; give a Hugging Face model folder") from None
    for holds, what in (
        ("model_type" in config, "has a config.json without a model_type"),
        (not tokenizer or any((folder / file).is_file() for file in tokenizer), "has no tokenizer"),
    ):
        if not holds:
            raise UsageError(f"{named}: {folder} {what}; give a Hugging Face model folder")


def with_engines_folders(settings: Settings, data_path: str | None, environ: Environ) -> Settings:
    """The settings with the folders of the models of the frozen engines and the critic. Raises UsageError."""
    engines, data = dict(settings.engines), Path(data_path) if data_path else None
    for name, engine in settings.engines.items():
        if engine.model is not None:
            folder = find_model(engine.model, data, environ, f"engines.{name}.model")
            # The folder may be a link in another run, which leads elsewhere when that run goes on.
            engines[name] = replace(engine, model=str(folder.resolve()))
    critic = settings.critic
    if critic.model is not None:
        # The critic gets the policy's tokens, so it needs no tokenizer.
        folder = find_model(critic.model, data, environ, "critic.model", ())
        critic = replace(critic, model=str(folder.resolve()))
    return replace(settings, engines=engines, critic=critic)


def check_engines(settings: Settings, policy: Path | None) -> None:
    """Check that the frozen engines, and the critic, can do what they are asked for. Raises UsageError."""
    if settings.critic.model is not None:
        _check_vocabulary("critic.model", Path(settings.critic.model), policy)
    # For each use of an engine: which setting names it, its name, whether scores are wanted, whether it is sent the policy's tokens.
    uses = [
        (f"reward.kind={ENGINE}{name}", name, True, True) for name in scoring_engines(settings.reward.kind)
    ]
    judge = frozen_engine(settings.judge.model)
    if judge is not None:
        uses.append((f"judge.model={settings.judge.model}", judge, False, False))
    if settings.algorithm.loss == "distil":
        uses.append(("algorithm.loss=distil", TEACHER, False, True))
    for use, name, scores, sends in uses:
        folder = Path(str(settings.engines[name].model))
        model = inspect(folder)
        if classifies(model) != scores:
            lack = "has no classifier head" if scores else "has a classifier head and writes no text"
            raise UsageError(f"{use}: {folder} {lack} (architectures in its config.json); use another model")
        if sends:
            _check_vocabulary(use, folder, policy)
        if name == judge and settings.judge.images != "none" and not sees(model.config):
            raise UsageError(
                f"judge.images={settings.judge.images}: the model {folder} takes none (no vision_config)"
            )
        most, longest = model.max_positions, settings.engine.max_model_len
        if name == TEACHER and most is not None and most <= longest:
            raise UsageError(
                f"engine.max_model_len={longest}: must be less than the {most} positions of {folder}, the teacher"
            )


def _check_vocabulary(named: str, folder: Path, policy: Path | None) -> None:
    """A model that is sent the policy's tokens must have the same. Raises UsageError."""
    ours, theirs = (_vocabulary(model) if model is not None else {} for model in (policy, folder))
    other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if theirs and other is not None:
        raise UsageError(
            f"{named}: is sent the policy's tokens, but the tokenizer of {folder} has another number for {other!r} than that of {policy}; "
            "use a model with the policy's tokenizer"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """The tokens of a model by their text; {} if it has no tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    content = reading.json_object(folder / "tokenizer.json", UsageError)
    listed = content.get("model", {}).get("vocab", {})
    pieces = (
        listed if isinstance(listed, dict) else {piece: number for number, (piece, _) in enumerate(listed)}
    )
    return {**pieces, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}


def check_trainable(folder: Path, settings: Settings) -> None:
    """Check that an update trains and publishes all of the model. Raises UsageError."""
    if settings.rl_phase == "rollout" or settings.trainer.command is not None:
        return
    config = reading.json_object(folder / "config.json", UsageError)
    if parts := untrainable_parts(config):
        raise UsageError(
            f"{folder} is a {config.get('model_type')} model with {' and '.join(parts)} beside text and images, which the trainer would "
            "lose: use another model, your own trainer (trainer.command), or --rl-phase rollout"
        )
    if sees(config) and settings.algorithm.has_critic:
        raise UsageError(
            f"algorithm.advantage=gae: {folder} is a {config.get('model_type')} model, which takes images; transformers has no critic of it"
        )
    _check_kind(folder, config)
    if settings.algorithm.has_critic:
        _check_critic(Path(settings.critic.model or folder))
    if sees(config) and settings.lora.serve == "adapter":
        raise UsageError(
            f"lora.serve=adapter: {folder} is a {config.get('model_type')} model, which takes images; engines serve it with merged "
            "adapters; use lora.serve=merged"
        )
    if sees(config) and settings.trainer.backend == "deepspeed":
        raise UsageError(
            f"trainer.backend=deepspeed: {folder} is a {config.get('model_type')} model, which takes images and is only trained with "
            "trainer.backend=torch"
        )


def _check_kind(folder: Path, config: Mapping[str, object]) -> None:
    """Check that transformers makes a model of this folder. Raises UsageError."""
    names = (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES" if sees(config) else "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    )
    kind = config.get("model_type")
    if (known := _kinds(names)) and kind not in known:
        raise UsageError(
            f"the model in {folder} cannot be loaded: the installed transformers has no language model of the kind {kind} (model_type in "
            "its config.json); use another model, a newer transformers, your own trainer (trainer.command), or --rl-phase rollout"
        )


def _check_critic(folder: Path) -> None:
    """Check that transformers makes a critic of the model in `folder`. Raises UsageError."""
    kind = reading.json_object(folder / "config.json", UsageError).get("model_type")
    if (known := _kinds("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES")) and kind not in known:
        raise UsageError(
            f"algorithm.advantage=gae: {folder} is a {kind} model, of which transformers has no critic (a token classifier); "
            "name a model of another kind with the policy's tokens (critic.model)"
        )


def _kinds(names: str) -> frozenset[str]:
    """The keys of this table of transformers, which is read and not imported, because an import loads PyTorch; none if it is not there."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / "models" / "auto" / "modeling_auto.py"
        for node in ast.parse(file.read_bytes()).body if file.is_file() else ():
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [names]:
                pairs = ast.literal_eval(node.value.args[0]) if isinstance(node.value, ast.Call) else ()
                return frozenset(kind for kind, _ in pairs)
    return frozenset()


def check_lengths(folder: Path, settings: Settings) -> None:
    """Check that the longest answers leave room for a prompt in the model's context. Raises UsageError."""
    most = max_positions(json.loads((folder / "config.json").read_bytes()))
    for key, tokens in answer_lengths(settings):
        if most is not None and tokens >= most:
            raise UsageError(
                f"{key}={tokens}: leaves no room for a prompt, because the model supports only {most} positions "
                f"(max_position_embeddings in {folder / 'config.json'}); give {key} and engine.max_model_len smaller values"
            )


def try_model(folder: Path, settings: Settings, say: Callable[[str], None]) -> str:
    """Check that the adapters that are asked for can be put into the model, and that the trainer knows a vision model. Raises
    UsageError. Returns why the model cannot be given images, as far as that was tried."""
    lora = settings.lora
    looks = sees(json.loads((folder / "config.json").read_bytes())) and settings.rl_phase != "rollout"
    has_torch = importlib.util.find_spec("torch") is not None
    if (lora.rank or looks) and settings.trainer.command is None and has_torch:
        what = (
            f"adapters of rank {lora.rank} on the model"
            if lora.rank
            else "to make this model that takes images"
        )
        say(f"trying {what} (this loads PyTorch and takes up to half a minute)")
        return examine(folder, lora).blind
    return ""


def try_renderer(folder: Path, settings: Settings, needs: Collection[str]) -> None:
    """Check that the renderer that is asked for fits the model, if this program samples and the package is installed here. Raises
    UsageError."""
    name = settings.rollout.named_renderer
    if name is None or "data" not in needs or settings.rl_phase == "update":
        return
    if importlib.util.find_spec("renderers") is None:
        # node_checks refuses this on each node, with the command that installs it.
        return
    arguments = json.dumps(settings.rollout.template_arguments)
    what = f"rollout.renderer={name}: loading it for {folder}"
    run_check(what, "fsbarrier.rollouts.renderer", name, str(folder), arguments)


def say_how_answers_are_read(folder: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Say how a rollout will read the model's thoughts and calls. Only after all checks, since a refused start says one line."""
    if settings.rl_phase == "update":
        return
    parsers, agent = Parsers.of(settings.rollout), settings.rollout.agent is not None
    for line in answer_format.told(folder, parsers, agent=agent):
        say(line)
