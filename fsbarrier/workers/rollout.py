"""Rolls out tasks against the local engine: samples groups, judges them, appends each to the part file as it is finished.

`python -m fsbarrier.workers.rollout --spec SPEC.json` (phases 2 and 6). Every group in the part file is durable on its own: after any
end of this program, SIGKILL too, only what was in flight is lost, and started again with the same spec it does only what is missing.
Tasks are claimed just before they are begun; when the own share is gone, tasks of slower nodes (fsbarrier/rollouts/claims.py).

A generation that was cut off by the token limit, or failed, is never a success: its trajectory has `valid` false and a reward of at
most 0 (what the reward function would have given stays in `reward_parts`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.errors import FsbarrierError, ProgramFailed, UsageError
from fsbarrier.rewards.kinds import check_answers, open_reward
from fsbarrier.rewards.score import Reward
from fsbarrier.rollouts import agents, assignment
from fsbarrier.rollouts.early_end import Tail
from fsbarrier.rollouts.engine_queue import Metrics, Room
from fsbarrier.rollouts.judged import failed_group, judged_group
from fsbarrier.rollouts.samples import Group
from fsbarrier.rollouts.sampling import Sampler, Server
from fsbarrier.rollouts.tally import Shown, Tally
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.worker_contract import Progress, run_worker
from fsbarrier.trajectories import ShardWriter

SEQUENCES_PER_REQUEST = 128  # prompts times samples: see sampling.py
BACKLOG = 4  # groups that may be sampled but not yet on disk, in units of `rollout.concurrency`
ALL_REFUSED = 8  # so many prompts refused in a row from the start: it is not the prompts

Spec = Mapping[str, Any]


class Rollout:
    """One start of the program."""

    def __init__(self, spec: Spec, settings: Settings, progress: Progress) -> None:
        sampling = spec["sampling"]
        self.spec, self.settings = spec, settings
        self.samples = int(sampling["samples"])
        if self.samples > 1 and sampling["temperature"] == 0:
            raise UsageError(
                f"{self.samples} samples a task at temperature 0 would all be the same; give samples=1 or a temperature"
            )
        rollout = settings.rollout
        self.concurrency = rollout.concurrency
        self.per_request = min(self.concurrency, rollout.prompts_per_request) or max(
            1, min(SEQUENCES_PER_REQUEST // self.samples, self.concurrency // 2)
        )
        self.make_agent = agents.load_agent(rollout.agent) if rollout.agent else None
        if self.make_agent is not None:
            self.per_request = 1
        # an agent's episodes have the limit each
        self.task_timeout_s = rollout.task_timeout_s if self.make_agent is None else None
        self.error_share = settings.reward.max_error_share
        self.agent_error_share = rollout.max_error_share
        mine = [spec["tasks"]] if spec["fixed_shares"] else spec["shares"].values()
        task_file = read_tasks(Path(spec["task_file"]), [index for indices in mine for index in indices])
        self.tasks = task_file.tasks
        check_answers(settings.reward.kind, list(self.tasks.values()), task_file.path)
        self.reward: Reward = open_reward(
            settings.reward.kind, timeout_s=settings.reward.timeout_s, judge=settings.judge
        )
        engine = spec["engine"]
        self.server = Server(
            url=engine["url"],
            api_key=engine.get("api_key") or "",
            model=engine.get("model") or "",
            **{name: sampling[name] for name in ("samples", "temperature", "top_p", "top_k", "max_tokens")},
            timeout_s=rollout.request_timeout_s,
            tries=rollout.retries + 1,
            # a server of ours is started again by the daemon, when this program has failed
            patience_s=0.0 if settings.manages_engine else settings.engine.start_timeout_s,
        )
        self.tally = Tally()
        self.claims, self.tail = assignment.open_claims(spec), assignment.open_tail(spec)
        self.ended_early = False
        self.begun = 0
        self.shown = Shown(progress, len(spec["tasks"]) * self.samples, self.tally)
        self.metrics = Metrics(self.server.url, self.server.api_key)
        self.room = Room(
            self.metrics.waiting,
            free=2 * SEQUENCES_PER_REQUEST,
            step=max(SEQUENCES_PER_REQUEST, self.samples),
        )
        self.sampling = 0  # groups
        self.slots = asyncio.Semaphore(self.concurrency)  # groups being sampled
        self.unwritten = asyncio.Semaphore(BACKLOG * self.concurrency)
        self.writing: set[asyncio.Future[Any]] = set()

    async def run(self) -> dict[str, Any]:
        """Do all that the spec asks for; gives the result. Raises FsbarrierError."""
        spec, part = self.spec, Path(self.spec["part"])
        files.make_dirs(part.parent)
        self.shown.write()
        tidying = asyncio.create_task(asyncio.to_thread(assignment.tidy, spec))
        with ShardWriter(part, prefix=spec["prefix"], header=assignment.header(spec)) as writer:
            try:
                await self._until_the_end(writer)
            finally:
                if self.writing:  # what is under way in a thread uses the writer's descriptor
                    await asyncio.wait(self.writing)
                self.shown.close()
                await self.reward.close()
            info = writer.finish({**assignment.origin(spec), "sampling": dict(spec["sampling"])})
            tasks = [group.task_index for group in writer.groups]
        files.link_or_copy(part, Path(spec["checkpoint"]))
        await tidying
        self.shown.write()
        seconds, tally = self.shown.seconds, self.tally
        return {
            "part": str(part),
            "bytes": info.bytes,
            "groups": info.groups,
            "trajectories": info.trajectories,
            "reward_mean": info.reward_mean,
            "resumed_groups": info.groups - tally.groups,
            **tally.counts(),
            "seconds": round(seconds, 3),
            "tokens_per_s": round(tally.completion_tokens / seconds, 1),
            **assignment.result(self.claims, tasks, ended_early=self.ended_early),
        }

    async def _until_the_end(self, writer: ShardWriter) -> None:
        """Roll out until nothing is left, or until the phase ends without its last few tasks."""
        filling = asyncio.create_task(self._fill(writer))
        watching = asyncio.create_task(self._watch_tail(self.tail, writer)) if self.tail else filling
        try:
            await asyncio.wait((filling, watching), return_when=asyncio.FIRST_COMPLETED)
            if self.tail and filling.done():
                self.tail.say(len(writer.groups))
        finally:
            for task in (filling, watching):
                task.cancel()
            ended = await asyncio.gather(filling, watching, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        self.ended_early = filling.cancelled()

    async def _watch_tail(self, tail: Tail, writer: ShardWriter) -> None:
        """Returns when the phase is to end."""
        while True:
            await asyncio.to_thread(tail.say, len(writer.groups))
            if await asyncio.to_thread(tail.over):
                return
            await asyncio.sleep(tail.pause_s)

    async def _fill(self, writer: ShardWriter) -> None:
        if writer.finished:  # an earlier start was cut off between this and its result
            return
        there = {group.task_index for group in writer.groups}
        opened = agents.open_sampler(
            self.make_agent, self.server, self.settings.rollout, self.settings.custom, self._on_tokens
        )
        async with opened as sampler, self.metrics:
            looked = False
            try:
                async with asyncio.TaskGroup() as tasks:
                    queue: deque[Task] = deque()
                    while batch := await self._next_batch(queue, there):
                        if not looked:
                            await sampler.look()
                            looked = True
                        tasks.create_task(self._sample(sampler, batch, writer, tasks))
            except BaseExceptionGroup as group:
                raise _first(group) from None
        if self.tally.groups and self.tally.refused == self.tally.groups:
            raise ProgramFailed("the engine refused every prompt; the messages are above")

    async def _next_batch(self, queue: deque[Task], there: set[int]) -> list[Task]:
        """The prompts of the next request, once there is room for them; claimed no sooner. [] when nothing is left."""
        if self.claims.shared:
            await self.room.wait(lambda: self.sampling * self.samples)
        for _ in range(self.per_request):
            await self.unwritten.acquire()
            await self.slots.acquire()
        while len(queue) < self.per_request and (lot := await asyncio.to_thread(self.claims.take)):
            queue += [self.tasks[index] for index in lot if index not in there]
            self.begun += len(lot)
        self.shown.total = (self.begun + self.claims.own_left) * self.samples
        batch: list[Task] = []
        for task in list(queue)[: self.per_request]:
            # a request has prompts of one kind
            if isinstance(task.prompt, str) is isinstance(queue[0].prompt, str):
                batch.append(task)
        for task in batch:
            queue.remove(task)
        for _ in range(self.per_request - len(batch)):
            self.unwritten.release()
            self.slots.release()
        self.sampling += len(batch)
        self.room.sent(len(batch) * self.samples)
        return batch

    async def _sample(
        self,
        sampler: Sampler | agents.AgentSampler,
        batch: list[Task],
        writer: ShardWriter,
        tasks: asyncio.TaskGroup,
    ) -> None:
        under_way = {task.index: task for task in batch}

        def finished(group: Group, *, late: bool = False) -> None:
            del under_way[group.task.index]
            self.sampling -= 1
            self.slots.release()
            tasks.create_task(self._judge_and_append(group, writer, late))

        try:
            async with asyncio.timeout(self.task_timeout_s):
                await sampler.sample(batch, finished)
        except TimeoutError:
            error = f"not finished within rollout.task_timeout_s={self.task_timeout_s:g}"
            for task in list(under_way.values()):
                finished(Group(task, [], (), error), late=True)

    async def _judge_and_append(self, group: Group, writer: ShardWriter, late: bool) -> None:
        if group.error is not None:
            why = "" if late else "the engine refuses it: "
            print(f"task {group.task.index}: {why}{group.error}", file=sys.stderr)
            made = failed_group(self.spec, group, self.samples)
        else:
            scores = await asyncio.gather(
                *(agents.score(self.reward, group.task, sample) for sample in group.samples)
            )
            made = judged_group(self.spec, group, scores)
        append = asyncio.ensure_future(asyncio.to_thread(writer.append_group, group.task.index, made))
        self.writing.add(append)
        append.add_done_callback(self.writing.discard)
        await asyncio.shield(append)
        self.unwritten.release()
        self.tally.add(group, made, late)
        self.shown.news()
        self._give_up_early(group, made)

    def _give_up_early(self, group: Group, made: Sequence[Mapping[str, Any]]) -> None:
        """Raises ProgramFailed once it is certain that the phase must fail."""
        tally = self.tally
        if tally.refused == tally.groups >= ALL_REFUSED:
            raise ProgramFailed(f"the engine refuses every prompt: {group.error}")
        for what, count, most, setting in (
            ("reward", tally.reward_errors, self.error_share, "reward.max_error_share"),
            ("agent", tally.agent_errors, self.agent_error_share, "rollout.max_error_share"),
        ):
            if count > most * self.shown.total:
                told = next(
                    (m["metadata"][f"{what}_error"] for m in made if f"{what}_error" in m["metadata"]), ""
                )
                raise ProgramFailed(
                    f"the {what} failed for {count} of {self.shown.total} trajectories, more than "
                    f"{setting}={most:g} allows; the last: {' '.join(told.split())}"
                )

    def _on_tokens(self, count: int) -> None:
        self.tally.tokens += count
        self.shown.news()


def _first(group: BaseExceptionGroup) -> BaseException:
    """What went wrong first, of our own errors if there are any."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, FsbarrierError)), leaves[0])


async def until_stopped(rollout: Rollout) -> dict[str, Any]:
    """Run it, ready to be stopped by a signal: what was appended is durable, and the part file stays valid as it is."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await rollout.run()
    except asyncio.CancelledError:
        raise SystemExit(128 + caught[0] if caught else 1) from None


def main(spec: dict[str, Any], settings: Settings, progress: Progress) -> dict[str, Any]:
    return asyncio.run(until_stopped(Rollout(spec, settings, progress)))


if __name__ == "__main__":
    sys.exit(run_worker(main))
