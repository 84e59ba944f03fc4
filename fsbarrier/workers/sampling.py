"""Sampling from a vLLM server over HTTP: tasks in; groups out, each as soon as its last sample is finished.

Many prompts go in one request: with small models the request itself costs more than the tokens (96 prompts with 16 samples: as fast
as it gets at 8 prompts a request; 256 prompts with one sample: 0.4 s at 64 a request, 3 to 7 s at one). The answer is streamed, so
that a group need not wait for the others in its request, and a long generation shows signs of life.

The requests carry no seed. vLLM would give all prompts of a request the same noise, and with a request of its own for each prompt
sampling was a third slower; on an accelerator seeded rows are sampled one by one. Equal results would not follow either: the sums of a
batch depend on what else is in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from fsbarrier.data.tasks import Task
from fsbarrier.engine.client import normal_url, refusal_text
from fsbarrier.errors import ProgramFailed

TOKENS_PER_CHUNK = 64  # of a sample; the answer's pieces
LONGEST_PAUSE_S = 10.0  # between two tries
KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes an idle connection: a request must not meet that
FINISHED = ("stop", "length")

#: what tokens came from: the distribution that is sampled is the model's, changed by what the settings say and nothing else
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


@dataclass(frozen=True)
class Sample:
    """One generation: what was sampled, exactly. An end token that was sampled is the last of `token_ids`.

    `logprobs` has a number for each token, under the distribution that was sampled from (vLLM's `processed_logprobs`).
    `seconds`: from the request to its last token.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    seconds: float


@dataclass(frozen=True)
class Group:
    """All samples of a task. `error`: why the server does not serve this prompt; `samples` is then empty."""

    task: Task
    prompt_ids: list[int]
    samples: tuple[Sample, ...]
    error: str | None = None


@dataclass(frozen=True)
class Server:
    """Where to sample, how, and how patiently. `timeout_s`: without a sign of life of a request; `tries`: of one request."""

    url: str
    api_key: str
    model: str
    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    timeout_s: float
    tries: int


class EngineGone(ProgramFailed):
    """The server does not answer, or not as a vLLM server does. Groups that were handed out stay good."""


class _Again(Exception):
    """A request failed in a way that may pass. `answered`: the server did say something."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class _Refusal(Exception):
    """The server will not serve this request, however often it is asked."""


@dataclass
class _Growing:
    """A sample of which pieces have come."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample: Sample | None = None


Emit = Callable[[Group], None]


class Sampler:
    """Samples groups from one server. `on_tokens` hears how many tokens have come."""

    def __init__(self, server: Server, *, connections: int, on_tokens: Callable[[int], None]) -> None:
        self.server = server
        self.on_tokens = on_tokens
        self.url = normal_url(server.url)
        self._model = server.model
        self._max_tokens = server.max_tokens
        self._chat_ids: dict[int, list[int]] = {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            timeout=httpx.Timeout(server.timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,  # no proxy between us and this machine
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def look(self) -> None:
        """See that the server answers and takes the key; what its model is called and how long a sequence may be. Raises EngineGone."""
        try:
            answer = await self._retried(lambda: self._json("GET", "/v1/models"))
            model = answer["data"][0]
            self._model = self.server.model or str(model["id"])
            longest = model.get("max_model_len")
        except _Again as error:
            raise self._gone(error) from None
        except (_Refusal, KeyError, IndexError, TypeError) as error:
            raise EngineGone(f"the engine at {self.url} does not name its model: {error}") from None
        if isinstance(longest, int):  # vLLM refuses to be asked for more than there is room for in all
            self._max_tokens = min(self.server.max_tokens, max(1, longest - 1))

    async def sample(self, tasks: Sequence[Task], emit: Emit) -> None:
        """Sample a group for each task, in one request where the server takes it; `emit` gets each as it is finished.

        After a failure only what was not yet handed out is asked for again, so no task is handed out twice. A prompt that the server will
        not serve alone either comes as a Group with `error`. Raises EngineGone.
        """
        pending = {task.index: task for task in tasks}

        def done(group: Group) -> None:
            del pending[group.task.index]
            self._chat_ids.pop(group.task.index, None)
            emit(group)

        try:
            await self._retried(lambda: self._request(list(pending.values()), done))
            return
        except _Again as error:
            if not error.answered:
                raise self._gone(error) from None
            reason = f"{error} ({self.server.tries} tries)"
        except _Refusal as refusal:
            reason = str(refusal)
        if len(tasks) == 1:
            done(Group(tasks[0], self._chat_ids.get(tasks[0].index, []), (), reason))
            return
        for task in list(pending.values()):  # which of them is it?
            await self.sample([task], done)

    async def _retried(self, call: Callable[[], Any]) -> Any:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(_Again),
            stop=stop_after_attempt(self.server.tries),
            wait=wait_random_exponential(multiplier=0.2, max=LONGEST_PAUSE_S),
            reraise=True,
        ):
            with attempt:
                return await call()
        raise AssertionError("unreachable")

    def _gone(self, error: Exception) -> EngineGone:
        return EngineGone(f"the engine at {self.url} does not answer: {error} ({self.server.tries} tries)")

    # --- one request ---

    async def _request(self, tasks: list[Task], done: Emit) -> None:
        body = {
            "model": self._model,
            "prompt": [await self._prompt(task) for task in tasks],
            "n": self.server.samples,
            "temperature": self.server.temperature,
            "top_p": self.server.top_p,
            "top_k": self.server.top_k,
            "max_tokens": self._max_tokens,
            **NEUTRAL,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_interval": TOKENS_PER_CHUNK,
        }
        stream = _Stream(self, tasks, done)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise self._failure(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        stream.take(line[5:].strip())
        except httpx.TransportError as error:
            raise _Again(_reason(error), answered=False) from None
        if not stream.complete:
            raise _Again("the answer broke off", answered=False)

    async def _prompt(self, task: Task) -> str | list[int]:
        """Text as it is: the server's tokenizer makes tokens of it. Chat messages through the model's template first."""
        if isinstance(task.prompt, str):
            return task.prompt
        if task.index not in self._chat_ids:
            body = {"model": self._model, "messages": task.messages, "add_generation_prompt": True}
            answer = await self._json("POST", "/tokenize", body)
            try:
                self._chat_ids[task.index] = [int(token) for token in answer["tokens"]]
            except (KeyError, TypeError, ValueError):
                raise EngineGone(f"the engine at {self.url}/tokenize gives no tokens; is it vLLM?") from None
        return self._chat_ids[task.index]

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise _Again(_reason(error), answered=False) from None
        if response.status_code != 200:
            raise self._failure(response.status_code, response.content)
        try:
            return response.json()
        except ValueError:
            raise EngineGone(f"the engine at {self.url}{path} does not answer in JSON; is it vLLM?") from None

    def _failure(self, status: int, body: bytes) -> Exception:
        message = f"HTTP {status}: {refusal_text(body)}"
        if status in (401, 403, 404):
            return EngineGone(f"the engine at {self.url} refuses: {message}")
        if status in (408, 425, 429) or status >= 500:
            return _Again(message, answered=True)
        return _Refusal(message)


class _Stream:
    """The pieces of one request's answer, put together."""

    def __init__(self, sampler: Sampler, tasks: list[Task], done: Emit) -> None:
        self.sampler, self.tasks, self.done = sampler, tasks, done
        self.per_task = sampler.server.samples
        self.growing: dict[int, _Growing] = {}
        self.prompt_ids: dict[int, list[int]] = {}
        self.finished = [0] * len(tasks)
        self.begin = time.monotonic()

    @property
    def complete(self) -> bool:
        return all(count == self.per_task for count in self.finished)

    def take(self, data: str) -> None:
        """One event of the stream. Raises _Again, _Refusal, EngineGone."""
        if data == "[DONE]" or not data:
            return
        try:
            event = json.loads(data)
            error, choices = event.get("error"), event.get("choices", ())
        except (ValueError, AttributeError):
            raise _Again(f"an answer that is no JSON: {data[:100]!r}", answered=False) from None
        if error:
            code = error.get("code") if isinstance(error, Mapping) else None
            raise self.sampler._failure(code if isinstance(code, int) else 500, data.encode())
        for choice in choices:
            try:
                self._piece(choice)
            except (KeyError, TypeError, ValueError, IndexError):
                raise EngineGone(
                    f"the engine at {self.sampler.url} does not give token ids and log-probabilities "
                    "(return_token_ids, logprobs): it must be a vLLM that knows them"
                ) from None

    def _piece(self, choice: Mapping[str, Any]) -> None:
        index = choice["index"]
        task = index // self.per_task
        sample = self.growing.setdefault(index, _Growing())
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids[task] = choice["prompt_token_ids"]
        ids = choice["token_ids"] or []
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]] if ids else []
        if len(ids) != len(logprobs):
            raise ValueError("not one log-probability a token")
        sample.text.append(choice["text"])
        sample.token_ids += ids
        sample.logprobs += logprobs
        self.sampler.on_tokens(len(ids))
        reason = choice.get("finish_reason")
        if reason is None:
            return
        if reason not in FINISHED:
            raise _Again(f"the server ended a generation ({reason})", answered=False)
        seconds = time.monotonic() - self.begin
        sample.sample = Sample("".join(sample.text), sample.token_ids, sample.logprobs, reason, seconds)
        self.finished[task] += 1
        if self.finished[task] == self.per_task:
            self._group(task)

    def _group(self, task: int) -> None:
        numbers = range(task * self.per_task, (task + 1) * self.per_task)
        samples = tuple(sample for number in numbers if (sample := self.growing.pop(number).sample))
        self.done(Group(self.tasks[task], self.prompt_ids[task], samples))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
