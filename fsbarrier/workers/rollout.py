"""Rolls out tasks against the local engine: samples groups, judges them, appends each to the part file as it is finished.

`python -m fsbarrier.workers.rollout --spec SPEC.json` (phases 2 and 6). Every group in the part file is durable on its own: after any
end of this program, SIGKILL too, only what was in flight is lost, and started again with the same spec it does only what is missing.

A generation that was cut off by the token limit, or failed, is never a success: its trajectory has `valid` false and a reward of at
most 0 (what the reward function would have given stays in `reward_parts`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.data.rewards import DEFAULT_TIMEOUT_S, Reward, check_answers, open_reward
from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.errors import FsbarrierError, ProgramFailed, UsageError
from fsbarrier.trajectories import ShardWriter
from fsbarrier.workers.records import failed_group, judged_group
from fsbarrier.workers.samples import Group
from fsbarrier.workers.sampling import Sampler, Server
from fsbarrier.workers.spec import Progress, run_worker
from fsbarrier.workers.tally import Shown, Tally

SEQUENCES_PER_REQUEST = 128  # prompts times samples: see sampling.py
BACKLOG = 4  # groups that may be sampled but not yet on disk, in units of `rollout.concurrency`
ALL_REFUSED = 8  # so many prompts refused in a row from the start: it is not the prompts
DEFAULT_ERROR_SHARE = 0.1
HEADER = ("run_id", "split", "iteration", "generation", "node_rank", "policy_version")

Spec = Mapping[str, Any]


class Rollout:
    """One start of the program."""

    def __init__(self, spec: Spec, progress: Progress) -> None:
        settings, sampling = spec["settings"], spec["sampling"]
        self.spec = spec
        self.samples = int(sampling["samples"])
        if self.samples > 1 and sampling["temperature"] == 0:
            raise UsageError(
                f"{self.samples} samples a task at temperature 0 would all be the same; give samples=1 or a temperature"
            )
        rollout = settings["rollout"]
        self.concurrency = int(rollout["concurrency"])
        self.per_request = int(rollout.get("prompts_per_request") or 0) or max(
            1, min(SEQUENCES_PER_REQUEST // self.samples, self.concurrency // 2)
        )
        kind = settings["reward"]["kind"]
        self.error_share = float(settings["reward"].get("max_error_share", DEFAULT_ERROR_SHARE))
        task_file = read_tasks(Path(spec["task_file"]), spec["tasks"])
        self.tasks = [task_file.tasks[index] for index in spec["tasks"]]
        check_answers(kind, self.tasks, task_file.path)
        self.reward: Reward = open_reward(
            kind, timeout_s=float(settings["reward"].get("timeout_s", DEFAULT_TIMEOUT_S))
        )
        engine = spec["engine"]
        self.server = Server(
            url=engine["url"],
            api_key=engine.get("api_key") or "",
            model=engine.get("model") or "",
            **{name: sampling[name] for name in ("samples", "temperature", "top_p", "top_k", "max_tokens")},
            timeout_s=float(rollout["request_timeout_s"]),
            tries=int(rollout["retries"]) + 1,
        )
        self.tally = Tally()
        self.shown = Shown(progress, len(self.tasks) * self.samples, self.tally)
        self.slots = asyncio.Semaphore(self.concurrency)  # groups being sampled
        self.unwritten = asyncio.Semaphore(BACKLOG * self.concurrency)
        self.writing: set[asyncio.Future[Any]] = set()

    async def run(self) -> dict[str, Any]:
        """Do all that the spec asks for; gives the result. Raises FsbarrierError."""
        spec, part = self.spec, Path(self.spec["part"])
        files.make_dirs(part.parent)
        header = {name: spec[name] for name in HEADER}
        assigned = {"assigned": list(spec["tasks"])}
        self.shown.write()
        with ShardWriter(part, prefix=spec["prefix"], header={**header, **assigned}) as writer:
            try:
                await self._fill(writer)
            finally:
                if self.writing:  # what is under way in a thread uses the writer's descriptor
                    await asyncio.wait(self.writing)
                self.shown.close()
                await self.reward.close()
            info = writer.finish({**header, "sampling": dict(spec["sampling"])})
        files.link_or_copy(part, Path(spec["checkpoint"]))
        self.shown.write()
        seconds, tally = self.shown.seconds, self.tally
        return {
            "part": str(part),
            "bytes": info.bytes,
            "groups": info.groups,
            "trajectories": info.trajectories,
            "reward_mean": info.reward_mean,
            "resumed_groups": info.groups - tally.groups,
            "invalid": tally.invalid,
            "truncated": tally.truncated,
            "refused": tally.refused,
            "reward_errors": tally.reward_errors,
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "seconds": round(seconds, 3),
            "tokens_per_s": round(tally.completion_tokens / seconds, 1),
        }

    async def _fill(self, writer: ShardWriter) -> None:
        there = {group.task_index for group in writer.groups}  # of an earlier start that was cut off
        todo = [task for task in self.tasks if task.index not in there]
        if not todo or writer.finished:
            return
        todo.sort(key=lambda task: isinstance(task.prompt, str))  # a request has prompts of one kind
        connections = self.concurrency + 4
        async with Sampler(self.server, connections=connections, on_tokens=self._on_tokens) as sampler:
            await sampler.look()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for batch in self._batches(todo):
                        for _ in batch:
                            await self.unwritten.acquire()
                            await self.slots.acquire()
                        tasks.create_task(self._sample(sampler, batch, writer, tasks))
            except BaseExceptionGroup as group:
                raise _first(group) from None
        if self.tally.refused == self.tally.groups:
            raise ProgramFailed("the engine refused every prompt; the messages are above")

    def _batches(self, todo: list[Task]) -> list[list[Task]]:
        batches: list[list[Task]] = []
        for task in todo:
            last = batches[-1] if batches else []
            if (
                last
                and len(last) < self.per_request
                and isinstance(last[0].prompt, str) is isinstance(task.prompt, str)
            ):
                last.append(task)
            else:
                batches.append([task])
        return batches

    async def _sample(
        self, sampler: Sampler, batch: list[Task], writer: ShardWriter, tasks: asyncio.TaskGroup
    ) -> None:
        def finished(group: Group) -> None:
            self.slots.release()
            tasks.create_task(self._judge_and_append(group, writer))

        await sampler.sample(batch, finished)

    async def _judge_and_append(self, group: Group, writer: ShardWriter) -> None:
        if group.error is not None:
            print(f"task {group.task.index}: the engine refuses it: {group.error}", file=sys.stderr)
            made = failed_group(self.spec, group, self.samples)
        else:
            scores = await asyncio.gather(*(self.reward.score(group.task, s.text) for s in group.samples))
            made = judged_group(self.spec, group, scores)
        append = asyncio.ensure_future(asyncio.to_thread(writer.append_group, group.task.index, made))
        self.writing.add(append)
        append.add_done_callback(self.writing.discard)
        await asyncio.shield(append)
        self.unwritten.release()
        self.tally.add(group, made)
        self.shown.news()
        self._give_up_early(group, made)

    def _give_up_early(self, group: Group, made: Sequence[Mapping[str, Any]]) -> None:
        """Raises ProgramFailed once it is certain that the phase must fail."""
        tally = self.tally
        if tally.refused == tally.groups >= ALL_REFUSED:
            raise ProgramFailed(f"the engine refuses every prompt: {group.error}")
        if tally.reward_errors > self.error_share * self.shown.total:
            told = next(
                (item["metadata"]["reward_error"] for item in made if "reward_error" in item["metadata"]), ""
            )
            raise ProgramFailed(
                f"the reward failed for {tally.reward_errors} of {self.shown.total} trajectories, more than "
                f"reward.max_error_share={self.error_share:g} allows; the last: {' '.join(told.split())}"
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


def main(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    return asyncio.run(until_stopped(Rollout(spec, progress)))


if __name__ == "__main__":
    sys.exit(run_worker(main))
