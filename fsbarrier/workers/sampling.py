"""The client of the local engine: groups of samples with their token ids and log-probabilities, over vLLM's HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import tenacity

from fsbarrier.errors import ProgramFailed
from fsbarrier.tasks import Task

CONNECT_S = 10.0
#: a request is worth packing with others as long as all of it is about this many tokens
TOKENS_PER_REQUEST, MOST_PROMPTS = 2048, 32
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 10.0


@dataclass(frozen=True)
class Sample:
    """One generation. `logprobs`: of each sampled token, at the sampling distribution. Not valid: failed, or cut off."""

    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str

    @property
    def valid(self) -> bool:
        return self.finish_reason == "stop"


class Rejected(Exception):
    """The engine refused a request as such (too long a prompt, say): asking again will not help."""


class Sampler:
    """Asks the engine for `samples` generations a prompt. Use as an async context manager."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        engine, settings = spec["engine"], spec["settings"]["rollout"]
        self.sampling: Mapping[str, Any] = spec["sampling"]
        self.model: str = engine["model"]
        self.seed = (self.sampling["seed"], spec["iteration"], spec["split"])
        self.retries: int = settings["retries"]
        one = self.sampling["samples"] * self.sampling["max_tokens"]
        self.prompts_per_request = max(1, min(MOST_PROMPTS, TOKENS_PER_REQUEST // one))
        self._client = httpx.AsyncClient(
            base_url=engine["url"],
            headers={"Authorization": f"Bearer {engine['api_key']}"} if engine["api_key"] else {},
            timeout=httpx.Timeout(settings["request_timeout_s"], connect=CONNECT_S),
            limits=httpx.Limits(max_connections=settings["concurrency"]),
            trust_env=False,  # no proxy between a node and itself
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def sample(self, tasks: Sequence[Task]) -> list[list[Sample]]:
        """One list of samples a task. A task that the engine refuses, or does not answer in time, has failed samples.

        Raises ProgramFailed where the engine cannot be reached or does not answer as vLLM does.
        """
        try:
            prompts = [await self.prompt(task) for task in tasks]
            return self.parsed(await self.complete(prompts), tasks)
        except (Rejected, httpx.TimeoutException) as error:
            if len(tasks) > 1:  # find the one it is about
                return [samples for task in tasks for samples in await self.sample([task])]
            reason = "timeout" if isinstance(error, httpx.TimeoutException) else "rejected"
            return [[Sample("", (), (), (), reason)] * self.sampling["samples"]]

    async def prompt(self, task: Task) -> str | list[int]:
        """Text as it is; chat messages through the model's own template, as token ids."""
        if isinstance(task.prompt, str):
            return task.prompt
        body = {"model": self.model, "messages": task.messages, "add_generation_prompt": True}
        tokens: list[int] = (await self.post("/tokenize", body))["tokens"]
        return tokens

    async def complete(self, prompts: Sequence[str | list[int]]) -> Any:
        sampling = self.sampling
        body = {
            "model": self.model,
            "prompt": list(prompts),
            "n": sampling["samples"],
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            "top_k": sampling["top_k"],
            "max_tokens": sampling["max_tokens"],
            "logprobs": 0,
            "return_token_ids": True,
        }
        return await self.post("/v1/completions", body)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """One answer, asked for again after transport errors and 5xx: nothing was kept of a request that failed."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_passing),
            stop=tenacity.stop_after_attempt(1 + self.retries),
            wait=tenacity.wait_random_exponential(RETRY_FIRST_S, RETRY_MOST_S),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    response = await self._client.post(path, json=body)
                    if 400 <= response.status_code < 500:
                        raise Rejected(f"{path}: {response.status_code} {response.text[:300]}")
                    response.raise_for_status()
                    return response.json()
        except httpx.TimeoutException:
            raise
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ProgramFailed(f"the engine at {self._client.base_url} does not answer ({said})") from None
        raise AssertionError("unreachable: retrying ends in a return or an exception")

    def parsed(self, answer: Any, tasks: Sequence[Task]) -> list[list[Sample]]:
        """The choices of an answer, by task. Raises ProgramFailed where ids and log-probabilities are missing."""
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            samples = [_sample(choice) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise ProgramFailed(
                f"the engine at {self._client.base_url} answers without token ids or log-probabilities "
                f"({type(error).__name__}: {error}); it must be vLLM 0.10 or newer"
            ) from None
        size = self.sampling["samples"]
        if len(samples) != size * len(tasks):
            raise ProgramFailed(
                f"the engine gave {len(samples)} samples where {size * len(tasks)} were asked for"
            )
        return [samples[start : start + size] for start in range(0, len(samples), size)]


def _sample(choice: Mapping[str, Any]) -> Sample:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} token ids and {len(logprobs)} log-probabilities")
    prompt = tuple(choice["prompt_token_ids"])
    return Sample(
        choice["text"], prompt, tuple(tokens), tuple(logprobs), choice["finish_reason"] or "unknown"
    )


def _passing(error: BaseException) -> bool:
    """Whether an error may pass by itself. A time-out is not tried again: the engine may still be at it."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.ReadTimeout)
