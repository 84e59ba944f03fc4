"""Checks before a start that the model's chat template can render the tasks' messages, as the engine will."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fsbarrier.cli.start.bounded import bounded
from fsbarrier.data import images
from fsbarrier.data.images import Message
from fsbarrier.data.messages import for_template
from fsbarrier.data.tasks import place
from fsbarrier.engine.answer_format import switches_in
from fsbarrier.engine.model import object_in, placeholder_ids, template_of
from fsbarrier.errors import UsageError, first_line
from fsbarrier.settings.value_types import SWITCHES

if TYPE_CHECKING:
    from fsbarrier.data.examples import Example
    from fsbarrier.data.tasks import Task

#: marks what the model has said, for a training that masks the rest; the engine ignores it
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_USUAL = ("system", "developer", "user", "assistant", "tool")
#: roles whose content a template may leave out or change on purpose: earlier thoughts, results of tools
_MAY_DIFFER = ("assistant", "tool")
_REMEDY = "use a template that renders it, or remove it from the file"


class _Refused(Exception):
    """The template itself refuses the messages."""


def check(folder: Path, tasks: Iterable[Task], path: Path, arguments: Mapping[str, object]) -> None:
    """Check that the model in `folder` has a chat template if a task of `path` needs one, and that it renders each role that they use.

    `arguments`: further ones of the template. Raises UsageError naming the template, or the task.
    """
    render: Callable[..., str] | None = None
    seen: set[tuple[object, ...]] = set()
    place_of_image = _place_of_image(folder)
    for task in tasks:
        if isinstance(task.prompt, str):
            continue
        where = f"{path}, task {task.index}"
        render = render or renderer(folder, f"{where}: the prompt")
        if render is None:
            return
        roles = (_kinds(task.prompt), bool(task.tools), *sorted(task.chat_template_kwargs))
        if roles in seen:
            continue
        seen.add(roles)
        try:
            text = rendered(render, task, arguments)
        except Exception as error:
            raise UsageError(
                f"{where}: the chat template of {folder} cannot render the prompt: {error}"
            ) from None
        filled = partial(render, **{**arguments, **task.chat_template_kwargs})
        if dropped := _dropped(folder, filled, task.messages, task.tools, task.chat_template_kwargs):
            raise UsageError(
                f"{place(path, task.index)}: the chat template of {folder} leaves out {dropped}; {_REMEDY}"
            )
        shown = len([*images.sources(task.messages)])
        if text.count(place_of_image) < shown:
            raise UsageError(
                f"{where}: the chat template of {folder} leaves no place ({place_of_image}) for each of its {shown} images"
            )
        for message in task.messages:
            role, parts = message["role"], images.parts_of(message["content"])
            left_out = any(str(part.get("text", "")).strip() not in text for part in parts)
            if role not in _MAY_DIFFER and left_out:
                raise UsageError(
                    f"{where}: the chat template of {folder} leaves out the message of role {role!r}"
                )
            if role not in _USUAL and role not in str(template_of(folder)):
                raise UsageError(
                    f"{where}: the chat template of {folder} does not know the role {role!r}; usual are {', '.join(_USUAL)}"
                )


def check_thinking(folder: Path, thinking: str) -> None:
    """Check that the template can switch thoughts `on` or `off`, if the user wants that. Raises UsageError."""
    if thinking != "auto" and not switches_in(folder):
        raise UsageError(
            f"rollout.thinking={thinking}: the chat template of {folder} has no argument for it ({', '.join(SWITCHES)}); drop it, or "
            "give the template's own one in rollout.chat_template_kwargs"
        )


def check_renderer(tasks: Iterable[Task], path: Path, renderer: str) -> None:
    """Check that no task has arguments of its own for the chat template, which a renderer would not get. Raises UsageError."""
    for task in tasks:
        if task.chat_template_kwargs:
            raise UsageError(
                f"{place(path, task.index)}: chat_template_kwargs: rollout.renderer={renderer} gets the same arguments for all tasks "
                "(rollout.chat_template_kwargs); drop one of the two"
            )


def rendered(render: Callable[..., str], task: Task, arguments: Mapping[str, object]) -> str:
    """The prompt of a task, as the engine will render it."""
    messages, tools = for_template(task.messages), list(task.tools) or None
    given = {**arguments, **task.chat_template_kwargs}
    return render(messages=messages, add_generation_prompt=True, tools=tools, **given)


def check_examples(
    folder: Path,
    examples: Iterable[Example],
    path: Path,
    arguments: Mapping[str, object],
    *,
    split_turns: bool,
) -> None:
    """Check that in each example the rendered text shows which part the assistant says. Raises UsageError naming the line.

    `split_turns`: each answer is an example of its own.
    """
    conversations = [example for example in examples if not example.plain]
    seen: set[tuple[object, ...]] = set()
    for number, example in enumerate(conversations):
        where = place(path, example.index)
        if not number:
            render = renderer(folder, f"{where}: the example")
        if render is None:
            return
        kinds = (_kinds(example.messages), bool(example.tools), *sorted(example.chat_template_kwargs))
        try:
            for conversation in example.split() if split_turns else [example]:
                conversation.pieces(partial(_overridden, render, arguments))
            dropped = None
            if kinds not in seen:
                filled = partial(render, **{**arguments, **example.chat_template_kwargs})
                dropped = _dropped(
                    folder, filled, example.messages, example.tools, example.chat_template_kwargs
                )
        except Exception as error:
            raise UsageError(f"{where}: the chat template of {folder}: {first_line(error)}") from None
        seen.add(kinds)
        if dropped:
            raise UsageError(f"{where}: the chat template of {folder} leaves out {dropped}; {_REMEDY}")


def _overridden(render: Callable[..., str], arguments: Mapping[str, object], **given: object) -> str:
    """Render with the values that an example has `given` to the template, and with `arguments` where it gives none."""
    return render(**{**arguments, **given})


def _kinds(messages: Sequence[Message]) -> tuple[str, ...]:
    """What a template may treat differently: the role and the fields of each message, and which parts its content has."""
    return tuple(
        f"{message['role']} {type(message['content']).__name__} "
        f"{[part['type'] for part in images.parts_of(message['content'])]} {sorted(message)}"
        for message in messages
    )


def _dropped(
    folder: Path,
    render: Callable[..., str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    arguments: Iterable[str],
) -> str | None:
    """What the template leaves out of a conversation: a field without which it renders the same. A call's id may be left out, and thoughts
    once others follow."""

    def rendered(given: Sequence[Message], tools: object = list(tools) or None) -> str:
        try:
            return render(messages=for_template(given), add_generation_prompt=False, tools=tools)
        # A template that refuses a conversation without the field does not leave it out.
        except Exception as error:
            return f"{type(error)}"

    for number, message in enumerate(messages):
        for name in sorted(message.keys() - {"role", "content", "tool_call_id"}):
            if name == "name" and message["role"] == "tool":
                continue
            until = number + 1 if name == "reasoning_content" else len(messages)
            without = [
                {key: value for key, value in earlier.items() if earlier is not message or key != name}
                for earlier in messages[:until]
            ]
            if rendered(messages[:until]) == rendered(without):
                return f"the field {name} of message {number + 1}"
    if tools and rendered(messages) == rendered(messages, None):
        return "the field tools"
    source = str(template_of(folder))
    return next((f"chat_template_kwargs.{name}" for name in arguments if name not in source), None)


def _place_of_image(folder: Path) -> str:
    """The text that stands for an image in a prompt; "" if it is not known, which counts as being in every prompt."""
    tokens = placeholder_ids(object_in(folder / "config.json"))
    added = object_in(folder / "tokenizer.json").get("added_tokens", ()) if tokens else ()
    return next((str(token["content"]) for token in added if token["id"] in tokens[:1]), "")


def renderer(folder: Path, what: str) -> Callable[..., str] | None:
    """The function that renders the folder's template; None if it has several. Raises UsageError."""
    source = template_of(folder)
    if source is None:
        if (folder / "additional_chat_templates").is_dir():
            return None
        raise UsageError(
            f"{what} consists of chat messages, but {folder} has no chat template "
            "(chat_template.jinja, or chat_template in tokenizer_config.json); use a text prompt, or add the chat template "
            "of an instruct model"
        )
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _as_json
    try:
        template = environment.from_string(_GENERATION.sub("", source))
    except TemplateSyntaxError as error:
        raise UsageError(
            f"the chat template of {folder} is not valid: line {error.lineno}: {error.message}"
        ) from None
    special = object_in(folder / "special_tokens_map.json") | object_in(folder / "tokenizer_config.json")
    tokens = {name: _text_of(value) for name, value in special.items() if name.endswith("_token")}

    def render(**given: object) -> str:
        # A template can loop for ever, or multiply a text.
        with bounded():
            return template.render(**{**tokens, "tools": None, **given})

    return render


def _text_of(token: object) -> str:
    """Tokenizers describe a special token by its text, or by an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _as_json(value: object, ensure_ascii: bool = False, **rest: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **rest)
