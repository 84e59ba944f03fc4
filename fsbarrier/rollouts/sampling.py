"""Samples from one vLLM server over HTTP: takes tasks, emits each group when its last sample is finished (engine_pool.py handles several).

Many prompts share a request, because with small models the request costs more than the tokens (96 prompts with 16 samples: fastest from 8
prompts per request; 256 prompts with one sample: 0.4 s at 64 per request, 3 to 7 s at one). Responses are streamed, so that a group need
not wait for the others in its request, and to detect stalled requests. Short answers are not streamed: each would take two chunks, which
cost both sides more than the tokens.

Requests carry a seed only with `rollout.reproducible`. vLLM would use the same noise for all prompts of a request, and one request per
prompt was a third slower; on an accelerator, seeded rows are sampled one by one. Even then floating-point sums depend on the rest of the
batch, unless the engine computes each row by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import httpx

from fsbarrier.data.images import Message, sources
from fsbarrier.data.messages import for_engine
from fsbarrier.data.tasks import Task
from fsbarrier.engine.client import normal_url
from fsbarrier.engine.openai_http import asked_again, base_and_socket, bearer, described
from fsbarrier.rollouts.answer_stream import AnswerStream, failure
from fsbarrier.rollouts.pictures import Pictures, without_images
from fsbarrier.rollouts.samples import (
    Again,
    Emit,
    EngineDown,
    EngineGone,
    Refusal,
    Sample,
    SampledGroup,
    Sampling,
    SamplingServer,
)
from fsbarrier.store.foreign_json import NotJson, parse

#: tokens of a sample per chunk of the streamed response
TOKENS_PER_PIECE = 64
#: Longest answer that is not streamed; a longer one on a slow server could exceed the timeout without any output.
WHOLE_TOKENS = 16
#: below the 5 s after which vLLM's server closes idle connections, to avoid sending a request on a closing connection
KEEPALIVE_S = 2.0
WAITING = ("vllm:num_requests_waiting{", "vllm:num_requests_waiting ")
#: assumed number of waiting sequences while the server does not answer
MANY = 10**9
#: timeout of a request for the metrics; a server that computes on the CPU answers slowly
METRICS_S = 5.0

T = TypeVar("T")


class Sampler:
    """Samples groups from one server, the node's replica `number`. `on_tokens` receives the number of new tokens.

    `up`: set while the server answers; `sequences`: number in flight. The pool (engine_pool.py) maintains both.
    """

    def __init__(
        self,
        server: SamplingServer,
        number: int = 0,
        *,
        connections: int,
        on_tokens: Callable[[int], None],
        pictures: Pictures | None = None,
    ) -> None:
        self.server, self.number = server, number
        self.pictures = pictures or Pictures(None, None)
        self.up = asyncio.Event()
        self.up.set()
        self.sequences = self.sampled_tokens = 0
        self._on_tokens = on_tokens
        self.url = normal_url(server.url)
        # The maximum tokens of prompt plus answer, once the server has reported it.
        self.longest: int | None = None
        self._model = server.model
        self._token_ids: dict[int, list[int]] = {}
        # The text of the beginning-of-sequence token that the tokenizer adds to each text; "" if it adds none.
        self._begin = ""
        base, socket = base_and_socket(self.url)
        limits = httpx.Limits(max_connections=connections, keepalive_expiry=KEEPALIVE_S)
        self._client = httpx.AsyncClient(
            base_url=base,
            headers=bearer(server.api_key),
            timeout=httpx.Timeout(server.timeout_s, connect=10.0, pool=None),
            # Without TLS, skip loading the system's certificates (30 ms).
            transport=httpx.AsyncHTTPTransport(
                verify=base.startswith("https"), uds=socket, limits=limits, trust_env=False
            ),
            # No proxy: the server is on this machine, or at `engine.url`.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def query_model(self) -> None:
        """Check that the server answers and accepts the key; query its model name and maximum length. Raises EngineGone."""
        try:
            answer = await self._asked(lambda: self._json("GET", "/v1/models"), refuses=False)
            model = answer["data"][0]
            self._model = self.server.model or str(model["id"])
            longest = model.get("max_model_len")
            self._begin = await self._asked(self._text_of_begin, refuses=False)
        except (Refusal, KeyError, IndexError, TypeError) as error:
            raise EngineGone(f"the engine at {self.url} does not report its model: {error}") from None
        if isinstance(longest, int):
            self.longest = longest

    async def sample(self, pending: dict[int, Task], emit: Emit, sampling: Sampling) -> None:
        """Sample a group for each task, in one request if the server accepts it; `emit` receives each finished group.

        Emitted tasks are removed from `pending`, so a retry requests only the other groups, and no task is emitted twice. A prompt that
        the server rejects even alone is emitted as a SampledGroup with `error`. Raises EngineGone.
        """
        alone = len(pending) == 1
        # A task with images is always alone.
        seeing = next((task for task in pending.values() if task.has_images), None)
        messages: list[Message] | None = None

        def done(group: SampledGroup) -> None:
            del pending[group.task.index]
            self._token_ids.pop(group.task.index, None)
            emit(replace(group, messages=messages))

        async def request() -> None:
            nonlocal messages
            left = list(pending.values())
            if seeing is not None:
                messages = await self.pictures.named(seeing.messages)
                prompt = await self._tokenized(
                    {"messages": messages, "add_generation_prompt": True, **seeing.template}
                )
                stream = self._stream(left, done, sampling.samples)
                await self._generate(
                    prompt, list(sources(messages)), stream, sampling, self.server.seed_of(seeing)
                )
                return
            if self.server.in_flight:
                stream = self._stream(left, done, sampling.samples)
                return await self._generate(await self._prompt_ids(left[0]), (), stream, sampling, {})
            if all(isinstance(task.prompt, str) and not self._begins(task.prompt) for task in left):
                # The server tokenizes texts itself.
                prompts: Sequence[str | list[int]] = [str(task.prompt) for task in left]
            else:
                prompts = await asyncio.gather(*map(self._prompt_ids, left))
            seed = self.server.seed_of(left[0])
            await self._complete(prompts, self._stream(left, done, sampling.samples), sampling, seed)

        if (self.server.seed or self.server.in_flight) and not alone:
            # vLLM would use a seed's noise for all prompts of a request; the route that reports policy versions takes one prompt.
            each = [self.sample({task.index: task}, done, sampling) for task in pending.values()]
            for error in await asyncio.gather(*each, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error
            return
        try:
            return await self._asked(request)
        except Refusal as refusal:
            reason = str(refusal)
        # If the server rejected a whole request, send each prompt alone to find the one it rejects.
        for task in list(pending.values()):
            if alone:
                done(SampledGroup(task, self._token_ids.get(task.index, []), (), reason))
            else:
                await self.sample({task.index: task}, done, sampling)

    async def turn(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[str],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: Mapping[str, object] | None = None,
    ) -> tuple[list[int], Sample]:
        """Sample one answer to exactly these tokens. Returns the tokens, with image placeholders expanded, and the
        answer. Raises EngineGone; Refusal if the server rejects this prompt."""
        groups: list[SampledGroup] = []
        task = Task(0, "", "", None, {})
        own = {"max_tokens": max_tokens, "stop": list(stop), **(seed or {})}

        async def request() -> None:
            stream = self._stream([task], groups.append, 1)
            if images or self.server.in_flight:
                await self._generate(self.pictures.collapsed(prompt_ids), images, stream, sampling, own)
            else:
                await self._complete([list(prompt_ids)], stream, sampling, own)

        await self._asked(request)
        return groups[0].prompt_ids if images else list(prompt_ids), groups[0].samples[0]

    async def tokens(self, **body: object) -> list[int]:
        """Tokenize `prompt`, or `messages` with the model's chat template, where an image is one token. Raises EngineGone, Refusal."""
        return await self._asked(lambda: self._tokenized(body), refuses=False)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Detokenize. Raises EngineGone, Refusal."""
        return await self._asked(lambda: self._detokenized(token_ids), refuses=False)

    async def posted(self, path: str, body: Mapping[str, object]) -> Any:
        """Send a request that samples nothing, and return its answer. Raises EngineGone, Refusal."""
        return await self._asked(lambda: self._json("POST", path, {"model": self._model, **body}))

    async def count_waiting(self) -> int | None:
        """The number of sequences waiting in the engine; None if the server does not report it, MANY while it does not answer."""
        try:
            answer = await self._client.get("/metrics", timeout=METRICS_S)
        except httpx.HTTPError:
            return MANY
        if answer.status_code != 200:
            return None
        counts = [line.rsplit(" ", 1)[-1] for line in answer.text.splitlines() if line.startswith(WAITING)]
        try:
            return round(sum(float(count) for count in counts)) if counts else None
        except ValueError:
            return None

    # --- retries ---

    async def _asked(self, call: Callable[[], Awaitable[T]], *, refuses: bool = True) -> T:
        """Call with a few retries. Raises EngineDown; with `refuses`, Refusal if the server answers every attempt with an error."""
        try:
            return await asked_again(call, after=Again, tries=self.server.tries)
        except Again as error:
            why = f"{error} ({self.server.tries} tries)"
            if error.answered and refuses:
                raise Refusal(why) from None
            raise EngineDown(f"the engine at {self.url} does not answer: {why}") from None

    # --- one request ---

    def _stream(self, tasks: list[Task], emit: Emit, per_task: int) -> AnswerStream:
        return AnswerStream(self.url, tasks, emit, self._count_tokens, per_task)

    def _count_tokens(self, count: int) -> None:
        self.sampled_tokens += count
        self._on_tokens(count)

    async def _complete(
        self,
        prompts: Sequence[str | list[int]],
        stream: AnswerStream,
        sampling: Sampling,
        own: Mapping[str, object],
    ) -> None:
        """Sample; `own`: parameters of this request that override `sampling`."""
        # vLLM rejects a max_tokens beyond the remaining room.
        most = sampling.max_tokens if self.longest is None else max(1, self.longest - 1)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": min(sampling.max_tokens, most),
            **self._parameters(stream, sampling),
            "return_token_ids": True,
            **own,
        }
        streamed = body["max_tokens"] > WHOLE_TOKENS
        if streamed:
            body |= {"stream": True, "stream_interval": TOKENS_PER_PIECE}
        await self._streamed("/v1/completions", body, stream)

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[str],
        stream: AnswerStream,
        sampling: Sampling,
        own: Mapping[str, object],
    ) -> None:
        """Sample after a prompt whose placeholders stand for these images. Raises Refusal if the engine expands them elsewhere."""
        body = await asyncio.to_thread(self.pictures.request, prompt_ids, images)
        parameters = {"max_tokens": sampling.max_tokens, **self._parameters(stream, sampling), **own}
        streamed = sampling.max_tokens > WHOLE_TOKENS
        stream.expected = prompt_ids, self.pictures.collapsed
        body |= {"model": self._model, "sampling_params": parameters, "stream": streamed}
        await self._streamed("/inference/v1/generate", body, stream)

    def _parameters(self, stream: AnswerStream, sampling: Sampling) -> dict[str, object]:
        """The request parameters that have the same name on both routes."""
        return {
            "n": stream.per_task,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            **self.server.distribution,
            "logprobs": 0,
        }

    async def _streamed(self, path: str, body: Mapping[str, Any], stream: AnswerStream) -> None:
        """Send one request, and pass its response to `stream`."""
        streamed = body.get("stream", False)
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise failure(self.url, response.status_code, await response.aread())
                if streamed:
                    async for line in response.aiter_lines():
                        if line.startswith("data:"):
                            stream.take(line[5:].strip())
                else:
                    stream.take((await response.aread()).decode(errors="replace"))
        except httpx.TransportError as error:
            if not stream.complete:
                raise Again(described(error), answered=False) from None
        if not stream.complete:
            raise Again("the connection closed before the answer was complete", answered=False)

    async def _prompt_ids(self, task: Task) -> list[int]:
        """The tokens of a text, or of chat messages as the model's template renders them."""
        if task.index not in self._token_ids:
            text = {"prompt": task.prompt}
            messages = {"messages": task.messages, "add_generation_prompt": True, **task.template}
            self._token_ids[task.index] = await self._tokenized(
                text if isinstance(task.prompt, str) else messages
            )
        return self._token_ids[task.index]

    async def _tokenized(self, body: Mapping[str, object]) -> list[int]:
        if isinstance(messages := body.get("messages"), list):
            body = {**body, "messages": for_engine(without_images(messages))}
            own = body.get("chat_template_kwargs")
            if arguments := {**self.server.template_arguments, **(own if isinstance(own, dict) else {})}:
                body["chat_template_kwargs"] = arguments
        if self._begins(str(body.get("prompt", ""))):
            # A chat template may have added it already. A second one would differ from the model's training data.
            body = {**body, "add_special_tokens": False}
        answer = await self._json("POST", "/tokenize", {"model": self._model, **body})
        try:
            return self.pictures.collapsed([int(token) for token in answer["tokens"]])
        except (KeyError, TypeError, ValueError):
            raise EngineGone(f"the engine at {self.url}/tokenize returns no tokens; is it vLLM?") from None

    def _begins(self, text: str) -> bool:
        """Whether a text already starts with the beginning-of-sequence token."""
        return self._begin != "" and text.startswith(self._begin)

    async def _text_of_begin(self) -> str:
        with_it, without = [
            await self._tokenized({"prompt": "A", "add_special_tokens": special}) for special in (True, False)
        ]
        if with_it[:1] == without[:1]:
            return ""
        return await self._detokenized(with_it[:1])

    async def _detokenized(self, token_ids: Sequence[int]) -> str:
        answer = await self._json("POST", "/detokenize", {"model": self._model, "tokens": list(token_ids)})
        try:
            return str(answer["prompt"])
        except (KeyError, TypeError):
            raise EngineGone(f"the engine at {self.url}/detokenize returns no text; is it vLLM?") from None

    async def _json(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.RequestError as error:
            raise Again(described(error), answered=False) from None
        if response.status_code != 200:
            raise failure(self.url, response.status_code, response.content)
        try:
            return parse(response.content)
        except NotJson:
            raise EngineGone(f"the engine at {self.url}{path} does not return JSON; is it vLLM?") from None
