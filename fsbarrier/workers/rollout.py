"""Rolls out tasks on the local engines: samples groups, scores them, and appends each finished group to the part file.

`python -m fsbarrier.workers.rollout --spec SPEC.json` (phases 2 and 6). Every group in the part file is durable on its own: if this program
dies, even by SIGKILL, only groups in flight are lost, and a restart with the same spec does only the missing ones. Tasks are claimed just
before they start; when this node's share is used up, it claims tasks of slower nodes (fsbarrier/rollouts/claims.py).

A failed sample, episode or score is never a success: its trajectory has `valid` false and a reward of at most 0 (the reward function's
value stays in `reward_parts`). An answer truncated by the token limit has not failed, and is scored like any other.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import islice

from fsbarrier.data.rank_file_writer import SharedFlush
from fsbarrier.data.tasks import Task
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rollouts.agent_sampler import AgentSampler, within_limits
from fsbarrier.rollouts.claims import PAUSES, EarlyEnd, Refills
from fsbarrier.rollouts.counts import Counts, CountsProgress
from fsbarrier.rollouts.engine_pool import EnginePool, Reservation
from fsbarrier.rollouts.environment import environments_of
from fsbarrier.rollouts.group_trajectories import Teacher, failed_group, judged_group
from fsbarrier.rollouts.pictures import Pictures, placeholders
from fsbarrier.rollouts.rollout_spec import RolloutOutcome, RolloutSpec, read_rounds
from fsbarrier.rollouts.samples import SampledGroup
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.value_types import TEACHER
from fsbarrier.store import files
from fsbarrier.trajectories import RankFileWriter

#: prompts times samples; see sampling.py
SEQUENCES_PER_REQUEST = 128
#: connections to the engine, in addition to one per answer in flight
SPARE_CONNECTIONS = 4
#: maximum backlog of sampled groups that are not on disk, as a multiple of the groups in flight
BACKLOG = 4
#: If the engine rejects this many prompts from the start, the prompts are not the problem.
ALL_REFUSED = 8


class Rollout:
    """The rollout of one start of the program."""

    def __init__(self, spec: RolloutSpec, settings: Settings, progress: ProgressWriter) -> None:
        self.settings, self.spec = settings, spec
        self.rounds = read_rounds(spec.rounds, spec.within_reach)
        most_samples = max(rollout_round.samples for rollout_round in self.rounds)
        servers = spec.servers(settings)
        agent = settings.rollout.agent
        # With an agent, this timeout applies to each episode.
        self.task_timeout_s = None if agent else settings.rollout.task_timeout_s
        # Groups in flight per engine. There are proportionally more if groups are smaller than in training rollouts, so that an evaluation
        # with one sample per task fills the engine too; but not with an agent, whose episodes also do other work than sampling.
        self.concurrency = settings.rollout.concurrency
        if agent is None:
            self.concurrency *= max(1, settings.rollout.samples // most_samples)
        else:
            self.concurrency = within_limits(self.concurrency, len(servers) * most_samples)
        self.environments = environments_of(settings, spec, self.concurrency * len(servers) * most_samples)
        self.agents = AgentSampler(agent, settings, spec.engines, self.environments) if agent else None
        self.reward = open_reward(
            settings.reward.kind,
            weights=settings.reward.weights,
            timeout_s=settings.reward.timeout_s,
            judge=settings.judge,
            engines=spec.engines,
            code=settings.code,
        )
        teaches = settings.algorithm.loss == "distil" and spec.split == "train"
        self.teachers = [Teacher(spec.engines[TEACHER])] if teaches else []
        # The claims of each round that was started; the last one belongs to the current round.
        self.claims = [spec.open_claims(self.rounds[0].tasks)]
        self.early_end, self.ended_early = spec.open_early_end(), False
        self.refills = spec.open_refills()
        # The rounds that always take place, i.e. all except refills.
        self.certain = self.rounds if self.refills is None else self.rounds[:1]
        self.pool = EnginePool(
            servers,
            connections=self.concurrency * (most_samples if agent else 1) + SPARE_CONNECTIONS,
            on_tokens=self._on_tokens,
            # The daemon ends this program if none of its own engines is left. A user's server may come back.
            patience_s=settings.engine.start_timeout_s,
            step=max(SEQUENCES_PER_REQUEST, most_samples),
            pictures=Pictures(spec.images, next(iter(placeholders(spec.model)), None)),
            renderer=spec.renderer(settings),
        )
        # Whether any engine has answered.
        self.engine_answered = False
        # Trajectories of claimed tasks.
        self.begun = 0
        # Tasks whose groups an earlier start of this program finished.
        self.resumed: frozenset[int] = frozenset()
        # `max_error_share` applies to the whole phase; each node uses that share of the average number of trajectories per node.
        total = sum(len(rollout_round.tasks) * rollout_round.samples for rollout_round in self.certain)
        self.average_share = total / max(1, len(spec.shares))
        self.counts = Counts()
        self.progress = CountsProgress(progress, self._left_from(0), self.counts, self._servers_now)
        for environment in self.environments.values():
            environment.on_change = self.progress.write_soon
        # A group takes one of `slots` while it is sampled, and one of `unwritten` until it is on disk.
        self.slots = asyncio.Semaphore(self.concurrency * len(servers))
        self.unwritten = asyncio.Semaphore(BACKLOG * self.concurrency * len(servers))

    def _servers_now(self) -> dict[str, object]:
        """The state of engines and environments, which the progress shows."""
        engines = self.pool.progress()
        environments = {environment.table: environment.state for environment in self.environments.values()}
        return {
            **({"awaits": self.pool.awaits} if self.pool.awaits else {}),
            **({"engines": engines} if engines else {}),
            **({"environments": environments} if environments else {}),
        }

    async def run(self) -> RolloutOutcome:
        """Do the assigned work; returns the result. Raises FsbarrierError."""
        spec = self.spec
        files.make_dirs(spec.part.parent)
        self.progress.write()
        removing = asyncio.create_task(asyncio.to_thread(spec.remove_old_claims))
        with RankFileWriter(spec.part, header=spec.header()) as writer:
            appending = SharedFlush(writer)
            try:
                await self._until_the_end(writer, appending)
            finally:
                # Write all scored groups, even if the phase ends early. Errors of failed writes have already been raised.
                with suppress(FsbarrierError):
                    await appending.rest()
                self.progress.close()
                await asyncio.gather(self.reward.close(), *(teacher.close() for teacher in self.teachers))
            writer.finish()
        spec.publish_part()
        await removing
        self.progress.write()
        seconds, counts = self.progress.seconds, self.counts
        report = replace(
            spec.report(writer, self.claims, ended_early=self.ended_early),
            resumed_groups=len(self.resumed),
            rounds=None if self.refills is None else self.refills.rounds_done(),
            seconds=round(seconds, 3),
            tokens_per_s=round(counts.completion_tokens / seconds, 1),
        )
        return RolloutOutcome(
            counts.added_to(report),
            [event for environment in self.environments.values() for event in environment.events],
        )

    async def _until_the_end(self, writer: RankFileWriter, appending: SharedFlush) -> None:
        """Roll out until nothing is left, or until the phase ends early."""
        # In a file with its end, an earlier start accepted what had failed. Otherwise that is rolled out again.
        self.resumed = frozenset(
            group.task_index for group in writer.groups if writer.finished or group.stats.is_finished
        )
        filling = asyncio.create_task(self._fill(writer, appending))
        watching = asyncio.create_task(self._watch(self.early_end)) if self.early_end else filling
        try:
            await asyncio.wait((filling, watching), return_when=asyncio.FIRST_COMPLETED)
            if self.early_end and filling.done():
                self.early_end.report(len(self.resumed) + self.counts.groups)
        finally:
            for task in (filling, watching):
                task.cancel()
            ended = await asyncio.gather(filling, watching, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        self.ended_early = filling.cancelled()

    async def _watch(self, early_end: EarlyEnd) -> None:
        """Returns when the phase should end early."""
        while True:
            await asyncio.to_thread(early_end.report, len(self.resumed) + self.counts.groups)
            if await asyncio.to_thread(early_end.reached):
                return
            await asyncio.sleep(early_end.pause_s)

    async def _fill(self, writer: RankFileWriter, appending: SharedFlush) -> None:
        # An earlier start finished its file but ended before it wrote its result.
        if writer.finished:
            return
        await self.reward.open()
        async with self.pool, self.agents or nullcontext():
            try:
                async with asyncio.TaskGroup() as tasks:
                    for number in range(len(self.rounds)):
                        if self.refills is None:
                            await self._begin_round(number, appending, tasks)
                            continue
                        # The next round starts only after this one, and may not be needed.
                        async with asyncio.TaskGroup() as of_this_round:
                            await self._begin_round(number, appending, of_this_round)
                        if not await self._another_after(number, self.refills, writer):
                            break
            except BaseExceptionGroup as group:
                raise _first(group) from None
        if self.counts.groups and self.counts.refused == self.counts.groups:
            raise ProgramFailed("the engine rejected every prompt; see its messages above")

    async def _begin_round(self, number: int, appending: SharedFlush, tasks: asyncio.TaskGroup) -> None:
        """Returns once every task of round `number` has been started, here or on another node."""
        current = self.rounds[number]
        if number:
            self.claims.append(await asyncio.to_thread(self.spec.open_claims, current.tasks, number))
        if self.refills is not None:
            for environment in self.environments.values():
                environment.begin_round(number)
        queue: deque[Task] = deque()
        while batch := await self._next_batch(number, queue):
            if not self.engine_answered:
                await self.pool.query_models()
                self.engine_answered = True
            reservation = Reservation(self.pool, len(batch) * current.samples, current.sampling)
            if self.agents is not None:
                self.agents.expect(batch, current.samples)
            tasks.create_task(self._sample(reservation, batch, appending, tasks))
        for environment in self.environments.values():
            environment.all_known = self.refills is not None or number + 1 == len(self.rounds)

    async def _another_after(self, number: int, refills: Refills, writer: RankFileWriter) -> bool:
        """Wait until all nodes have finished round `number`; returns whether there is another round."""
        tasks = self.rounds[number].tasks
        with_signal = sum(group.stats.signal for group in writer.groups if group.task_index in tasks)
        await asyncio.to_thread(refills.report, number, with_signal)
        for pause_s in PAUSES:
            another = await asyncio.to_thread(refills.another_after, number)
            if another is not None:
                return another
            # Waiting for other nodes counts as progress: a hung program is detected on its own node.
            self.progress.write()
            await asyncio.sleep(pause_s)
        raise AssertionError

    def _per_request(self, samples: int) -> int:
        """The number of prompts per request, given the samples per prompt."""
        # An agent's episodes make their own requests.
        if self.agents is not None:
            return 1
        # Leave room for at least two concurrent requests per engine.
        return max(1, min(SEQUENCES_PER_REQUEST // samples, self.concurrency // 2))

    def _left_from(self, number: int) -> int:
        """Trajectories of this node's own share in the rounds from `number` on."""
        own = self.spec.tasks
        return sum(
            rollout_round.samples * sum(task in rollout_round.tasks for task in own)
            for rollout_round in self.certain[number:]
        )

    async def _next_batch(self, number: int, queue: deque[Task]) -> list[Task]:
        """Claim the prompts of the next request of round `number`, after waiting for engine capacity. [] when the round has none
        left."""
        claims, current = self.claims[-1], self.rounds[number]
        per_request = self._per_request(current.samples)
        if claims.shared:
            await self.pool.wait_for_capacity()
        for _ in range(per_request):
            await self.unwritten.acquire()
            await self.slots.acquire()
        while (missing := per_request - len(queue)) > 0:
            if not (taken := await asyncio.to_thread(claims.take_lots, missing)):
                break
            queue += [current.known[index] for index in taken if index not in self.resumed]
            self.begun += len(taken) * current.samples
        self.progress.total = self.begun + claims.own_left * current.samples + self._left_from(number + 1)
        # Spread the last prompts over all engines.
        most = min(per_request, -(-(len(queue) + claims.own_left) // len(self.pool.engines)))
        # A request contains prompts of one kind: texts, or tokens of chat messages.
        batch = [
            task
            for task in islice(queue, most)
            if isinstance(task.prompt, str) is isinstance(queue[0].prompt, str)
        ]
        # A task with images gets a request of its own.
        if any(task.has_images for task in batch):
            batch = batch[:1]
        for task in batch:
            queue.remove(task)
        for _ in range(per_request - len(batch)):
            self.unwritten.release()
            self.slots.release()
        return batch

    async def _sample(
        self, reservation: Reservation, batch: list[Task], appending: SharedFlush, tasks: asyncio.TaskGroup
    ) -> None:
        under_way = {task.index: task for task in batch}

        def finished(group: SampledGroup, *, late: bool = False) -> None:
            del under_way[group.task.index]
            reservation.finished(reservation.sampling.samples)
            self.slots.release()
            group = replace(group, replica=reservation.replica)
            tasks.create_task(self._judge_and_append(group, appending, late, reservation.sampling.samples))

        try:
            async with asyncio.timeout(self.task_timeout_s):
                if self.agents is not None:
                    await self.agents.sample(reservation, batch, finished)
                else:
                    await reservation.sample(batch, finished)
        except TimeoutError:
            error = f"not finished within rollout.task_timeout_s={self.task_timeout_s:g}"
            for task in list(under_way.values()):
                finished(SampledGroup(task, [], (), error), late=True)

    async def _judge_and_append(
        self, group: SampledGroup, appending: SharedFlush, late: bool, samples: int
    ) -> None:
        """Score a sampled group and append it to the part file. `samples`: the number of trajectories that it must have."""
        origin = self.spec.origin
        if group.error is not None:
            why = "" if late else "the engine rejects it: "
            print(f"task {group.task.index}: {why}{group.error}", file=sys.stderr)
            made = failed_group(origin, group, samples)
        else:
            made = await judged_group(origin, group, self.reward, self.spec.images)
            for teacher in self.teachers:
                await teacher.mark(made)
        await appending.append(group.task.index, made)
        self.unwritten.release()
        self.counts.add(group, made, late)
        self.progress.write_soon()
        self._give_up_early(group, made)

    def _give_up_early(self, group: SampledGroup, made: Sequence[Trajectory]) -> None:
        """Raises ProgramFailed as soon as the phase is certain to fail, so that no more is sampled for it."""
        counts = self.counts
        total = round(max(self.progress.total, self.average_share))
        if counts.refused == counts.groups >= ALL_REFUSED:
            raise ProgramFailed(f"the engine rejects every prompt: {group.error}")
        most = self.settings.rollout.max_error_share
        for what in ("reward", "agent", "environment"):
            count: int = getattr(counts.stats, f"{what}_errors")
            if count > most * total:
                reasons = [item["metadata"].get(f"{what}_error", "") for item in made]
                last = " ".join(max(reasons, key=bool).split())
                raise ProgramFailed(
                    f"the {what} failed for {count} of {total} trajectories, more than "
                    f"rollout.max_error_share={most:g} allows; the last: {last}"
                )

    def _on_tokens(self, count: int) -> None:
        self.counts.tokens += count
        self.progress.write_soon()


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error in the group, preferring our own error types."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, FsbarrierError)), leaves[0])


async def until_stopped(rollout: Rollout) -> RolloutOutcome:
    """Run the rollout until it ends or a signal stops it: appended groups are durable, and the part file remains valid."""
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


@RolloutSpec.program
def main(spec: RolloutSpec, settings: Settings, progress: ProgressWriter) -> RolloutOutcome:
    return asyncio.run(until_stopped(Rollout(spec, settings, progress)))


if __name__ == "__main__":
    sys.exit(run_worker(main, lambda: True))
