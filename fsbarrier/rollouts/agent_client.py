"""Sends the turns of an agent's episode to the policy, and records each as tokens.

Training uses exactly the tokens that the model saw and sampled. A turn is therefore sent to the engine as token ids: the previous turn's
prompt and answer unchanged, never re-tokenized, followed by the tokens that the chat template inserts after the answer
(template_turns.py). If a turn does not continue an earlier one (the agent changed the history), or the template cannot be continued this
way, a new *segment* begins: a separate sequence in the same trajectory.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from fsbarrier.data.images import sources
from fsbarrier.data.messages import FIELDS, THOUGHTS, checked
from fsbarrier.data.tasks import plain
from fsbarrier.rollouts.answers import Thoughts, calls_in, meaning
from fsbarrier.rollouts.engine_pool import Reservation
from fsbarrier.rollouts.episode import Episode, Reply, Segment, Trajectory, TurnFailed
from fsbarrier.rollouts.samples import NEUTRAL, EngineGone, Message, Sample, said_message
from fsbarrier.rollouts.template_turns import TemplateTurns


class Recorder:
    """Sends turns to the policy on the local engine and records them. One per episode.

    The turns come from the episode's process (agent_sampler.py), or as requests to `base_url` (agent_http.py).
    """

    def __init__(self, sampler: Reservation, template: Mapping[str, object] | None = None) -> None:
        # The chat template's arguments for this task.
        self._template = template or {}
        # Valid while agent_http.py serves this episode.
        self.base_url, self.api_key, self.model = "", "", "policy"
        self.segments: list[Segment] = []
        self.turns = 0
        self.generate_s = 0.0
        # Of all turns: the tokens of their thoughts, and how many thoughts were closed at the limit.
        self.thought_tokens = self.closings = 0
        # Whether an answer was truncated by the token limit.
        self.cut_off = False
        # Stored because the agent may catch this error and continue.
        self.engine_gone: EngineGone | None = None
        self.last: Reply | None = None
        self._sampler = sampler
        self._tool_calls = 0

    @property
    def sampling(self) -> dict[str, object]:
        """The sampling parameters of every turn, from the run's settings."""
        sampling = self._sampler.sampling
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return {**own, **NEUTRAL, "n": 1, "logit_bias": {}}

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample the policy's answer to a conversation, including its calls of `tools`.

        Sampling parameters are the run's, so that training matches the recorded distribution. Raises TurnFailed.
        """
        said = [_normal(message, number) for number, message in enumerate(messages, 1)]
        conversation = await self._sampler.pictures.named(said)
        offered: list[Mapping[str, object]] = json.loads(json.dumps(plain(list(tools or ()))))
        template: dict[str, object] = {
            "add_generation_prompt": True,
            **({"chat_template_kwargs": self._template} if self._template else {}),
            **({"tools": offered} if offered else {}),
        }
        turns = TemplateTurns(self._sampler, template)
        means, by_tools = meaning(conversation), json.dumps(offered, sort_keys=True)
        async with self._turn() as hold:
            segment = self._continued(means, by_tools)
            suffix = None
            if segment is not None:
                hold(segment)
                conversation = [*segment.history, *conversation[len(segment.history) :]]
                suffix = await self._after_answer(turns, segment, conversation, offered)
            if segment is None or suffix is None:
                segment = hold(self._new_segment(tools=by_tools))
                suffix = await turns.begun(conversation)
            segment.images = list(sources(conversation))
            sample = await self._sample(segment, suffix, max_tokens, stop)
            message = await self._message(sample, offered, segment.token_ids)
            segment.history = [*conversation, message]
            segment.meaning = meaning(segment.history)
        return self._reply(segment, sample, message)

    async def complete(
        self, prompt: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Sample the policy's continuation of a text, without a chat template. A prompt that starts with an earlier prompt and its answer
        continues from their tokens. If that answer ended at a stop string, which is not part of its text, the prompt must contain the stop
        string. Raises TurnFailed."""
        async with self._turn() as hold:
            earlier = [s for s in self.segments if s.text and not s.busy and prompt.startswith(s.text)]
            if earlier:
                segment = hold(max(earlier, key=lambda s: len(s.text)))
                rest = prompt[len(segment.text) :]
                suffix = await self._sampler.tokens(prompt=rest, add_special_tokens=False) if rest else []
            else:
                segment, rest = hold(self._new_segment()), prompt
                suffix = await self._sampler.tokens(prompt=prompt)
            sample = await self._sample(segment, suffix, max_tokens, stop)
            segment.text = prompt + await self._whole_text(sample)
            message = said_message(sample)
            segment.history = [*segment.history, {"role": "user", "content": rest}, message]
        return self._reply(segment, sample, message)

    # --- one turn ---

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Callable[[Segment], Segment]]:
        """Context manager for one turn with its timeout and locked segments.

        If two concurrent calls continue the same segment, the second one finds it locked and begins a new segment.
        """
        held: list[Segment] = []

        def hold(segment: Segment) -> Segment:
            segment.busy = True
            held.append(segment)
            return segment

        try:
            yield hold
        except EngineGone as error:
            self.engine_gone = error
            raise
        finally:
            for segment in held:
                segment.busy = False

    def _new_segment(self, tools: str = "") -> Segment:
        segment = Segment(tools=tools)
        self.segments.append(segment)
        return segment

    def _continued(self, means: list[object], tools: str) -> Segment | None:
        """Find the segment that messages with this meaning continue."""
        for segment in reversed(self.segments):
            known = segment.meaning
            goes_on = known and len(means) > len(known) and means[: len(known)] == known
            if goes_on and segment.tools == tools and not segment.busy and not segment.text:
                return segment
        return None

    async def _after_answer(
        self,
        turns: TemplateTurns,
        segment: Segment,
        conversation: list[Message],
        tools: Sequence[Mapping[str, object]],
    ) -> list[int] | None:
        """The tokens that follow the last answer of `segment` in this conversation; None if they cannot be determined."""
        answered, renderer = len(segment.history), self._sampler.renderer
        if renderer is None:
            return await turns.after_answer(conversation, answered - 1, segment.token_ids)
        before, answer = segment.token_ids[: segment.answer_at], segment.token_ids[segment.answer_at :]
        return renderer.after_answer(before, answer, conversation[answered:], tools)

    async def _sample(
        self, segment: Segment, suffix: list[int], max_tokens: int | None, stop: Sequence[str]
    ) -> Sample:
        prompt = [*segment.token_ids, *suffix]
        limit = self._sampler.sampling.max_tokens
        most = min(max_tokens or limit, limit)
        if self._sampler.longest is not None:
            most = min(most, self._sampler.longest - len(prompt))
        if most < 1:
            self.cut_off = True
            raise TurnFailed(
                f"turn {self.turns + 1}: {len(prompt)} tokens leave no room for an answer "
                f"(engine.max_model_len={self._sampler.longest})"
            )
        shown, sample = await self._sampler.turn(prompt, segment.images, max_tokens=most, stop=stop)
        before = len(segment.token_ids)
        if shown[:before] != segment.token_ids:
            raise TurnFailed(f"turn {self.turns + 1}: the engine expands an image otherwise than before")
        segment.add_turn(shown[before:], sample)
        self.turns += 1
        self.generate_s += sample.seconds
        self.thought_tokens += sample.thought_tokens
        self.closings += sample.closings
        self.cut_off = self.cut_off or sample.finish_reason == "length"
        return sample

    async def _whole_text(self, sample: Sample) -> str:
        """The text of an answer's tokens, including the stop string and the rest of its last token."""
        if sample.stop is None:
            return sample.text
        whole = await self._sampler.text_of(sample.token_ids)
        return sample.text + sample.stop + whole.rpartition(sample.stop)[2]

    async def _message(
        self, sample: Sample, tools: Sequence[Mapping[str, object]], token_ids: Sequence[int]
    ) -> Message:
        """An answer, with which `token_ids` end, as a message with its text, thoughts and tool calls. A truncated answer calls nothing."""
        message = said_message(sample)
        finished = sample.finish_reason == "stop" and (sample.thoughts is None or sample.thoughts.closed)
        if not tools or not finished:
            return message
        ids = sample.token_ids
        thinking = await self._sampler.thinking()
        # A parser that also reads thoughts must know whether the prompt has begun one.
        before = token_ids[: len(token_ids) - len(ids)] if thinking.served else None
        if sample.reasoning is not None and not (thinking.served or thinking.format.calls_in_all):
            ids = thinking.marks.after(ids)
        read = await self._sampler.read_message(ids, tools, before) if ids else {}
        calls = calls_in(read)
        if not calls:
            return message
        listed = []
        for function in calls:
            self._tool_calls += 1
            listed.append({"id": f"call_{self._tool_calls}", "type": "function", "function": function})
        return {**message, "content": str(read.get("content") or "").strip(), "tool_calls": listed}

    def _reply(self, segment: Segment, sample: Sample, message: Message) -> Reply:
        before = len(segment.token_ids) - len(sample.token_ids)
        self.last = Reply(
            message, sample.text, sample.finish_reason, sample.token_ids, before, sample.thoughts
        )
        return self.last


def finished(
    client: Recorder, returned: Trajectory, *, error: str | None, seconds: float, lost: bool = False
) -> Episode:
    """The recorded episode. A failed one keeps its tokens and its error, but is not trained on. `lost`: its environment failed."""
    segments = tuple(segment for segment in client.segments if any(segment.loss_mask))
    if error is None and not segments:
        error = "the agent ended without requesting an answer from the policy"
    last = client.last
    thoughts = last.thoughts if last is not None else None
    text = returned.text
    if text is None and last is not None:
        text = last.text if thoughts is None else thoughts.text
    return Episode(
        text=text or "",
        thoughts=None if thoughts is None else Thoughts(thoughts.reasoning, text or "", thoughts.closed),
        thought_tokens=client.thought_tokens,
        closed_thoughts=client.closings,
        token_ids=[],
        logprobs=[],
        finish_reason="error" if error is not None else "length" if client.cut_off else "stop",
        seconds=client.generate_s,
        error=error,
        reward=returned.reward,
        metadata=returned.metadata,
        segments=segments,
        turns=client.turns,
        episode_s=seconds,
        lost=lost,
    )


def _normal(message: Mapping[str, object], number: int) -> Message:
    """Normalize a message, because clients differ in which fields they add. Raises TurnFailed."""
    kept = {name: plain(value) for name, value in message.items() if name in (*FIELDS, *THOUGHTS)}
    try:
        return checked(kept)
    except ValueError as error:
        raise TurnFailed(f"messages: message {number}: {error}") from None
