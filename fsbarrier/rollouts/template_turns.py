"""Finds the tokens with which a conversation begins, and those that a chat template inserts after an answer. The template is unknown.

The server renders the conversation twice with two different stand-ins for the last answer; the common suffix follows the answer. Where
the template writes the results of calls into the turn that has made them (Gemma 4), the suffix is what the whole rendering has after
the one that ends with the answer. Once for each kind of message it is checked that the tokens contain what each new message says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence

from fsbarrier.rollouts.engine_pool import Reservation
from fsbarrier.rollouts.episode import TurnFailed
from fsbarrier.rollouts.samples import Message, Refusal

#: stand-ins for the last answer: one token each in every vocabulary, and not part of any template's text
STAND_INS = ("A", "B")


class TemplateTurns:
    """Renders the turns of one conversation. `template`: the fields that a request for tokens has beside the messages."""

    def __init__(self, sampler: Reservation, template: Mapping[str, object]) -> None:
        self._sampler, self._template = sampler, template

    async def begun(self, messages: list[Message]) -> list[int]:
        """The tokens of a whole conversation. Raises TurnFailed if they lack what a message says, except for earlier answers; Refusal."""
        rendered = await self._sampler.tokens(messages=messages, **self._template)
        known = self._sampler.shown
        for number, message in enumerate(messages):
            kind = json.dumps([message["role"], *sorted(message)])
            if message["role"] == "assistant":
                continue
            if kind not in known:
                changed = [*messages[:number], _with_another_end(message), *messages[number + 1 :]]
                known[kind] = await self._rendered(changed) != rendered
            if not known[kind]:
                raise TurnFailed(
                    f"messages: message {number + 1}: the chat template leaves out what the role {message['role']!r} says; use a "
                    "template that renders it"
                )
        return rendered

    async def after_answer(
        self, messages: list[Message], answer: int, tokens: Sequence[int]
    ) -> list[int] | None:
        """The tokens that follow message number `answer`, with which `tokens` end; None if they cannot be determined."""
        async for own, suffix in self._candidates(messages, answer, tokens[-1]):
            if await self._shows(messages, answer, {"content": "A", **own}, suffix):
                # The template may end an answer with tokens that the model has already sampled.
                return suffix[(await self._sampler.thinking()).marks.said_of(suffix, tokens) :]
        return None

    async def _candidates(
        self, messages: list[Message], answer: int, end: int
    ) -> AsyncIterator[tuple[Message, list[int]]]:
        """Tokens that may follow message number `answer`, whose last token is `end`; each with the form of the message in whose rendering
        they were found."""
        bare: Message = {"role": "assistant"}
        if (suffix := await self._common_end(messages, answer, bare)) is not None:
            yield bare, suffix
        calls = messages[answer].get("tool_calls")
        if calls is None:
            return
        # Some templates reject a call's result without the call. What follows begins after the end of the calls.
        calling = {**bare, "tool_calls": calls}
        suffix = await self._common_end(messages, answer, calling)
        if suffix is not None and end in suffix:
            yield calling, suffix[suffix.index(end) + 1 :]
        # Others write a call's result into the turn that has made the call.
        calling = {**calling, "content": ""}
        if (suffix := await self._rest(messages, answer, calling, end)) is not None:
            yield calling, suffix

    async def _rendered(self, messages: list[Message], **more: object) -> list[int] | None:
        """The tokens of a conversation; None if the template rejects it."""
        try:
            return await self._sampler.tokens(messages=messages, **{**self._template, **more})
        except Refusal:
            return None

    async def _common_end(self, messages: list[Message], answer: int, own: Message) -> list[int] | None:
        """The common suffix of two renderings that differ only in the content of message number `answer`."""
        first, other = [
            await self._rendered([*messages[:answer], {**own, "content": word}, *messages[answer + 1 :]])
            for word in STAND_INS
        ]
        if first is None or other is None:
            return None
        shortest = min(len(first), len(other))
        common = 0
        while common < shortest and first[-1 - common] == other[-1 - common]:
            common += 1
        # If the renderings are equal, the template drops answers. If they have no common suffix, the suffix depends on the answer.
        return first[-common:] if 0 < common < shortest else None

    async def _rest(self, messages: list[Message], answer: int, own: Message, end: int) -> list[int] | None:
        """The tokens that the whole rendering has after the rendering up to message number `answer`; None unless it begins with that one,
        including its `end`."""
        turn = [*messages[:answer], own]
        before = await self._rendered(messages[:answer])
        until = await self._rendered(turn, add_generation_prompt=False)
        whole = await self._rendered([*turn, *messages[answer + 1 :]])
        if before is None or until is None or whole is None or end not in until[len(before) :]:
            return None
        size = len(until) - until[::-1].index(end)
        return whole[size:] if whole[:size] == until[:size] else None

    async def _shows(self, messages: list[Message], answer: int, own: Message, suffix: list[int]) -> bool:
        """Whether a suffix contains the content of each message after number `answer`. Templates treat messages of the same kind alike, so
        this is checked once for each kind."""
        known, later = self._sampler.shown, messages[answer + 1 :]
        kinds = [(message["role"], *sorted(message)) for message in later]
        kind = json.dumps([sorted(own), kinds, "tools" in self._template])
        if kind not in known:
            shown = True
            for number, message in enumerate(later):
                changed = [*later[:number], _with_another_end(message), *later[number + 1 :]]
                tokens = await self._rendered([*messages[:answer], own, *changed])
                shown = shown and (tokens is None or tokens[-len(suffix) :] != suffix)
            known[kind] = shown
        return known[kind]


def _with_another_end(message: Message) -> Message:
    content = message["content"]
    more = [{"type": "text", "text": "A"}]
    return {**message, "content": [*content, *more] if isinstance(content, list) else f"{content}A"}
