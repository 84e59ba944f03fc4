"""Finds the initial model of a run, and checks that it fits the settings and the tasks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.cli.start.preflight import absolute
from fsbarrier.engine.model import inspect, max_positions, sees, untrainable_parts
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.planning.model_shape import examine
from fsbarrier.settings.checks import answer_lengths, tied_head
from fsbarrier.store import reading

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

Environ = Mapping[str, str]
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def find_model(name: str, data_path: Path | None, environ: Environ) -> Path:
    """The folder of a Hugging Face model: a path, a folder below the data path, or a name in a local Hugging Face cache."""
    candidates = [absolute(name)]
    if data_path is not None:
        candidates.append(data_path / name)
    for candidate in candidates:
        if candidate.is_dir():
            _check_model(name, candidate)
            return candidate
        if candidate.is_file():
            raise UsageError(f"--model {name}: {candidate} is a file; give the folder with config.json")
    for cache in _caches(data_path, environ):
        snapshot = _cached(cache, name)
        if snapshot is not None:
            _check_model(name, snapshot)
            return snapshot
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise UsageError(
        f"--model {name}: no such folder (looked at {looked}, and in the local Hugging Face cache); nothing is "
        "downloaded: give a folder with config.json, weights and tokenizer"
    )


def _caches(data_path: Path | None, environ: Environ) -> list[Path]:
    home = absolute(environ.get("HF_HOME") or "~/.cache/huggingface")
    hub = environ.get("HF_HUB_CACHE")
    return [absolute(hub) if hub else home / "hub", *([data_path, data_path / "hub"] if data_path else [])]


def _cached(cache: Path, name: str) -> Path | None:
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None


def _check_model(name: str, folder: Path) -> None:
    try:
        # Also that each weight file is there, and as long as its header says.
        config = inspect(folder).config
    except ProgramFailed as error:
        raise UsageError(f"--model {name}: {error}; give a Hugging Face model folder") from None
    for holds, what in (
        ("model_type" in config, "has a config.json without a model_type"),
        (any((folder / file).is_file() for file in _TOKENIZERS), "has no tokenizer"),
    ):
        if not holds:
            raise UsageError(f"--model {name}: {folder} {what}; give a Hugging Face model folder")


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
    if sees(config) and settings.trainer.backend == "deepspeed":
        raise UsageError(
            f"trainer.backend=deepspeed: {folder} is a {config.get('model_type')} model, which takes images and is only trained with "
            "trainer.backend=torch"
        )


def check_lengths(folder: Path, settings: Settings) -> None:
    """Check that the longest answers leave room for a prompt in the model's context. Raises UsageError."""
    most = max_positions(json.loads((folder / "config.json").read_bytes()))
    for key, tokens in answer_lengths(settings):
        if most is not None and tokens >= most:
            raise UsageError(
                f"{key}={tokens}: leaves no room for a prompt, because the model supports only {most} positions "
                f"(max_position_embeddings in {folder / 'config.json'}); give {key} and engine.max_model_len smaller values"
            )


def try_model(folder: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Check that the adapters that are asked for can be put into the model, and that the trainer knows a model with eyes. Raises
    UsageError."""
    lora = settings.lora
    if lora.rank and any(one.rpartition(".")[2] == "lm_head" for one in lora.targets):
        try:
            tied = inspect(folder).tied
        except ProgramFailed as error:
            raise UsageError(str(error)) from None
        if tied:
            raise UsageError(tied_head(lora.targets))
    looks = sees(json.loads((folder / "config.json").read_bytes())) and settings.rl_phase != "rollout"
    has_torch = importlib.util.find_spec("torch") is not None
    if (lora.rank or looks) and settings.trainer.command is None and has_torch:
        what = (
            f"adapters of rank {lora.rank} on the model"
            if lora.rank
            else "to make this model that takes images"
        )
        say(f"trying {what} (this loads PyTorch and takes up to half a minute)")
        examine(folder, lora)
