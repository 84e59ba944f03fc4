"""Checks before a start that each prompt leaves room for an answer in `engine.max_model_len`, in the model's own tokens."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbarrier.cli.start import chat_template
from fsbarrier.data import images
from fsbarrier.errors import UsageError

if TYPE_CHECKING:
    from fsbarrier.data.tasks import Task

#: more bytes than a chat template usually adds to a conversation, and to each of its messages
TEMPLATE_BYTES, MESSAGE_BYTES = 4096, 512

CountTokens = Callable[["Task"], int]


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
    """At least as many as the prompt that the engine gets."""
    if isinstance(task.prompt, str):
        return len(task.prompt.encode()) + 8
    said = sum(len(images.text_of(one["content"]).encode()) + MESSAGE_BYTES for one in task.messages)
    return said + len(json.dumps(task.tools)) + TEMPLATE_BYTES
