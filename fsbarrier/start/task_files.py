"""The task files of a run: which ones it reads, and whether every line of them can be used."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier import files
from fsbarrier.errors import UsageError
from fsbarrier.rundir.runrecord import TaskSource
from fsbarrier.start.model_folder import check_chat_template

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings


def needed_files(settings: Settings) -> dict[str, str | None]:
    """Which task files the phases of a run read: of the training tasks (`train`), and of each set of held-out tasks by its name. The file
    that people named, None where it is called like the set."""
    if settings.rl_phase == "update":
        return {}
    held_out = {name: one.file for name, one in settings.eval_sets.items()}
    train: dict[str, str | None] = {"train": None}
    return {"train-only": train, "eval-only": held_out}.get(
        settings.rollout_split or "", train | held_out if settings.eval_interval else train
    )


def check_folder(data_path: Path) -> None:
    """Raises UsageError where tasks cannot be looked for."""
    if not data_path.is_dir():
        raise UsageError(
            f"--data-path {data_path}: {'not a folder' if data_path.exists() else 'no such folder'}"
        )


def read_tasks(
    data_path: Path, named: Mapping[str, str | None], reward: str, *, model: Path | None = None
) -> dict[str, TaskSource]:
    """For each of `needed_files` {"path", "count", "sha256"}; every line is checked, its answer for what `reward` can judge by, and its
    chat messages for a `model` (None: any) that has no chat template.

    Raises UsageError naming file and line number.
    """
    # Not at the top: this can load a parquet library, which commands without tasks need not wait for.
    from fsbarrier.data import tasks
    from fsbarrier.rewards.kinds import check_answers

    found: dict[str, TaskSource] = {}
    for split, file in named.items():
        path = _task_file(data_path, split) if file is None else _named_file(data_path, split, file)
        read = tasks.read_tasks(path)
        if read.count == 0:
            raise UsageError(f"{path}: has no task")
        check_answers(reward, read.tasks.values(), path)
        if model is not None:
            check_chat_template(model, read.tasks.values(), path)
        found[split] = {"path": str(path), "count": read.count, "sha256": files.sha256_file(path)}
    return found


def check_recorded(settings: Settings, recorded: Collection[str]) -> None:
    """Raises UsageError where a later start needs tasks that the run began without."""
    for split in needed_files(settings):
        if split not in recorded:
            raise UsageError(
                f"this run began without {split} tasks (--eval-interval 0, or only one split rolled out); begin another run with them"
            )


def _named_file(data_path: Path, name: str, file: str) -> Path:
    # An absolute path stays as it is.
    path = data_path / file
    if not path.is_file():
        raise UsageError(f"eval.sets.{name}.file={file}: {path} is no file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path}: not readable for you")
    return path


def _task_file(data_path: Path, split: str) -> Path:
    names = (data_path / f"{split}.jsonl", data_path / f"{split}.parquet")
    there = [path for path in names if path.is_file()]
    if len(there) == 2:
        raise UsageError(f"--data-path {data_path}: has both {there[0].name} and {there[1].name}; keep one")
    if not there:
        odd = next((path.name for path in names if path.is_symlink() or path.exists()), None)
        what = (
            f"{odd} is a folder, or a link to nowhere" if odd else f"has no {split}.jsonl or {split}.parquet"
        )
        raise UsageError(f"--data-path {data_path}: {what}")
    if not os.access(there[0], os.R_OK):
        raise UsageError(f"{there[0]}: not readable for you")
    return there[0]
