"""Makes the trajectories of a group: what was sampled, how it was judged, and where it comes from."""

from __future__ import annotations

import asyncio

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.rewards.score import Reward, Score
from fsbarrier.rollouts.rollout_spec import Origin
from fsbarrier.rollouts.samples import Group, Sample


async def judged_group(origin: Origin, group: Group, reward: Reward) -> list[Trajectory]:
    """The trajectories of a group, each judged."""
    scores = await asyncio.gather(*(_score(reward, group, sample) for sample in group.samples))
    return [
        _trajectory(origin, group, number, sample, score)
        for number, (sample, score) in enumerate(zip(group.samples, scores, strict=True))
    ]


def failed_group(origin: Origin, group: Group, samples: int) -> list[Trajectory]:
    """In the place of samples that there are not: the task is accounted for, and there is nothing to learn from."""
    nothing = Sample("", [], [], "error", 0.0, metadata={"error": group.error})
    return [_trajectory(origin, group, number, nothing, Score(0.0)) for number in range(samples)]


async def _score(reward: Reward, group: Group, sample: Sample) -> Score:
    """A sample's judgement; an agent may have given its own. Never raises."""
    if sample.error is not None:
        return Score(0.0)
    if sample.reward is not None:
        return Score(sample.reward, {"agent": sample.reward})
    return await reward.score(group.task, sample.text, sample.messages)


def _trajectory(origin: Origin, group: Group, number: int, sample: Sample, score: Score) -> Trajectory:
    task = group.task
    valid = sample.finish_reason == "stop" and sample.error is None and score.error is None
    metadata = {**task.metadata, "answer": task.answer, **sample.metadata}
    if sample.error is not None:
        metadata["agent_error"] = sample.error
    if score.info:
        metadata["reward_info"] = dict(score.info)
    if score.error is not None:
        metadata["reward_error"] = score.error
    return {
        "task_id": task.task_id,
        "task_index": task.index,
        "sample": number,
        "policy_version": origin.policy_version,
        "node_rank": origin.node_rank,
        "generation": origin.generation,
        "iteration": origin.iteration,
        "split": origin.split,
        "prompt": task.prompt if isinstance(task.prompt, str) else task.messages,
        # What was cut off or failed is never a success; what it would have been given stays in `reward_parts`.
        "reward": score.reward if valid else min(0.0, score.reward),
        "reward_parts": dict(score.parts),
        **sample.record(group),
        "finish_reason": sample.finish_reason,
        "valid": valid,
        "timings": {**sample.timings, "reward_s": round(score.seconds, 6)},
        "metadata": metadata,
    }
