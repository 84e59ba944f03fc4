"""Data types of a rollout: samples, groups, and the errors of sampling requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fsbarrier.data.images import sources
from fsbarrier.data.tasks import Task
from fsbarrier.data.trajectory import Sampled
from fsbarrier.errors import ProgramFailed
from fsbarrier.protocol.facts import JsonObject

#: the policy version of a token that nobody sampled, or of which the engine was not asked
UNKNOWN = -1
#: one chat message, as JSON has it
Message = JsonObject


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a task. `max_tokens`: per answer."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with its tokens. A sampled end token is the last of `token_ids`.

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
    #: an `error` of the episode's environment, and not of its agent
    lost: bool = False
    #: of each token, the policy version that sampled it, or UNKNOWN
    versions: Sequence[int] = ()

    @property
    def messages(self) -> list[Message] | None:
        """The conversation of an episode; None for a single answer."""
        return None

    @property
    def sampled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def timings(self) -> dict[str, float]:
        return {"generate_s": round(self.seconds, 6)}

    def record(self, group: SampledGroup) -> Sampled:
        """The trajectory fields that depend on sampling: all tokens of prompt and answer, and which of them were sampled."""
        before, after = len(group.prompt_ids), len(self.token_ids)
        return {
            "messages": [*group.conversation, {"role": "assistant", "content": self.text}],
            "text": self.text,
            **({"images": [group.images]} if group.images else {}),
            "token_ids": array("i", [*group.prompt_ids, *self.token_ids]),
            "prompt_tokens": before,
            "loss_mask": array("B", bytes(before) + b"\1" * after),
            "logprobs": array("f", [0.0] * before + self.logprobs),
            **told_versions([*[UNKNOWN] * before, *self.versions]),
        }


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """All samples of a task. `error`: why the server rejected the prompt; `samples` is then empty. `replica`: the engine that made them;
    None: unknown. `messages`: the task's, if they have images, with the names under which these are kept.
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


def told_versions(versions: Sequence[int]) -> Sampled:
    """The field `policy_versions` of a trajectory, if the engine told them."""
    return {"policy_versions": array("i", versions)} if any(one != UNKNOWN for one in versions) else {}


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
