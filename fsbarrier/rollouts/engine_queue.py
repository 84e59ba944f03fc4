"""Holds requests back until the engine has capacity. A request in the engine's queue would only wait, while another node without tasks
could take it over.

vLLM reports the number of waiting sequences at /metrics, updated after each step, so it does not include very recent requests. If the
server does not report it, the only limit is `rollout.concurrency`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Self

import httpx

from fsbarrier.engine.client import normal_url
from fsbarrier.engine.openai_http import base_and_socket, bearer
from fsbarrier.store.retry import Backoff

WAITING = ("vllm:num_requests_waiting{", "vllm:num_requests_waiting ")
#: delay after a request before the engine's count is trusted
SETTLE_S = 0.2
#: polling interval
PAUSES = Backoff(0.1, 0.5, factor=2.0)
#: assumed number of waiting sequences while the server does not answer
MANY = 10**9
#: timeout; a server that computes on the CPU answers slowly
READ_S = 5.0


class EngineQueue:
    """Allows `free` sequences in flight without a check, and `step` more whenever hardly any are waiting in the engine."""

    def __init__(
        self,
        count_waiting: Callable[[], Awaitable[int | None]],
        *,
        free: int,
        step: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`count_waiting`: returns the number of sequences waiting in the engine; None: never available."""
        self._count_waiting, self._free, self._step = count_waiting, free, step
        self._clock, self._pause = clock, pause
        self._granted = 0
        self._sent_at = 0.0
        self._engine_says = True

    def sent(self, sequences: int) -> None:
        """Record that a request was sent."""
        self._granted -= sequences
        self._sent_at = self._clock()

    async def wait_for_place(self, in_flight: Callable[[], int]) -> None:
        """Wait until another request may be sent. `in_flight`: the current number of sequences, at most."""
        pauses = iter(PAUSES)
        while self._engine_says and in_flight() >= self._free and self._granted <= 0:
            if self._clock() - self._sent_at >= SETTLE_S:
                waiting = await self._count_waiting()
                self._engine_says = waiting is not None
                if waiting is None or waiting <= self._step // 2:
                    self._granted = self._step
                    return
            await self._pause(next(pauses))


class EngineMetrics:
    """Reads the number of waiting sequences from a vLLM server."""

    def __init__(self, url: str, api_key: str) -> None:
        base, socket = base_and_socket(normal_url(url))
        transport = httpx.AsyncHTTPTransport(verify=base.startswith("https"), uds=socket, trust_env=False)
        self._client = httpx.AsyncClient(
            base_url=base, headers=bearer(api_key), timeout=READ_S, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def count_waiting(self) -> int | None:
        """The number of waiting sequences; None if the server does not report it, MANY while it does not answer."""
        try:
            answer = await self._client.get("/metrics")
        except httpx.HTTPError:
            return MANY
        if answer.status_code != 200:
            return None
        counts = [line.rsplit(" ", 1)[-1] for line in answer.text.splitlines() if line.startswith(WAITING)]
        try:
            return round(sum(float(count) for count in counts)) if counts else None
        except ValueError:
            return None
