"""A trajectory as a conversation: turns with their texts, thoughts, tool calls and images. For the report's samples and the page.

A user's own program may write any values into a trajectory's fields, so nothing here relies on their types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsbarrier.data import images


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `calls`: (name, arguments) of its tool calls; `images`: the sources of its images; `segment`: the part of the episode,
    from 0, to which it belongs."""

    role: str
    text: str
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    images: tuple[str, ...] = ()
    segment: int = 0


def turns(trajectory: Mapping[str, Any]) -> list[Turn]:
    """The conversation in order, with that of earlier segments before it."""
    earlier, last = trajectory.get("earlier_messages"), trajectory.get("messages")
    segments = [*(earlier if isinstance(earlier, list) else ()), *([last] if isinstance(last, list) else ())]
    whole = [turn for number, messages in enumerate(segments) for turn in _turns(messages, number)]
    if last and whole:
        return whole
    prompt = trajectory.get("prompt", "")
    asked = [*_turns(prompt, 0)] if isinstance(prompt, list) else [Turn("prompt", _text(prompt))]
    return [*whole, *asked, Turn("answer", _text(trajectory.get("text", "")))]


def _turns(messages: object, segment: int) -> Iterator[Turn]:
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            yield Turn("?", _text(message), segment=segment)
            continue
        content = message.get("content")
        parts = images.parts_of(content)
        shown = tuple(source for part in parts if (source := images.source_of(part)) is not None)
        texts = [images.text_of([part]) for part in parts if images.source_of(part) is None]
        said = "\n".join(texts) if parts or isinstance(content, str | list) else _text(content)
        thoughts = _text(message.get("reasoning_content") or "")
        yield Turn(str(message.get("role", "")), said, thoughts, _calls(message), shown, segment)


def _calls(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    listed = message.get("tool_calls")
    calls = []
    for call in listed if isinstance(listed, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        calls.append((str(function.get("name", "?")), _text(function.get("arguments", ""))))
    return tuple(calls)


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
