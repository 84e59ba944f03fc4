"""What a vLLM server sampled: the pieces of a streamed answer put together into samples and groups, and what its errors mean."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsbarrier.data.tasks import Task
from fsbarrier.errors import ProgramFailed
from fsbarrier.openai_http import may_pass, refusal_text

FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Sample:
    """One generation: what was sampled, exactly. An end token that was sampled is the last of `token_ids`.

    `logprobs` has a number for each token, under the distribution that was sampled from (vLLM's `processed_logprobs`).
    `seconds`: from the request to its last token. An episode of an agent (episode.py) is one too, with more to tell: why it failed
    (`error`), the reward that the agent gave itself, metadata.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    seconds: float
    error: str | None = None
    reward: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """The conversation of an episode; None for one answer."""
        return None

    @property
    def sampled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def timings(self) -> dict[str, float]:
        return {"generate_s": round(self.seconds, 6)}

    def record(self, group: Group) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Group:
    """All samples of a task. `error`: why the server does not serve this prompt; `samples` is then empty."""

    task: Task
    prompt_ids: list[int]
    samples: tuple[Sample, ...]
    error: str | None = None


class EngineGone(ProgramFailed):
    """The server does not answer, or not as a vLLM server does. Groups that were handed out stay good."""


class Again(Exception):
    """A request failed in a way that may pass. `answered`: the server did say something."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class Refusal(Exception):
    """The server will not serve this request, however often it is asked."""


@dataclass
class Growing:
    """A sample of which pieces have come."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample: Sample | None = None


Emit = Callable[[Group], None]


def failure(url: str, status: int, body: bytes) -> Exception:
    """What an answer with an error means for the request: try again, give the prompt up, or give the server up."""
    message = f"HTTP {status}: {refusal_text(body)}"
    if status in (401, 403, 404):
        return EngineGone(f"the engine at {url} refuses: {message}")
    if may_pass(status):
        return Again(message, answered=True)
    return Refusal(message)


class Stream:
    """The pieces of one request's answer, put together."""

    def __init__(
        self, url: str, tasks: list[Task], done: Emit, on_tokens: Callable[[int], None], per_task: int
    ) -> None:
        self.url, self.tasks, self.done, self.on_tokens = url, tasks, done, on_tokens
        self.per_task = per_task
        self.growing: dict[int, Growing] = {}
        self.prompt_ids: dict[int, list[int]] = {}
        self.finished = [0] * len(tasks)
        self.begin = time.monotonic()

    @property
    def complete(self) -> bool:
        return all(count == self.per_task for count in self.finished)

    def take(self, data: str) -> None:
        """One event of the stream. Raises Again, Refusal, EngineGone."""
        if data == "[DONE]" or not data:
            return
        try:
            event = json.loads(data)
            error, choices = event.get("error"), event.get("choices", ())
        except (ValueError, AttributeError):
            raise Again(f"an answer that is no JSON: {data[:100]!r}", answered=False) from None
        if error:
            code = error.get("code") if isinstance(error, Mapping) else None
            raise failure(self.url, code if isinstance(code, int) else 500, data.encode())
        for choice in choices:
            try:
                self._piece(choice)
            except (KeyError, TypeError, ValueError, IndexError):
                raise EngineGone(
                    f"the engine at {self.url} does not give token ids and log-probabilities "
                    "(return_token_ids, logprobs): it must be a vLLM that knows them"
                ) from None

    def _piece(self, choice: Mapping[str, Any]) -> None:
        index = choice["index"]
        task = index // self.per_task
        sample = self.growing.setdefault(index, Growing())
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids[task] = choice["prompt_token_ids"]
        ids = choice["token_ids"] or []
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]] if ids else []
        if len(ids) != len(logprobs):
            raise ValueError("not one log-probability a token")
        sample.text.append(choice["text"])
        sample.token_ids += ids
        sample.logprobs += logprobs
        self.on_tokens(len(ids))
        reason = choice.get("finish_reason")
        if reason is None:
            return
        if reason not in FINISHED:
            raise Again(f"the server ended a generation ({reason})", answered=False)
        seconds = time.monotonic() - self.begin
        sample.sample = Sample("".join(sample.text), sample.token_ids, sample.logprobs, reason, seconds)
        self.finished[task] += 1
        if self.finished[task] == self.per_task:
            self._group(task)

    def _group(self, task: int) -> None:
        numbers = range(task * self.per_task, (task + 1) * self.per_task)
        samples = tuple(sample for number in numbers if (sample := self.growing.pop(number).sample))
        self.done(Group(self.tasks[task], self.prompt_ids[task], samples))
