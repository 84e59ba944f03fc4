"""Makes the trajectories of a group: what was sampled, how it was judged, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.score import Score
from fsbarrier.rollouts.samples import Group, Sample

ORIGIN = ("policy_version", "node_rank", "generation", "iteration", "split")

Record = dict[str, Any]


def judged_group(spec: Mapping[str, Any], group: Group, scores: Sequence[Score]) -> list[Record]:
    """The trajectories of a group of which every sample has been judged."""
    return [
        _record(spec, group, number, sample, score)
        for number, (sample, score) in enumerate(zip(group.samples, scores, strict=True))
    ]


def failed_group(spec: Mapping[str, Any], group: Group, samples: int) -> list[Record]:
    """In the place of samples that there are not: the task is accounted for, and there is nothing to learn from."""
    nothing = Sample("", [], [], "error", 0.0)
    made = [_record(spec, group, number, nothing, Score(0.0)) for number in range(samples)]
    for record in made:
        record["metadata"]["error"] = group.error
    return made


def _record(spec: Mapping[str, Any], group: Group, number: int, sample: Sample, score: Score) -> Record:
    valid = sample.finish_reason == "stop" and sample.error is None and score.error is None
    metadata = {**group.task.metadata, "answer": group.task.answer, **sample.metadata}
    if sample.error is not None:
        metadata["agent_error"] = sample.error
    if score.info:
        metadata["reward_info"] = dict(score.info)
    if score.error is not None:
        metadata["reward_error"] = score.error
    return {
        **_identity(spec, group.task, number),
        "reward": score.reward if valid else min(0.0, score.reward),
        "reward_parts": dict(score.parts),
        **sample.record(group),
        "finish_reason": sample.finish_reason,
        "valid": valid,
        "timings": {**sample.timings, "reward_s": round(score.seconds, 6)},
        "metadata": metadata,
    }


def _identity(spec: Mapping[str, Any], task: Task, number: int) -> Record:
    return {
        "task_id": task.task_id,
        "task_index": task.index,
        "sample": number,
        **{name: spec[name] for name in ORIGIN},
        "prompt": task.prompt if isinstance(task.prompt, str) else task.messages,
    }
