"""What a rollout is made of: samples, the group that a task's samples are, and how a request for them can fail."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsbarrier.data.tasks import Task
from fsbarrier.data.trajectory import Sampled
from fsbarrier.errors import ProgramFailed
from fsbarrier.protocol.facts import JsonObject

#: one chat message, as JSON has it
Message = JsonObject


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a task is answered: by so many samples, from which distribution. `max_tokens`: of one answer."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, token for token. If the model sampled an end token, that is the last of `token_ids`.

    `logprobs` has a number for each token, under the distribution that was sampled from (vLLM's `processed_logprobs`).
    `seconds`: from the request to its last token. `stop`: the stop string that ended it; its tokens are among `token_ids`, `text` ends
    before it. An episode of an agent (episode.py) is a Sample too, and also has: why it failed (`error`), the reward that the agent gave
    itself, and metadata.
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

    @property
    def messages(self) -> list[Message] | None:
        """The conversation of an episode; None for one answer."""
        return None

    @property
    def sampled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def timings(self) -> dict[str, float]:
        return {"generate_s": round(self.seconds, 6)}

    def record(self, group: SampledGroup) -> Sampled:
        """The trajectory's fields that come from the sampling: every token of prompt and answer, and which the model sampled."""
        before, after = len(group.prompt_ids), len(self.token_ids)
        return {
            "messages": [*group.task.messages, {"role": "assistant", "content": self.text}],
            "text": self.text,
            "token_ids": array("i", [*group.prompt_ids, *self.token_ids]),
            "prompt_tokens": before,
            "loss_mask": array("B", bytes(before) + b"\1" * after),
            "logprobs": array("f", [0.0] * before + self.logprobs),
        }


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """All samples of a task. `error`: why the server does not serve this prompt; `samples` is then empty. `replica`: which of the node's
    engines made them; None where that is not known.
    """

    task: Task
    prompt_ids: list[int]
    samples: tuple[Sample, ...]
    error: str | None = None
    replica: int | None = None


class EngineGone(ProgramFailed):
    """The server does not answer, or not as a vLLM server does. Groups that were handed out stay good."""


class EngineDown(EngineGone):
    """The server does not answer now. If it has ended, the daemon may start it again."""


class Again(Exception):
    """A request failed, and another try may succeed. `answered`: the server answered, with an error."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class Refusal(Exception):
    """The server will not serve this request, however often it is asked."""


#: takes a group when it is finished
Emit = Callable[[SampledGroup], None]
