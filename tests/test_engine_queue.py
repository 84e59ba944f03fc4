"""When another request goes to the engine: at once at first, then only while hardly anything waits in its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fsbarrier.rollouts.engine_queue import MANY, PAUSES, SETTLE_S, EngineMetrics, EngineQueue


class Engine:
    """Answers looks in turn, on a clock of its own."""

    def __init__(self, *waiting: int | None) -> None:
        self.now, self.answers, self.looks = 100.0, list(waiting), 0
        self.queue = EngineQueue(self.read, free=256, step=128, clock=lambda: self.now, pause=self.pause)

    async def read(self) -> int | None:
        self.looks += 1
        return self.answers.pop(0)

    async def pause(self, seconds: float) -> None:
        assert PAUSES.first_s <= seconds <= PAUSES.most_s
        self.now += seconds

    def send(self, requests: Iterable[int], in_flight: int) -> int:
        """Send requests of so many sequences, one after the other; how many are in flight then, none being finished."""

        async def work() -> int:
            total = [in_flight]
            for sequences in requests:
                await self.queue.wait_for_place(lambda: total[0])
                self.queue.sent(sequences)
                total[0] += sequences
            return total[0]

        return asyncio.run(work())


def test_the_first_requests_are_sent_without_reading_the_queue() -> None:
    engine = Engine()
    assert engine.send([128, 128], 0) == 256 and engine.looks == 0


def test_each_further_step_needs_a_look_at_a_settled_and_nearly_empty_queue() -> None:
    engine = Engine(65, 300, 64, 0)
    begin = engine.now
    assert engine.send([128, 128], 256) == 512 and engine.looks == 4
    assert engine.now - begin >= 2 * SETTLE_S
    small = Engine(0)
    assert small.send([16] * 8, 256) == 384 and small.looks == 1  # a step, in pieces


def test_an_engine_that_does_not_tell_its_queue_gets_all_requests() -> None:
    engine = Engine(None)
    assert engine.send([128] * 10, 256) == 1536 and engine.looks == 1


def test_a_wait_ends_when_enough_is_finished() -> None:
    engine, left = Engine(*[MANY] * 100), [400]

    async def pause(seconds: float) -> None:
        await engine.pause(seconds)
        left[0] -= 50

    engine.queue = EngineQueue(engine.read, free=256, step=128, clock=lambda: engine.now, pause=pause)
    asyncio.run(engine.queue.wait_for_place(lambda: left[0]))
    assert left[0] == 250


def test_a_server_that_is_not_there_has_no_room() -> None:
    async def look() -> int | None:
        async with EngineMetrics("http://127.0.0.1:9", "") as metrics:
            return await metrics.count_waiting()

    assert asyncio.run(look()) == MANY
