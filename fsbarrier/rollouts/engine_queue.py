"""Holds a request back until the engine has a place for it. In the engine's queue it would only wait, while another node that has run
out of tasks could do it.

vLLM says at /metrics how many sequences wait to be computed. It updates the number after each step, so that it does not count a request
that was sent just now. If the server gives no number, this program sends all that `rollout.concurrency` allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Self

import httpx

from fsbarrier.engine.client import normal_url
from fsbarrier.openai_http import base_and_socket, bearer
from fsbarrier.retry import Backoff

WAITING = ("vllm:num_requests_waiting{", "vllm:num_requests_waiting ")
#: after a request was sent, before the engine's count is believed
SETTLE_S = 0.2
#: between two looks
PAUSES = Backoff(0.1, 0.5, factor=2.0)
#: taken for the number of waiting sequences while the server does not answer
MANY = 10**9
#: a server that computes on the CPU is slow to answer
READ_S = 5.0


class EngineQueue:
    """`free` sequences may be in flight without asking; beyond them `step` more whenever hardly any wait in the engine."""

    def __init__(
        self,
        count_waiting: Callable[[], Awaitable[int | None]],
        *,
        free: int,
        step: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`count_waiting`: how many sequences wait in the engine; None: it will never say."""
        self._count_waiting, self._free, self._step = count_waiting, free, step
        self._clock, self._pause = clock, pause
        self._granted = 0
        self._sent_at = 0.0
        self._engine_says = True

    def sent(self, sequences: int) -> None:
        """A request was sent."""
        self._granted -= sequences
        self._sent_at = self._clock()

    async def wait_for_place(self, in_flight: Callable[[], int]) -> None:
        """Returns when another request may go out. `in_flight`: how many sequences are, at most."""
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
    """Reads how many sequences wait in a vLLM server."""

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
        """The number of waiting sequences: None if the server never says, MANY while it does not answer."""
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
