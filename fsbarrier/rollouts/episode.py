"""The recorded tokens of an agent's episode, and the episode as a sample of its group."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from fsbarrier.data.trajectory import Sampled
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.answers import Thoughts
from fsbarrier.rollouts.samples import UNKNOWN, Message, Sample, SampledGroup, said, told_versions


@dataclass
class Segment:
    """One token sequence, to which each turn appends. `history`: its messages including the last answer; `text`: as plain text.

    `answer_at`: where its last answer begins. `images`: its image files, in order. `tools`: the tools offered by the agent, as JSON.
    `busy`: a turn that continues it is in progress.
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    answer_at: int = 0
    history: list[Message] = field(default_factory=list)
    tools: str = ""
    #: the parts that identify the history (`answers.meaning`)
    meaning: list[object] = field(default_factory=list)
    text: str = ""
    images: list[str] = field(default_factory=list)
    busy: bool = False

    def add_turn(self, shown: Sequence[int], sample: Sample) -> None:
        """Append the prompt tokens of a turn, then the sampled tokens."""
        if not self.token_ids:
            self.prompt_tokens = len(shown)
        self.answer_at = len(self.token_ids) + len(shown)
        self.token_ids += [*shown, *sample.token_ids]
        self.loss_mask += [0] * len(shown) + [*sample.mask]
        self.logprobs += [0.0] * len(shown) + sample.logprobs
        self.versions += [*[UNKNOWN] * len(shown), *sample.versions]


class TurnFailed(Exception):
    """A turn without an answer: no room left, a timeout, or sampling options that differ from the run's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the policy. Append `message` to the messages of the next turn. `text`: the whole answer, with thoughts and calls."""

    message: Message
    text: str
    #: "stop", or "length" if truncated by the token limit
    finish_reason: str
    token_ids: list[int]
    prompt_tokens: int
    thoughts: Thoughts | None = None

    @property
    def tool_calls(self) -> list[JsonObject]:
        """In OpenAI's format: [{"id", "type": "function", "function": {"name", "arguments" (JSON text)}}]."""
        return list(self.message.get("tool_calls", ()))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The return value of an agent's `run`; the client has recorded the turns themselves.

    `reward`: replaces the reward of `reward.kind`. `text`: the text to score and display; None: the last answer.
    """

    reward: float | None = None
    text: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


# No slots: dataclass would create a new class, and super() then fails in Python 3.11.
@dataclass(frozen=True)
class Episode(Sample):
    """An episode as a sample of its group. Its tokens are in its segments; `token_ids` and `logprobs` are empty."""

    segments: tuple[Segment, ...] = ()
    turns: int = 0
    episode_s: float = 0.0
    #: in how many turns thoughts were closed at their limit
    closed_thoughts: int = 0

    @property
    def closings(self) -> int:
        return self.closed_thoughts

    @property
    def messages(self) -> list[Message]:
        return list(self.segments[-1].history) if self.segments else []

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def timings(self) -> dict[str, float]:
        return {**super().timings, "episode_s": round(self.episode_s, 6)}

    def record(self, group: SampledGroup) -> Sampled:
        """The concatenated segments; if there are several, `segments` contains their offsets."""
        made: Sampled = {
            "messages": self.messages or group.task.messages,
            **said(self),
            "token_ids": array("i", [t for s in self.segments for t in s.token_ids]),
            "prompt_tokens": self.segments[0].prompt_tokens if self.segments else 0,
            "loss_mask": array("B", [m for s in self.segments for m in s.loss_mask]),
            "logprobs": array("f", [p for s in self.segments for p in s.logprobs]),
            "turns": self.turns,
            **told_versions([v for s in self.segments for v in s.versions]),
        }
        if any(segment.images for segment in self.segments):
            made["images"] = [list(segment.images) for segment in self.segments]
        if len(self.segments) > 1:
            *earlier, _ = self.segments
            made["segments"] = [0, *accumulate(len(segment.token_ids) for segment in earlier)]
            made["earlier_messages"] = [list(segment.history) for segment in earlier]
        return made
