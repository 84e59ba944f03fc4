"""One episode of an agent: the client that it talks to the policy through, which records every turn as tokens.

What is trained on is what the model saw and said, to the token. So a turn is sent to the engine as token ids: those of the turn before
(prompt and answer as they were, nothing made of text again), then what the chat template puts after the answer. That part is found
without knowing the template: the conversation is rendered twice, with two different words in the place of the last answer, and what
both have in common at the end comes after it. Where a turn does not go on from an earlier one (the agent changed the history), or
the template cannot be continued so, a new *segment* begins: a sequence of its own in the same trajectory, never a guess.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsbarrier.data.tasks import plain
from fsbarrier.rollouts.samples import EngineGone, Group, Refusal, Sample
from fsbarrier.rollouts.sampling import NEUTRAL, Sampler

Message = dict[str, Any]

STAND_INS = (
    "A",
    "B",
)  # for the last answer: one token each wherever letters are, and no part of any template's words
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)


class TurnFailed(Exception):
    """There is no answer to this turn, and why: no room is left for one, a time limit, sampling other than the run's."""


@dataclass(frozen=True)
class Reply:
    """One answer of the policy. `message` is to be appended to the messages of the next turn, as it is."""

    message: Message
    text: str
    finish_reason: str  # "stop", or "length": cut off by the token limit
    token_ids: list[int]
    prompt_tokens: int

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """As OpenAI gives them: [{"id", "type": "function", "function": {"name", "arguments" (JSON text)}}]."""
        return list(self.message.get("tool_calls", ()))


@dataclass
class Segment:
    """One sequence of tokens that only grows. `history`: its messages, the last answer included; `text`: as plain text."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    history: list[Message] = field(default_factory=list)
    tools: str = ""
    text: str = ""
    busy: bool = False

    def see(self, token_ids: Sequence[int]) -> None:
        """Tokens that the model is shown."""
        self.token_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def say(self, sample: Sample) -> None:
        """Tokens that the model sampled."""
        self.token_ids += sample.token_ids
        self.loss_mask += [1] * len(sample.token_ids)
        self.logprobs += sample.logprobs


@dataclass(frozen=True)
class Trajectory:
    """What an agent's `run` gives back; the turns themselves are recorded by the client.

    `reward`: its own, instead of `reward.kind`'s. `text`: what the reward judges and people read; the last answer where it is None.
    """

    reward: float | None = None
    text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Client:
    """Talks to the policy on the local engine, and records. One for each episode.

    `chat` and `complete` are the direct way. Any OpenAI-compatible client works too, with `base_url`, `api_key` and `model`: its
    requests take the same way and are recorded likewise (agent_http.py). `custom` are the run's settings `custom.*`.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        base_url: str = "",
        api_key: str = "",
        custom: Mapping[str, Any] | None = None,
        turn_timeout_s: float | None = None,
    ) -> None:
        self.base_url, self.api_key, self.model = base_url, api_key, "policy"
        self.custom: Mapping[str, Any] = custom or {}
        self.segments: list[Segment] = []
        self.turns = 0
        self.generate_s = 0.0
        self.cut_off = False  # some answer was cut off by the token limit
        self.gone: EngineGone | None = None
        self.last: Reply | None = None
        self._sampler, self._turn_timeout_s = sampler, turn_timeout_s
        self._calls = 0

    @property
    def sampling(self) -> dict[str, Any]:
        """How answers are sampled: as the run's settings say, for every turn."""
        server = self._sampler.server
        own = {"temperature": server.temperature, "top_p": server.top_p, "top_k": server.top_k}
        return {**own, **NEUTRAL, "n": 1, "logit_bias": {}}

    def trajectory(
        self, *, reward: float | None = None, text: str | None = None, **metadata: Any
    ) -> Trajectory:
        """What `run` gives back."""
        return Trajectory(reward, text, metadata)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The policy's answer to a conversation. Tool calls are read in the form `<tool_call>{"name", "arguments"}</tool_call>`.

        Temperature and the like are the run's: what is recorded must be what is trained on. Raises TurnFailed.
        """
        said = [_plain_message(message) for message in messages]
        offered = json.dumps(plain(list(tools)), sort_keys=True) if tools else ""
        more = {"tools": json.loads(offered)} if offered else {}
        async with self._turn() as turn:
            segment = self._continued(said, offered)
            suffix = None
            if segment is not None:
                turn.claim(segment)
                suffix = await self._after_answer(said, len(segment.history) - 1, more)
            if segment is None or suffix is None:
                segment = turn.claim(self._new_segment(tools=offered))
                suffix = await self._sampler.tokens(messages=said, add_generation_prompt=True, **more)
            elif suffix[0] == segment.token_ids[-1]:  # the model has said its end token itself
                del suffix[0]
            sample = await self._sample(segment, suffix, max_tokens, stop)
            message = self._message(sample.text, bool(offered))
            segment.history = [*said, message]
        return self._reply(segment, sample, message)

    async def complete(
        self, prompt: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """The policy's continuation of a text, without a chat template. A prompt that begins with an earlier prompt and its answer goes
        on from their tokens. Raises TurnFailed."""
        async with self._turn() as turn:
            found = [s for s in self.segments if s.text and not s.busy and prompt.startswith(s.text)]
            if found:
                segment = turn.claim(max(found, key=lambda s: len(s.text)))
                rest = prompt[len(segment.text) :]
                suffix = await self._sampler.tokens(prompt=rest, add_special_tokens=False) if rest else []
            else:
                segment, rest = turn.claim(self._new_segment()), prompt
                suffix = await self._sampler.tokens(prompt=prompt)
            sample = await self._sample(segment, suffix, max_tokens, stop)
            segment.text = prompt + sample.text
            message = {"role": "assistant", "content": sample.text}
            segment.history = [*segment.history, {"role": "user", "content": rest}, message]
        return self._reply(segment, sample, message)

    # --- one turn ---

    def _turn(self) -> _Turn:
        return _Turn(self, self._turn_timeout_s)

    def _new_segment(self, tools: str = "") -> Segment:
        segment = Segment(tools=tools)
        self.segments.append(segment)
        return segment

    def _continued(self, messages: list[Message], tools: str) -> Segment | None:
        """The segment that these messages go on from."""
        for segment in reversed(self.segments):
            known = segment.history
            goes_on = known and len(messages) > len(known) and messages[: len(known)] == known
            if goes_on and segment.tools == tools and not segment.busy and not segment.text:
                return segment
        return None

    async def _after_answer(
        self, messages: list[Message], answer: int, more: Mapping[str, Any]
    ) -> list[int] | None:
        """The tokens that the template puts after message number `answer`; None where it cannot be found out."""
        rendered = []
        for word in STAND_INS:
            stand_in = {"role": "assistant", "content": word}
            changed = [*messages[:answer], stand_in, *messages[answer + 1 :]]
            try:
                rendered.append(
                    await self._sampler.tokens(messages=changed, add_generation_prompt=True, **more)
                )
            except Refusal:  # by the template: it wants to know more of such an answer
                return None
        one, other = rendered
        common = 0
        while common < min(len(one), len(other)) and one[-1 - common] == other[-1 - common]:
            common += 1
        return one[-common:] if 0 < common < min(len(one), len(other)) else None

    async def _sample(
        self, segment: Segment, suffix: list[int], max_tokens: int | None, stop: Sequence[str]
    ) -> Sample:
        prompt = [*segment.token_ids, *suffix]
        most = min(max_tokens or self._sampler.server.max_tokens, self._sampler.server.max_tokens)
        if self._sampler.longest is not None:
            most = min(most, self._sampler.longest - len(prompt))
        if most < 1:
            self.cut_off = True
            raise TurnFailed(
                f"turn {self.turns + 1}: {len(prompt)} tokens leave no room for an answer "
                f"(engine.max_model_len={self._sampler.longest})"
            )
        sample = await self._sampler.turn(prompt, max_tokens=most, stop=stop)
        if not segment.token_ids:
            segment.prompt_tokens = len(suffix)
        segment.see(suffix)
        segment.say(sample)
        self.turns += 1
        self.generate_s += sample.seconds
        self.cut_off = self.cut_off or sample.finish_reason == "length"
        return sample

    def _message(self, text: str, with_tools: bool) -> Message:
        calls = tool_calls(text) if with_tools else []
        if not calls:
            return {"role": "assistant", "content": text}
        listed = []
        for call in calls:
            self._calls += 1
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            listed.append({"id": f"call_{self._calls}", "type": "function", "function": function})
        return {"role": "assistant", "content": _CALL.sub("", text).strip(), "tool_calls": listed}

    def _reply(self, segment: Segment, sample: Sample, message: Message) -> Reply:
        before = len(segment.token_ids) - len(sample.token_ids)
        self.last = Reply(message, sample.text, sample.finish_reason, sample.token_ids, before)
        return self.last


class _Turn:
    """One turn: its time limit, and the segments that it holds. Two calls at once cannot both go on from one: the second begins its own.

    An engine that is gone is remembered, should the agent take that for a failure of its own.
    """

    def __init__(self, client: Client, timeout_s: float | None) -> None:
        self.client, self.timeout_s = client, timeout_s
        self.held: list[Segment] = []

    def claim(self, segment: Segment) -> Segment:
        segment.busy = True
        self.held.append(segment)
        return segment

    async def __aenter__(self) -> _Turn:
        self.limit = asyncio.timeout(self.timeout_s)
        await self.limit.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        for segment in self.held:
            segment.busy = False
        if isinstance(error, EngineGone):
            self.client.gone = error
        try:
            await self.limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TurnFailed(
                f"turn {self.client.turns + 1}: no answer within {self.timeout_s:g} s (rollout.turn_timeout_s)"
            ) from None


def tool_calls(text: str) -> list[dict[str, Any]]:
    """The calls that a text makes; what is no JSON object with a name makes none."""
    found = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match[1])
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", {})
            found.append(
                {"name": call["name"], "arguments": arguments if isinstance(arguments, dict) else {}}
            )
    return found


def _plain_message(message: Mapping[str, Any]) -> Message:
    """As JSON has it, without what is empty: clients differ in what they leave out."""
    return {
        "content": "",
        **{str(name): plain(value) for name, value in message.items() if value or value == 0},
    }


# --- what becomes of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode(Sample):
    """An episode as a sample of its group. `token_ids` etc. hold the segments one after the other, `starts` where each begins."""

    segments: tuple[Segment, ...] = ()
    turns: int = 0
    episode_s: float = 0.0

    @property
    def messages(self) -> list[Message]:
        return list(self.segments[-1].history) if self.segments else []

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def timings(self) -> dict[str, float]:
        return {"generate_s": round(self.seconds, 6), "episode_s": round(self.episode_s, 6)}

    def record(self, group: Group) -> dict[str, Any]:
        starts, lengths = [0], [len(segment.token_ids) for segment in self.segments]
        for length in lengths[:-1]:
            starts.append(starts[-1] + length)
        made: dict[str, Any] = {
            "messages": self.messages or group.task.messages,
            "text": self.text,
            "token_ids": array("i", [t for s in self.segments for t in s.token_ids]),
            "prompt_tokens": self.segments[0].prompt_tokens if self.segments else 0,
            "loss_mask": array("B", [m for s in self.segments for m in s.loss_mask]),
            "logprobs": array("f", [p for s in self.segments for p in s.logprobs]),
            "turns": self.turns,
        }
        if len(starts) > 1:
            earlier = [list(segment.history) for segment in self.segments[:-1]]
            made |= {"segments": starts, "earlier_messages": earlier}
        return made


def finished(client: Client, returned: Trajectory, *, error: str | None, seconds: float) -> Episode:
    """The episode that a client recorded. A failed one keeps its tokens, and says why it is none to learn from."""
    segments = tuple(segment for segment in client.segments if any(segment.loss_mask))
    if error is None and not segments:
        error = "the agent ended without one answer of the policy"
    reason = "error" if error is not None else "length" if client.cut_off else "stop"
    text = returned.text if returned.text is not None else client.last.text if client.last else ""
    return Episode(
        text=text,
        token_ids=[],
        logprobs=[],
        finish_reason=reason,
        seconds=client.generate_s,
        error=error,
        reward=returned.reward,
        metadata={str(name): plain(value) for name, value in returned.metadata.items()},
        segments=segments,
        turns=client.turns,
        episode_s=seconds,
    )
