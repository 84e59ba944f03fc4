"""Phase 2 and 6: one node's share of the tasks, rolled out against its local vLLM, judged, and saved group by group.

`python -m fsbarrier.workers.rollout --spec SPEC.json`. A group (all samples of one task) is durable as soon as it is judged. The
log-probabilities are those of the distribution that was sampled from; ids come from the server itself, end token included.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import files, tasks
from fsbarrier.errors import ProgramFailed
from fsbarrier.rewards import Reward, Score, open_reward
from fsbarrier.tasks import Task
from fsbarrier.trajectories import ShardWriter
from fsbarrier.workers.sampling import Sample, Sampler
from fsbarrier.workers.spec import Progress, run_worker

MAX_ERROR_SHARE = 0.1  # of a phase's trajectories whose reward could not be computed
ERRORS_BEFORE_JUDGING = 32


@dataclass
class Totals:
    """What was done so far."""

    trajectories: int = 0
    groups: int = 0
    invalid: int = 0
    reward_errors: int = 0
    reward: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_error: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.started)

    @property
    def reward_mean(self) -> float | None:
        return self.reward / self.trajectories if self.trajectories else None


class Rollout:
    """The work of one spec."""

    def __init__(
        self, spec: Mapping[str, Any], progress: Progress, writer: ShardWriter, reward: Reward
    ) -> None:
        self.spec, self.progress, self.writer, self.reward = spec, progress, writer, reward
        self.totals = Totals()
        self.samples: int = spec["sampling"]["samples"]

    async def run(self, todo: Sequence[Task]) -> None:
        """Roll out all tasks, a bounded number of requests at a time. Raises ProgramFailed."""
        settings = self.spec["settings"]["rollout"]
        slots = asyncio.Semaphore(settings["concurrency"])
        async with Sampler(self.spec) as sampler, asyncio.TaskGroup() as group:
            size = sampler.prompts_per_request
            for start in range(0, len(todo), size):
                group.create_task(self.one_request(sampler, slots, todo[start : start + size]))

    async def one_request(self, sampler: Sampler, slots: asyncio.Semaphore, chunk: Sequence[Task]) -> None:
        async with slots:
            begun = time.monotonic()
            answers = await sampler.sample(chunk)
        generated = time.monotonic() - begun
        for task, samples in zip(chunk, answers, strict=True):
            scores = await asyncio.gather(*(self.judge(task, sample) for sample in samples))
            trajectories = [
                self.trajectory(task, number, sample, score, generated)
                for number, (sample, score) in enumerate(zip(samples, scores, strict=True))
            ]
            await asyncio.to_thread(self.writer.append_group, task.index, trajectories)
            self.count(samples, scores)

    async def judge(self, task: Task, sample: Sample) -> Score:
        """A generation that failed or was cut off is no success, whatever it says."""
        return await self.reward.score(task, sample.text) if sample.valid else Score(0.0)

    def count(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        totals = self.totals
        totals.groups += 1
        for sample, score in zip(samples, scores, strict=True):
            totals.trajectories += 1
            totals.reward += score.reward
            totals.invalid += not sample.valid
            totals.prompt_tokens += len(sample.prompt_ids)
            totals.completion_tokens += len(sample.token_ids)
            if score.error is not None:
                totals.reward_errors += 1
                totals.last_error = score.error
        share = self.spec["settings"]["reward"].get("max_error_share", MAX_ERROR_SHARE)
        if totals.reward_errors > max(share * totals.trajectories, share * ERRORS_BEFORE_JUDGING):
            raise ProgramFailed(
                f"the reward {self.spec['settings']['reward']['kind']} failed for {totals.reward_errors} of "
                f"{totals.trajectories} trajectories; the last time: {totals.last_error}"
            )
        self.show()

    def show(self, last: bool = False) -> None:
        totals, wanted = self.totals, len(self.spec["tasks"]) * self.samples
        speed = totals.completion_tokens / totals.seconds
        self.progress.show(
            totals.trajectories,
            wanted,
            "trajectories",
            last=last,
            reward_mean=totals.reward_mean,
            tokens_per_s=speed,
        )

    def trajectory(
        self, task: Task, number: int, sample: Sample, score: Score, generated: float
    ) -> dict[str, Any]:
        spec = self.spec
        prompt, sampled = len(sample.prompt_ids), len(sample.token_ids)
        metadata = dict(task.metadata)
        if score.error is not None:
            metadata["reward_error"] = score.error
        if score.info:
            metadata["reward_info"] = dict(score.info)
        return {
            "task_id": task.task_id,
            "task_index": task.index,
            "sample": number,
            "reward": float(score.reward),
            "reward_parts": dict(score.parts),
            "policy_version": spec["policy_version"],
            "node_rank": spec["node_rank"],
            "generation": spec["generation"],
            "iteration": spec["iteration"],
            "split": spec["split"],
            "prompt": task.prompt if isinstance(task.prompt, str) else [dict(m) for m in task.prompt],
            "messages": [*task.messages, {"role": "assistant", "content": sample.text}],
            "text": sample.text,
            "token_ids": array("i", [*sample.prompt_ids, *sample.token_ids]),
            "prompt_tokens": prompt,
            "loss_mask": array("B", bytes(prompt) + b"\1" * sampled),
            "logprobs": array("f", [0.0] * prompt + list(sample.logprobs)),
            "finish_reason": sample.finish_reason,
            "valid": sample.valid,
            "timings": {"generate_s": round(generated, 4), "reward_s": round(score.seconds, 4)},
            "metadata": metadata,
        }


def main(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    part, checkpoint = Path(spec["part"]), Path(spec["checkpoint"])
    files.make_dirs(part.parent)
    header = {
        key: spec[key]
        for key in ("run_id", "split", "iteration", "generation", "node_rank", "policy_version")
    }
    todo = tasks.read_tasks(Path(spec["task_file"]), spec["tasks"]).tasks
    with ShardWriter(part, prefix=spec["prefix"], header={**header, "assigned": spec["tasks"]}) as writer:
        reward = open_reward(spec["settings"]["reward"]["kind"])
        rollout = Rollout(spec, progress, writer, reward)
        asyncio.run(_with_signals(rollout, [todo[index] for index in spec["tasks"]]))
        info = writer.finish({**header, "trajectories": rollout.totals.trajectories})
    files.link_or_copy(part, checkpoint)
    totals = rollout.totals
    rollout.show(last=True)
    return {
        "part": str(part),
        "bytes": info.bytes,
        "groups": totals.groups,
        "trajectories": totals.trajectories,
        "reward_mean": totals.reward_mean,
        "invalid": totals.invalid,
        "reward_errors": totals.reward_errors,
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "seconds": round(totals.seconds, 3),
        "tokens_per_s": round(totals.completion_tokens / totals.seconds, 1),
    }


async def _with_signals(rollout: Rollout, todo: Sequence[Task]) -> None:
    """Run to the end, or until SIGTERM: what was appended is durable, and the file stays valid as it is."""
    loop, work = asyncio.get_running_loop(), asyncio.ensure_future(rollout.run(todo))
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        await rollout.reward.close()


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(run_worker(main))
