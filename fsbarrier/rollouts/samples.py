"""Data types of a rollout: samples, groups, and the errors of sampling requests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fsbarrier.data.images import sources
from fsbarrier.data.tasks import Task
from fsbarrier.data.trajectory import Sampled
from fsbarrier.engine.answer_format import USUAL, ThoughtFormat
from fsbarrier.errors import ProgramFailed
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.answers import Thoughts

#: the policy version of a token that was not sampled, or whose version the engine was not asked for
UNKNOWN = -1
#: one chat message as a JSON object
Message = JsonObject


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a task. `max_tokens`: per answer."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


#: neutral values for all parameters that would change the distribution beyond the run's settings
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class SamplingServer:
    """A server and its timeouts. `timeout_s`: without output from a request; `tries`: attempts per request.

    `template_arguments`: extra arguments for the chat template. `banned`: tokens that are never sampled. `stop`: texts that end an
    answer. `seed`: the base of the answers' seeds; "": no seeds. `in_flight`: ask the server which policy version sampled each token.
    `thoughts`: how the model marks its thoughts; None: the server's own parser reads them. `max_thinking_tokens`: longer thoughts are
    closed; None: no limit.
    """

    url: str
    api_key: str
    model: str
    timeout_s: float
    tries: int
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    banned: Sequence[int] = ()
    stop: Sequence[str] = ()
    seed: str = ""
    in_flight: bool = False
    thoughts: ThoughtFormat | None = USUAL
    max_thinking_tokens: int | None = None

    def seed_of(self, task: Task, part: str = "") -> dict[str, object]:
        """The seed parameter of a task's request, if seeds are used. vLLM adds the sample's number to it. `part`: names a further request
        for the same task."""
        digest = hashlib.sha256(f"{self.seed}:{task.index}{part}".encode()).digest()
        return {"seed": int.from_bytes(digest[:6])} if self.seed else {}

    @property
    def distribution(self) -> dict[str, object]:
        """The parameters that a request needs for the distribution to be the run's. The bias is the strongest that vLLM allows."""
        return {
            **NEUTRAL,
            **({"stop": [*self.stop]} if self.stop else {}),
            **({"skip_special_tokens": False} if self.thoughts is not None and self.thoughts.hidden else {}),
            **({"logit_bias": dict.fromkeys(map(str, self.banned), -100)} if self.banned else {}),
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with its tokens, and its whole text. A sampled end token is the last of `token_ids`.

    `logprobs`: one number per token, under the sampled distribution (vLLM's `processed_logprobs`). `seconds`: from the request to the last
    token. `stop`: the stop string that ended it; its tokens are in `token_ids`, but `text` ends before it. An agent's episode (episode.py)
    is also a Sample, with an `error` if it failed, a reward given by the agent, and metadata.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    seconds: float
    error: str | None = None
    reward: float | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    stop: str | None = None
    #: whether `error` is the environment's fault, not the agent's
    lost: bool = False
    #: the policy version that sampled each token, or UNKNOWN
    versions: Sequence[int] = ()
    #: what its text consists of; None: it has no thoughts
    thoughts: Thoughts | None = None
    #: number of the sampled tokens of its thoughts
    thought_tokens: int = 0
    #: the positions of the tokens with which the rollout, not the policy, has closed the thoughts
    given: range = range(0)

    @property
    def response(self) -> str:
        """The text without thoughts."""
        return self.text if self.thoughts is None else self.thoughts.text

    @property
    def reasoning(self) -> str | None:
        return None if self.thoughts is None else self.thoughts.reasoning

    @property
    def mask(self) -> bytes:
        """For each token, 1 if the policy has sampled it."""
        marks = bytearray(b"\1" * len(self.token_ids))
        marks[self.given.start : self.given.stop] = bytes(len(self.given))
        return bytes(marks)

    @property
    def closings(self) -> int:
        """How often the rollout has closed thoughts."""
        return int(bool(self.given))

    @property
    def messages(self) -> list[Message] | None:
        """The conversation of an episode; None for a single answer."""
        return None

    @property
    def sampled_tokens(self) -> int:
        return len(self.token_ids) - len(self.given)

    @property
    def timings(self) -> dict[str, float]:
        return {"generate_s": round(self.seconds, 6)}

    def record(self, group: SampledGroup) -> Sampled:
        """The trajectory fields that depend on sampling: all tokens of prompt and answer, and which of them were sampled."""
        before = len(group.prompt_ids)
        return {
            "messages": [*group.conversation, said_message(self)],
            **said(self),
            **({"images": [group.images]} if group.images else {}),
            "token_ids": array("i", [*group.prompt_ids, *self.token_ids]),
            "prompt_tokens": before,
            "loss_mask": array("B", bytes(before) + self.mask),
            "logprobs": array("f", [0.0] * before + self.logprobs),
            **told_versions([*[UNKNOWN] * before, *self.versions]),
        }


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """All samples of a task. `error`: why the server rejected the prompt; `samples` is then empty. `replica`: the engine that made them;
    None: unknown. `messages`: the task's messages with the names of the stored images; None: no images.
    """

    task: Task
    prompt_ids: list[int]
    samples: tuple[Sample, ...]
    error: str | None = None
    replica: int | None = None
    messages: Sequence[Message] | None = None

    @property
    def conversation(self) -> list[Message]:
        """The task's messages as they are in trajectories."""
        return self.task.messages if self.messages is None else list(self.messages)

    @property
    def images(self) -> list[str]:
        return list(sources(self.messages or ()))


def said_message(sample: Sample) -> Message:
    """An answer as a message: its text, and its thoughts beside it."""
    thoughts = {"reasoning_content": sample.reasoning} if sample.reasoning else {}
    return {"role": "assistant", "content": sample.response, **thoughts}


def said(sample: Sample) -> Sampled:
    """The fields of a trajectory that show the answer and its thoughts."""
    fields: Sampled = {"text": sample.response}
    if sample.reasoning is not None:
        fields["reasoning"] = sample.reasoning
    if sample.thought_tokens:
        fields["reasoning_tokens"] = sample.thought_tokens
    if sample.closings:
        fields["thoughts_closed"] = sample.closings
    return fields


def told_versions(versions: Sequence[int]) -> Sampled:
    """The field `policy_versions` of a trajectory, if the engine reported any."""
    return (
        {"policy_versions": array("i", versions)} if any(version != UNKNOWN for version in versions) else {}
    )


class EngineGone(ProgramFailed):
    """The server does not answer, or is not a vLLM server. Groups that were already emitted remain valid."""


class EngineDown(EngineGone):
    """The server does not answer at the moment. If it has ended, the daemon may restart it."""


class Again(Exception):
    """A request failed, but a retry may succeed. `answered`: the server returned an error response."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class Refusal(Exception):
    """The server rejects this request permanently."""


#: receives each finished group
Emit = Callable[[SampledGroup], None]
