"""Splits an answer of the policy into its thoughts, its text and its tool calls.

The calls are read by vLLM's own parser, in the server (`/v1/chat/completions/derender`). The thoughts are cut off before, because vLLM's
own reasoning parsers end the thoughts at a call that is only considered there, which would execute it (docs/decisions/0032).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsbarrier.engine.answer_format import USUAL, ThoughtFormat
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.store.foreign_json import NotJson, parse


@dataclass(frozen=True, slots=True)
class Thoughts:
    """`reasoning`: None without thoughts; `closed`: whether an answer follows; `text`: that answer."""

    reasoning: str | None
    text: str
    closed: bool


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The tokens of the marks around a thought. `opening`: alone, and at the end of a line. `closed_with`: the tokens that close a thought
    on the policy's behalf. `ends`: see ThoughtFormat; empty if a history has the same end."""

    opening: Sequence[list[int]]
    closing: list[int]
    closed_with: list[int]
    ends: Sequence[list[int]] = ()

    def opened_by(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens a thought, which some templates add."""
        return any(mark and list(prompt_ids[-len(mark) :]) == mark for mark in self.opening)

    def said_of(self, suffix: Sequence[int], token_ids: Sequence[int]) -> int:
        """With how many of its tokens `suffix`, which a template writes after an answer, repeats the end of the sampled `token_ids`."""
        if self.ends:
            sampled, written = self.ends
            if sampled == [*token_ids[-len(sampled) :]] and written == [*suffix[: len(written)]]:
                return len(written)
        return next((n for n in range(len(suffix), 0, -1) if [*token_ids[-n:]] == [*suffix[:n]]), 0)

    def after(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens after the first thought; all tokens if the end of the thought is not found."""
        return list(token_ids[self._end_in(token_ids) or 0 :])

    def count(self, token_ids: Sequence[int]) -> int:
        """The number of tokens of an answer's thoughts, with the mark that ends them; the answer begins with thoughts."""
        end = self._end_in(token_ids)
        return len(token_ids) if end is None else end

    def _end_in(self, token_ids: Sequence[int]) -> int | None:
        size = len(self.closing)
        ends = (at + size for at in range(len(token_ids)) if list(token_ids[at : at + size]) == self.closing)
        return next(ends, None)


def without_thoughts(text: str, *, opened: bool, marks: ThoughtFormat = USUAL) -> Thoughts:
    """Split an answer into thoughts and the rest. Only its beginning counts as thoughts; later marks are text. `opened`: the prompt has
    already opened the thought."""
    begins = text.lstrip().startswith(marks.opening)
    if not (opened or begins):
        return Thoughts(None, _unwrapped(text, marks), True)
    inner = text.lstrip()[len(marks.opening) :] if begins else text
    thought, mark, answer = inner.partition(marks.closing)
    return Thoughts(thought.strip(), _unwrapped(answer.lstrip(), marks), bool(mark))


def _unwrapped(answer: str, marks: ThoughtFormat) -> str:
    wrapped = marks.around.fullmatch(answer) if marks.around is not None else None
    return answer if wrapped is None else wrapped["answer"]


def calls_in(message: Mapping[str, object]) -> list[JsonObject]:
    """The tool calls in the server's message, with arguments as JSON text. Malformed or unnamed calls are left out."""
    listed = message.get("tool_calls")
    calls: list[JsonObject] = []
    for call in listed if isinstance(listed, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        arguments = as_object(function.get("arguments"))
        if arguments is not None:
            calls.append({"name": function["name"], "arguments": json.dumps(arguments)})
    return calls


def as_object(arguments: object) -> dict[str, object] | None:
    """Parse a call's arguments, which some models encode as JSON once or twice. None: they are no JSON object."""
    for _ in range(2):
        if isinstance(arguments, str):
            try:
                arguments = parse(arguments or "{}")
            except NotJson:
                return None
    return arguments if isinstance(arguments, dict) else None


def meaning(messages: Sequence[Mapping[str, object]]) -> list[object]:
    """Reduce a conversation to the parts that identify it; a client that changes one of them begins another conversation.

    A client may reformat arguments, rename calls, add empty fields, drop or keep thoughts, and strip spaces around a text.
    """
    names: dict[object, str] = {}

    def of_call(call: object) -> object:
        if not isinstance(call, Mapping):
            return call
        names.setdefault(call.get("id"), f"call {len(names)}")
        function = call.get("function")
        if not isinstance(function, Mapping):
            return call
        arguments = as_object(function.get("arguments"))
        return [function.get("name"), function.get("arguments") if arguments is None else arguments]

    def of_text(content: object) -> object:
        if (
            isinstance(content, list)
            and len(content) == 1
            and isinstance(content[0], Mapping)
            and content[0].get("type") == "text"
        ):
            content = content[0].get("text")
        return content.strip() if isinstance(content, str) else content

    values: list[object] = []
    for message in messages:
        calls = message.get("tool_calls")
        answered = message.get("tool_call_id")
        values.append(
            [
                message.get("role"),
                of_text(message.get("content")) or "",
                [*map(of_call, calls)] if isinstance(calls, list) else [],
                names.get(answered, "" if answered is None else "unknown"),
                message.get("name") if message.get("role") != "tool" else None,
            ]
        )
    return values
