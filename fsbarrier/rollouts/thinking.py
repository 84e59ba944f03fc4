"""Splits the thoughts from an answer, and closes those that are longer than `rollout.max_thinking_tokens`, after which the answer goes on.

vLLM has such a limit too (`thinking_token_budget`), but does not say which tokens it has forced, and searches the whole answer for the
marks at each token. Here an answer is sampled up to the limit first. If it is still thinking then, the tokens that close the thought are
appended, and masked from the loss; the rest is sampled as the continuation of these tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from fsbarrier.engine.answer_format import USUAL, ThoughtFormat
from fsbarrier.rollouts.answers import ThoughtMarks, without_thoughts
from fsbarrier.rollouts.samples import UNKNOWN, Message, Sample, SampledGroup, SamplingServer

#: a function that continues an answer: it gets the tokens so far and the maximum number of further ones
Continue = Callable[[Sequence[int], int], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the model marks its thoughts, and how many tokens they may have (None: no limit). `served`: only the server's own parser knows
    the marks, so `format` does not apply."""

    format: ThoughtFormat
    marks: ThoughtMarks
    limit: int | None
    served: bool = False

    def first_part(self, max_tokens: int) -> int:
        """How many tokens of an answer are sampled before its thoughts are looked at."""
        return max_tokens if self.limit is None else min(self.limit, max_tokens)

    def read(self, sample: Sample, *, opened: bool) -> Sample:
        """The sample with its thoughts. `opened`: the prompt has begun the thought."""
        parts = without_thoughts(sample.text, opened=opened, marks=self.format)
        if parts.reasoning is None and parts.text == sample.text:
            return sample
        count = 0 if parts.reasoning is None else self.marks.count(sample.token_ids)
        count -= sum(at < count for at in sample.given)
        return replace(sample, thoughts=parts, thought_tokens=count)

    async def finished(self, sample: Sample, *, opened: bool, room: int, go_on: Continue) -> Sample:
        """The whole answer that begins with `sample`, with its thoughts. `room`: the number of tokens that it may have."""
        if self.limit is None or sample.finish_reason != "length" or len(sample.token_ids) >= room:
            return self.read(sample, opened=opened)
        thinks = not without_thoughts(sample.text, opened=opened, marks=self.format).closed
        closed_with = self.marks.closed_with if thinks else []
        begun = [*sample.token_ids, *closed_with]
        if len(begun) >= room:
            return self.read(sample, opened=opened)
        rest = await go_on(begun, room - len(begun))
        text = self.format.closed_with if thinks else ""
        return self.read(_joined(sample, closed_with, text, rest), opened=opened)


async def asked_for(server: SamplingServer, tokens: Callable[..., Awaitable[list[int]]]) -> Thinking:
    """How the server's model marks its thoughts, as token ids. `tokens`: asks the server for the tokens of a text."""
    marks = server.thoughts or USUAL
    # Try the opening with a line break too, because a tokenizer may join the mark and the line break in one token.
    texts = (marks.opening, f"{marks.opening}\n", marks.closing, marks.closed_with, *(marks.ends or ()))
    first, line, closing, closed_with, *ends = await asyncio.gather(
        *(tokens(prompt=text, add_special_tokens=False) for text in texts)
    )
    made = ThoughtMarks((first, line), closing, closed_with, ends)
    return Thinking(marks, made, server.max_thinking_tokens, served=server.thoughts is None)


def may_think(group: SampledGroup, server: SamplingServer) -> bool:
    """Whether a group can have thoughts. If not, as is usual for prompts of plain text, the server need not be asked for the marks."""
    marks, prompt = server.thoughts, group.task.prompt
    if marks is None or marks.around is not None or server.max_thinking_tokens is not None:
        return True
    if not isinstance(prompt, str) or prompt.rstrip().endswith(marks.opening):
        return True
    return any(sample.text.lstrip().startswith(marks.opening) for sample in group.samples)


def has_opened(prompt: str | Sequence[Message], prompt_ids: Sequence[int], thinking: Thinking) -> bool:
    """Whether a prompt has begun a thought. A text may be split into other tokens than the mark alone."""
    if isinstance(prompt, str):
        return prompt.rstrip().endswith(thinking.format.opening)
    return thinking.marks.opened_by(prompt_ids)


def _joined(sample: Sample, closed_with: Sequence[int], text: str, rest: Sample) -> Sample:
    begin, unknown = len(sample.token_ids), len(closed_with)
    return replace(
        rest,
        text=f"{sample.text}{text}{rest.text}",
        token_ids=[*sample.token_ids, *closed_with, *rest.token_ids],
        logprobs=[*sample.logprobs, *[0.0] * unknown, *rest.logprobs],
        versions=[*sample.versions, *[UNKNOWN] * unknown, *rest.versions],
        seconds=sample.seconds + rest.seconds,
        given=range(begin, begin + unknown),
    )
