"""Reads and validates files of examples for supervised fine-tuning, and marks the text to train on in each.

A row has `messages`, or `prompt` and `completion` (or a text `answer`); the messages are as in task files (tasks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsbarrier.data.images import Message
from fsbarrier.data.messages import for_template
from fsbarrier.data.tasks import (
    beside_of,
    encoded,
    prompt_of,
    rows_of,
    shown,
    task_error,
    unusual_values_named,
)

#: the role whose messages are trained on
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation to learn from: what the assistant says from message number `first` on. `plain`: a text and its
    continuation, without a chat template."""

    index: int
    messages: tuple[Message, ...]
    first: int = 0
    plain: bool = False
    #: the tools passed to the chat template
    tools: tuple[dict[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """The numbers of the messages to train on."""
        there = enumerate(self.messages[self.first :], self.first)
        return [number for number, message in there if message["role"] == ASSISTANT]

    def split(self) -> list[Example]:
        """Make one example per answer, which ends with that answer."""
        if self.plain:
            return [self]
        return [replace(self, messages=self.messages[: n + 1], first=n) for n in self.answers]

    def pieces(self, render: Callable[..., str]) -> list[tuple[str, bool]]:
        """Split its text into pieces, each with whether it is trained on. `render`: the chat template. Raises ValueError if an answer does
        not start with the generation prompt, or if the text up to it changes once messages follow; and the template's errors.
        """
        if self.plain:
            return [(message["content"], bool(number)) for number, message in enumerate(self.messages)]
        messages = for_template(self.messages)
        beside = {**self.chat_template_kwargs, **({"tools": list(self.tools)} if self.tools else {})}
        whole = render(messages=messages, add_generation_prompt=False, **beside)
        texts: list[tuple[str, bool]] = []
        done = ""
        for number in self.answers:
            before = render(messages=messages[:number], add_generation_prompt=True, **beside)
            after = render(messages=messages[: number + 1], add_generation_prompt=False, **beside)
            if not after.startswith(before):
                raise ValueError(_begins_otherwise(number, before, after))
            if not (before.startswith(done) and whole.startswith(after)):
                raise ValueError(
                    f"it renders message {number + 1} differently once others follow, as templates do that leave out earlier "
                    "thoughts, so what the assistant says cannot be marked; sft.split_turns=true makes an example of each answer"
                )
            texts += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return texts


def read_examples(path: Path, indices: Collection[int] | None = None) -> tuple[int, dict[int, Example]]:
    """The number of examples in a file, and all of them or only those with `indices`. Each row has `messages`, or `prompt` and
    `completion` (or a text `answer`). Raises UsageError naming the file and line."""
    count, examples = 0, {}
    for index, row in rows_of(path, None if indices is None else frozenset(indices)):
        count = index + 1
        if row is None:
            continue
        with unusual_values_named(path, index):
            examples[index] = example = _example(path, index, row)
            encoded(example.messages, example.tools, example.chat_template_kwargs)
    return count, examples


def _example(path: Path, index: int, row: Mapping[str, object]) -> Example:
    completion = row.get("completion", row.get("answer"))
    if row.get("images"):
        raise task_error(path, index, "has images, which supervised fine-tuning does not read")
    if row.get("messages") is not None:
        messages = prompt_of(path, index, row["messages"], "messages")
        if isinstance(messages, str):
            raise task_error(path, index, f"messages must be a list of chat messages, got {shown(messages)}")
        example = Example(index, messages)
    elif row.get("prompt") is None or completion is None:
        known = ", ".join(map(str, row)) or "none"
        raise task_error(path, index, f"needs messages, or prompt and completion (its fields: {known})")
    else:
        before, after = (
            prompt_of(path, index, row["prompt"]),
            prompt_of(path, index, completion, "completion"),
        )
        plain = isinstance(before, str) and isinstance(after, str)
        prompt = ({"role": "user", "content": before},) if isinstance(before, str) else before
        answer = ({"role": ASSISTANT, "content": after},) if isinstance(after, str) else after
        example = Example(index, prompt + answer, len(prompt), plain)
    tools, arguments = beside_of(path, index, dict(row), chat=not example.plain)
    example = replace(example, tools=tools, chat_template_kwargs=arguments)
    if not example.answers:
        raise task_error(path, index, f"has no message of the role {ASSISTANT}, so nothing to train on")
    return example


def _begins_otherwise(number: int, before: str, after: str) -> str:
    """The error for an answer whose rendering does not start with the generation prompt, for example because thoughts are omitted."""
    same = next(
        (n for n, (earlier, later) in enumerate(zip(before, after, strict=False)) if earlier != later),
        len(after),
    )
    return (
        f"it begins an answer with {shown(before[same:])}, and renders message {number + 1} with {shown(after[same : same + 20])} "
        "in its place; give what the assistant thought as reasoning_content, or the argument with which the template begins no "
        "thought (rollout.chat_template_kwargs)"
    )
