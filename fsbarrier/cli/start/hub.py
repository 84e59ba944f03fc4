"""Fetches a model or tasks from the Hugging Face Hub, if the user asks for it with --download, into the local cache of its client.

Without the flag only the cache is looked at, so nothing is downloaded silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fsbarrier.cli.start import model_folder
from fsbarrier.errors import UsageError, first_line
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.sources import DATA_ON_HUB, ChosenValue

#: a name on the hub
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: the files of tasks that are read; a data set may have many others
_TASK_FILES = ["*.jsonl", "*.parquet"]
#: weights in other formats than safetensors, which nothing here reads
_NOT_NEEDED = ["*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "original/*"]


def with_downloads(
    typed: Settings,
    chosen: Mapping[str, ChosenValue],
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    dry_run: bool,
) -> tuple[Settings, dict[str, ChosenValue]]:
    """The settings and choices with the local folder of tasks on the hub (`--data-path hf:ORG/NAME`); with --download, what is missing is
    fetched first, the model too. Raises UsageError."""
    found, may = dict(chosen), typed.download and not dry_run
    data_path = typed.data_path
    if data_path is not None and data_path.startswith(DATA_ON_HUB):
        name = data_path.removeprefix(DATA_ON_HUB)
        folder = _tasks(name, chosen["data_path"].written(data_path), environ, say, may=may)
        data_path = str(folder)
        found["data_path"] = replace(chosen["data_path"], value=data_path)
    if typed.model is not None and may and _NAME.fullmatch(typed.model):
        data = Path(data_path) if data_path is not None else None
        if not model_folder.is_here(typed.model, data, environ):
            said = chosen["model"].written(typed.model)
            say(f"{said}: downloading it from the Hugging Face Hub")
            _fetch(typed.model, "model", said, model_folder.hub_cache(environ), ignore=_NOT_NEEDED)
    return replace(typed, data_path=data_path), found


def _tasks(
    name: str, said: str, environ: Mapping[str, str], say: Callable[[str], None], *, may: bool
) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{said}: must be {DATA_ON_HUB}ORG/NAME")
    cache = model_folder.hub_cache(environ)
    folder = model_folder.cached(cache, name, said, kind="datasets")
    if folder is not None:
        return folder
    if not may:
        raise UsageError(
            f"{said}: not in the local Hugging Face cache ({cache}); --download fetches it, except in a dry run"
        )
    say(f"{said}: downloading it from the Hugging Face Hub")
    return _fetch(name, "dataset", said, cache, only=_TASK_FILES)


def _fetch(
    name: str,
    kind: str,
    said: str,
    cache: Path,
    *,
    only: list[str] | None = None,
    ignore: list[str] | None = None,
) -> Path:
    """Download a repository into the cache; returns its folder. Raises UsageError: no network, no such repository, no room, no client."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            "--download: needs the package huggingface_hub, which is not installed here"
        ) from None
    try:
        made = snapshot_download(
            name, repo_type=kind, cache_dir=cache, allow_patterns=only, ignore_patterns=ignore
        )
    # Its errors are also those of the HTTP library on which its version is built.
    except Exception as error:
        raise UsageError(
            f"{said}: cannot be downloaded: {type(error).__name__}: {first_line(error)}"
        ) from None
    return Path(made)
