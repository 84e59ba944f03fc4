"""Parses a vLLM server's response to one request, streamed or not, into samples and groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fsbarrier.data.tasks import Task
from fsbarrier.engine.openai_http import may_pass, refusal_text
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.samples import UNKNOWN, Again, Emit, EngineGone, Refusal, Sample, SampledGroup
from fsbarrier.store.foreign_json import NotJson, parse_object


def failure(url: str, status: int, body: bytes) -> Exception:
    """Classify an error response: retry the request, reject the prompt, or give up on the server."""
    message = f"HTTP {status}: {refusal_text(body)}"
    if status in (401, 403, 404):
        return EngineGone(f"the engine at {url} refuses: {message}")
    return Again(message, answered=True) if may_pass(status) else Refusal(message)


@dataclass
class _Growing:
    """A partially received sample; `sample` is None until the last piece."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample: Sample | None = None


class AnswerStream:
    """Passes each task's group to `emit` when it is complete. `on_tokens` receives the number of new tokens."""

    def __init__(
        self, url: str, tasks: list[Task], emit: Emit, on_tokens: Callable[[int], None], per_task: int
    ) -> None:
        self.per_task = per_task
        self._url, self._tasks, self._emit, self._on_tokens = url, tasks, emit, on_tokens
        # The prompt's tokens before images are expanded, and a function that undoes the expansion; None: no images.
        self.expected: tuple[Sequence[int], Callable[[Sequence[int]], list[int]]] | None = None
        self._growing: dict[int, _Growing] = {}
        self._prompt_ids: dict[int, list[int]] = {}
        self._finished = [0] * len(tasks)
        self._begin = time.monotonic()

    @property
    def complete(self) -> bool:
        return all(count == self.per_task for count in self._finished)

    def take(self, data: str) -> None:
        """Process one stream event, or a non-streamed response. Raises Again, Refusal, EngineGone."""
        if data == "[DONE]" or not data:
            return
        try:
            event = parse_object(data)
        except NotJson:
            raise Again(f"an answer that is no JSON: {data[:100]!r}", answered=False) from None
        if error := event.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            raise failure(self._url, code if isinstance(code, int) else 500, data.encode())
        # The route for images sends the prompt's tokens once, beside the choices.
        shared = {"prompt_token_ids": ids} if (ids := event.get("prompt_token_ids")) is not None else {}
        try:
            for choice in event.get("choices", ()):
                self._add({**choice, **shared})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise EngineGone(
                f"the engine at {self._url} does not return token ids and log-probabilities "
                "(return_token_ids, logprobs); use a vLLM version that supports them"
            ) from None

    def _add(self, choice: JsonObject) -> None:
        """Take one stream event of one sample. `index` counts the samples of all prompts in the request.

        Raises KeyError, TypeError, ValueError or IndexError if the server does not return tokens in vLLM's format.
        """
        index, token_ids, reason = choice["index"], choice["token_ids"] or [], choice.get("finish_reason")
        growing, task = self._growing.setdefault(index, _Growing()), index // self.per_task
        # Only the first piece of a prompt's samples contains its tokens.
        if (prompt_ids := choice.get("prompt_token_ids")) is not None:
            if self.expected is not None and self.expected[1](prompt_ids) != list(self.expected[0]):
                raise Refusal(
                    "the engine does not expand each image in its place; this kind of model is not supported"
                )
            self._prompt_ids[task] = prompt_ids
        growing.text.append(choice["text"])
        growing.token_ids += token_ids
        growing.logprobs += _logprobs(choice["logprobs"]) if token_ids else []
        if len(growing.token_ids) != len(growing.logprobs):
            raise ValueError("not one log-probability a token")
        self._on_tokens(len(token_ids))
        if reason is None:
            return
        if reason not in ("stop", "length"):
            raise Again(f"the server ended a generation ({reason})", answered=False)
        # The last piece has the versions of the whole sample.
        spans = choice.get("weight_versions") or ()
        if sum(span["end"] - span["start"] for span in spans) not in (0, len(growing.token_ids)):
            raise ValueError("not one policy version a token")
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        growing.sample = Sample(
            text="".join(growing.text),
            token_ids=growing.token_ids,
            logprobs=growing.logprobs,
            finish_reason=reason,
            seconds=time.monotonic() - self._begin,
            # This is a number if a token ended the sample.
            stop=stop if isinstance(stop := choice.get("stop_reason"), str) else None,
            versions=versions or [UNKNOWN] * len(growing.token_ids),
        )
        self._finished[task] += 1
        if self._finished[task] == self.per_task:
            self._emit_group(task)

    def _emit_group(self, task: int) -> None:
        numbers = range(task * self.per_task, (task + 1) * self.per_task)
        samples = tuple(sample for number in numbers if (sample := self._growing.pop(number).sample))
        self._emit(SampledGroup(self._tasks[task], self._prompt_ids[task], samples))


def _logprobs(reported: JsonObject) -> list[float]:
    """Text completions have a list of numbers; the route that takes images has a list of objects."""
    values = (
        reported["token_logprobs"]
        if "token_logprobs" in reported
        else [x["logprob"] for x in reported["content"]]
    )
    return [float(value) for value in values]
