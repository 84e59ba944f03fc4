"""Normalizes chat messages to the form of OpenAI's API, with every field that a chat template or the engine reads.

Unknown fields are rejected when a file is read, because a template would silently drop them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsbarrier.data.images import Message

#: the fields of a message in this form
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
#: field names for the thoughts before an answer: ours, vLLM's, and the one in gpt-oss's template
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def checked(message: Mapping[str, Any]) -> Message:
    """Normalize a message and drop its empty fields. The content is not checked. Raises ValueError naming the field."""
    given = {name: value for name, value in message.items() if name in ("role", "content") or _said(value)}
    thoughts = [given.pop(name) for name in THOUGHTS if name in given]
    for text in thoughts:
        if not isinstance(text, str):
            raise ValueError(f"reasoning_content must be text, got {_shown(text)}")
    if unknown := given.keys() - {*FIELDS}:
        raise ValueError(
            f"has the field {min(unknown)!r}, which no chat template is given; known are {', '.join(FIELDS)}"
        )
    for name in ("name", "tool_call_id"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{name} must be text, got {_shown(given[name])}")
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise ValueError(f"tool_calls must be a list, got {_shown(given['tool_calls'])}")
        given["tool_calls"] = [_call(call, number) for number, call in enumerate(given["tool_calls"], 1)]
    # In OpenAI's form, a message that only calls tools has no content.
    content = "" if given.get("content") is None else given["content"]
    return {**given, "content": content, **({"reasoning_content": thoughts[0]} if thoughts else {})}


def for_template(messages: Sequence[Message]) -> list[Message]:
    """The messages as vLLM passes them to a chat template: call arguments as objects, thoughts under both names."""
    return [
        message
        | ({"reasoning": message["reasoning_content"]} if "reasoning_content" in message else {})
        | ({"tool_calls": [*map(_with_object, message["tool_calls"])]} if "tool_calls" in message else {})
        for message in messages
    ]


def for_engine(messages: Sequence[Message]) -> list[Message]:
    """The messages as vLLM's API expects them: it reads thoughts only from `reasoning` and ignores them under any other name."""
    return [
        {"reasoning" if name == "reasoning_content" else name: value for name, value in message.items()}
        for message in messages
    ]


def _said(value: object) -> bool:
    return value is not None and value != "" and value != [] and value != {}


def _call(value: object, number: int) -> dict[str, object]:
    """Convert a call to OpenAI's form; in transformers' form `function` may be missing and the arguments are an object."""
    where = f"tool_calls: call {number}"
    if not isinstance(value, Mapping) or not isinstance(inner := value.get("function", value), Mapping):
        raise ValueError(f"{where} must be an object with a function, got {_shown(value)}")
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} needs function.name (text), got {_shown(name)}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError(
            f"{where}: arguments must be a JSON object, or the text of one, got {_shown(arguments)}"
        )
    identifier = value.get("id")
    function = {"name": name, "arguments": text or "{}"}
    return {
        "id": identifier if isinstance(identifier, str) else f"call_{number}",
        "type": "function",
        "function": function,
    }


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:60]
