"""Finds the task files of a run and validates every line.

Also checks that each prompt leaves room for an answer in `engine.max_model_len`, in the model's own tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbarrier.cli.start import chat_template
from fsbarrier.cli.start.bounded import Exceeded, bounded
from fsbarrier.data import images
from fsbarrier.engine.model import sees
from fsbarrier.errors import UsageError
from fsbarrier.rollouts.sharing import TRAIN_SET, file_of, training_files, training_sets
from fsbarrier.rundir.runrecord import TaskSource
from fsbarrier.settings.value_types import ENGINE, reward_kinds
from fsbarrier.store import files, reading

if TYPE_CHECKING:
    from fsbarrier.data.tasks import Task

if TYPE_CHECKING:
    from fsbarrier.data.tasks import Task
    from fsbarrier.settings.sections import Settings
#: more bytes than a chat template usually adds to a conversation, and to each of its messages
TEMPLATE_BYTES, MESSAGE_BYTES = 4096, 512

CountTokens = Callable[["Task"], int]


def needed_files(settings: Settings) -> dict[str, str | None]:
    """The task files that a run reads: `train`, or `train.NAME` of each set, and the evaluation sets, by name. The value is the file that
    the user named, or None for the default name."""
    if settings.rl_phase == "update":
        return {}
    held_out = {name: eval_set.file for name, eval_set in settings.eval.sets.items()} or {"test": None}
    sets = settings.train.sets.items()
    train = {f"{TRAIN_SET}{name}": task_set.file for name, task_set in sets} or {"train": None}
    return {"train-only": train, "eval-only": held_out}.get(
        settings.rollout_split or "", train | held_out if settings.eval_interval else train
    )


def check_folder(data_path: Path) -> None:
    """Raises UsageError if the data path is not a folder."""
    if not data_path.is_dir():
        raise UsageError(
            f"--data-path {data_path}: {'not a folder' if data_path.exists() else 'no such folder'}"
        )


def read_tasks(
    data_path: Path,
    named: Mapping[str, str | None],
    settings: Settings,
    *,
    model: Path | None = None,
    blind: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, TaskSource]:
    """Validate the `needed_files` and return {"path", "count", "sha256"} for each, and "picked" for a set of some of a file's tasks.

    Checks that the reward can score each answer, and that `model` (None: skip) can be given each prompt; `blind`: why it cannot be given
    images. `say` is told which scorers were chosen. Raises UsageError naming file and line number.
    """
    # Imported late because it can load a Parquet library, which other commands do not need.
    from fsbarrier.data import tasks
    from fsbarrier.rewards.kinds import about_scorers, check_answers

    task_sources: dict[str, TaskSource] = {}
    # An agent makes chat messages of any task.
    chats = settings.rollout.agent is not None
    for split, file in named.items():
        path = _task_file(data_path, split) if file is None else _named_file(data_path, split, file)
        read = tasks.read_tasks(path)
        task_sources[split] = _source(path, read.count)
        check_answers(
            settings.reward.kind, read.tasks.values(), path, agent=settings.rollout.agent is not None
        )
        if hint := about_scorers(settings.reward.kind, read.tasks.values(), path):
            say(hint)
        _check_environments(read.tasks.values(), path, settings)
        if model is not None:
            _check_images(read.tasks.values(), path, model, settings, blind)
            arguments = settings.rollout.template_arguments
            if any(not isinstance(task.prompt, str) for task in read.tasks.values()):
                chats = True
                chat_template.check_thinking(model, settings.rollout.thinking)
            chat_template.check(model, read.tasks.values(), path, arguments)
            if settings.rollout.named_renderer is not None:
                chat_template.check_renderer(read.tasks.values(), path, settings.rollout.renderer)
            # An agent makes its own prompts, and a server of the user's has its own limit.
            if settings.rollout.agent is None and settings.engine.url is None:
                limit = settings.engine.max_model_len
                check(model, read.tasks.values(), path, arguments, limit)
        where = (
            settings.train.sets[split.removeprefix(TRAIN_SET)].where if split.startswith(TRAIN_SET) else None
        )
        if where is not None:
            fits = tasks.in_set(where)
            task_sources[split]["picked"] = [index for index, task in read.tasks.items() if fits(task)]
            if not task_sources[split]["picked"]:
                raise UsageError(f"{_setting(split)}.where={where}: fits no task of {path}")
    if model is not None and not chats and settings.rollout.thinking != "auto":
        raise UsageError(
            f"rollout.thinking={settings.rollout.thinking}: all tasks are texts, to which no chat template is applied; drop it"
        )
    _check_sets(settings, task_sources)
    return task_sources


def _check_sets(settings: Settings, task_sources: Mapping[str, TaskSource]) -> None:
    """Raises UsageError if a training task belongs to two sets."""
    owners: dict[int, str] = {}
    for task_set in training_sets(settings, task_sources):
        for task in task_set.tasks:
            if (other := owners.setdefault(task, task_set.name)) != task_set.name:
                path, first = file_of(task, training_files(task_sources))
                raise UsageError(
                    f"{path}, task {task - first}: belongs to both train.sets.{other} and train.sets.{task_set.name}"
                )


def _setting(split: str) -> str:
    """How the settings of a named task file begin."""
    return (
        f"train.sets.{split.removeprefix(TRAIN_SET)}" if split.startswith(TRAIN_SET) else f"eval.sets.{split}"
    )


def read_examples(
    data_path: Path, named: Mapping[str, str | None], settings: Settings, *, model: Path | None = None
) -> dict[str, TaskSource]:
    """Like `read_tasks`, for files of examples. Checks that the chat template of `model` shows which text is trained on."""
    from fsbarrier.data import examples as example_files

    task_sources: dict[str, TaskSource] = {}
    for split in named:
        path = _task_file(data_path, split)
        count, examples = example_files.read_examples(path)
        task_sources[split] = _source(path, count)
        if model is not None:
            if any(not example.plain for example in examples.values()):
                chat_template.check_thinking(model, settings.rollout.thinking)
            chat_template.check_examples(
                model,
                examples.values(),
                path,
                settings.rollout.template_arguments,
                split_turns=settings.sft.split_turns,
            )
    return task_sources


def _source(path: Path, count: int) -> TaskSource:
    if count == 0:
        raise UsageError(f"{path}: contains no tasks")
    return {"path": str(path), "count": count, "sha256": files.sha256_file(path)}


def _check_environments(tasks: Iterable[Task], path: Path, settings: Settings) -> None:
    """Refuse a task whose environment does not exist, if environments have names."""
    from fsbarrier.data.tasks import place

    there = settings.environments
    for task in tasks if there else ():
        name = task.metadata.get("environment")
        if name is not None and name not in list(there):
            raise UsageError(
                f"{place(path, task.index)}: there is no environment {name}; there is {', '.join(there)}"
            )


def _check_images(tasks: Iterable[Task], path: Path, model: Path, settings: Settings, blind: str) -> None:
    """Refuse tasks with images for a model that takes none, and images that cannot be read."""
    from fsbarrier.data.tasks import place

    has_eyes = sees(reading.json_object(model / "config.json", UsageError))
    can_decode = importlib.util.find_spec("PIL") is not None
    seen: set[str] = set()
    text_only = [
        f"reward.kind={kind}" for kind in reward_kinds(settings.reward.kind) if kind.startswith(ENGINE)
    ]
    if settings.algorithm.loss == "distil":
        text_only.append("the teacher of algorithm.loss=distil")
    for task in tasks:
        for source in images.sources(task.messages):
            where = place(path, task.index)
            if not has_eyes:
                raise UsageError(
                    f"{where}: has an image, but the model {model} takes none (no vision_config)"
                )
            if blind:
                raise UsageError(f"{where}: has an image, which the model {model} cannot be given: {blind}")
            if text_only:
                raise UsageError(f"{where}: has an image, and {text_only[0]} gets tokens without images")
            if source in seen or not can_decode:
                continue
            seen.add(source)
            try:
                # Read them as the rollout will, so that the rollout refuses none that was accepted here.
                with bounded():
                    images.as_kept(images.data_of(source))
            except (ValueError, Exceeded) as error:
                name = "" if source.startswith("data:") else f" {Path(source).name}"
                raise UsageError(f"{where}: image{name}: {error}") from None


def check_recorded(settings: Settings, recorded: Collection[str]) -> None:
    """Raises UsageError if this start needs tasks that are not in the run's record."""
    for split in needed_files(settings):
        if split not in recorded:
            raise UsageError(
                f"this run was created without {split} tasks (--eval-interval 0, or --rollout-split); start a new run to use them"
            )


def _named_file(data_path: Path, name: str, file: str) -> Path:
    # An absolute path stays as it is.
    path = data_path / file
    if not path.is_file():
        raise UsageError(f"{_setting(name)}.file={file}: {path} is not a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path}: no read permission")
    return path


def _task_file(data_path: Path, split: str) -> Path:
    name = split.removeprefix(TRAIN_SET)
    # A data set on the Hugging Face Hub has names such as data/train-00000-of-00001.parquet.
    parts = [
        path for place in (data_path, data_path / "data") for path in place.glob(f"{name}-*-of-*.parquet")
    ]
    if len(parts) > 1:
        raise UsageError(
            f"--data-path {data_path}: has {len(parts)} parts of {name} ({parts[0].name}, ...); make one file {name}.parquet of them"
        )
    names = (data_path / f"{name}.jsonl", data_path / f"{name}.parquet", *parts)
    there = [path for path in names if path.is_file()]
    if len(there) == 2:
        raise UsageError(f"--data-path {data_path}: has both {there[0].name} and {there[1].name}; keep one")
    if not there:
        odd = next((path.name for path in names if path.is_symlink() or path.exists()), None)
        what = f"{odd} is a folder or a broken link" if odd else f"has no {name}.jsonl or {name}.parquet"
        raise UsageError(f"--data-path {data_path}: {what}")
    if not os.access(there[0], os.R_OK):
        raise UsageError(f"{there[0]}: no read permission")
    return there[0]


def check(
    folder: Path, tasks: Iterable[Task], path: Path, arguments: Mapping[str, object], limit: int
) -> None:
    """Raises UsageError naming the first task whose prompt fills the context of `limit` tokens. `arguments`: the template's."""
    from fsbarrier.data.tasks import place

    counted: CountTokens | None = None
    for task in tasks:
        # No token is shorter than a byte, so most prompts need not be counted.
        if _most_bytes(task) < limit:
            continue
        counted = counted or counter(folder, arguments)
        if counted is None:
            return
        tokens = counted(task)
        if tokens >= limit:
            raise UsageError(
                f"{place(path, task.index)}: the prompt has {tokens:,} tokens, and engine.max_model_len={limit} has to hold the answer "
                "too; give a greater engine.max_model_len, or take the task out"
            )


def counter(folder: Path, arguments: Mapping[str, object]) -> CountTokens | None:
    """The function that counts the tokens of a task's prompt as the engine will, without those of images. None: the model has no
    `tokenizer.json`, or this environment cannot read it."""
    if not (folder / "tokenizer.json").is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises nothing more exact. The engine says what is wrong with the file.
    except Exception:
        return None
    tokenizer.no_truncation()
    render: Callable[..., str] | None = None

    def count(task: Task) -> int:
        nonlocal render
        if isinstance(task.prompt, str):
            return len(tokenizer.encode(task.prompt).ids)
        render = render or chat_template.renderer(folder, "the prompt")
        if render is None:
            return 0
        text = chat_template.rendered(render, task, arguments)
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def _most_bytes(task: Task) -> int:
    """An upper bound of the bytes of the prompt that the engine gets."""
    if isinstance(task.prompt, str):
        return len(task.prompt.encode()) + 8
    text_bytes = sum(
        len(images.text_of(message["content"]).encode()) + MESSAGE_BYTES for message in task.messages
    )
    return text_bytes + len(json.dumps(task.tools)) + TEMPLATE_BYTES
