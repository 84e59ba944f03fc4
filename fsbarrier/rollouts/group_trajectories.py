"""Builds the trajectories of a group from samples, scores and origin, with their log-probabilities under the frozen engine
`engines.teacher` for `algorithm.loss=distil`.

The teacher is asked when a group is finished, and its answers are stored with the group. vLLM computes them at temperature 1, so rollouts
must use it too.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from fsbarrier.data.images import replaced
from fsbarrier.data.trajectory import Sampled, Trajectory
from fsbarrier.engine.openai_http import given_logprobs
from fsbarrier.errors import ProgramFailed
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rewards.model_server import ModelServer, ModelServerError
from fsbarrier.rewards.score import Answer, Reward, Score
from fsbarrier.rollouts.rollout_spec import Origin
from fsbarrier.rollouts.samples import UNKNOWN, Sample, SampledGroup
from fsbarrier.specs import EngineAddress

#: timeout of a request
TIMEOUT_S = 600.0


async def judged_group(origin: Origin, group: SampledGroup, reward: Reward, folder: Path) -> list[Trajectory]:
    """The scored trajectories of a group, whose images are in `folder`."""
    scores = await _scores(reward, group, folder)
    return [
        _trajectory(origin, group, number, sample, score)
        for number, (sample, score) in enumerate(zip(group.samples, scores, strict=True))
    ]


def failed_group(origin: Origin, group: SampledGroup, samples: int) -> list[Trajectory]:
    """Placeholder trajectories for a failed task: the task counts as done, but an update does not train on them."""
    nothing = Sample("", [], [], "error", 0.0, metadata={"error": group.error})
    return [_trajectory(origin, group, number, nothing, Score(0.0)) for number in range(samples)]


async def _scores(reward: Reward, group: SampledGroup, folder: Path) -> list[Score]:
    """The samples' scores, or the agent's own rewards. Never raises."""
    known = [_known_score(sample) for sample in group.samples]
    open_ones = [sample for sample, score in zip(group.samples, known, strict=True) if score is None]
    answers = [_answer(sample, group, folder) for sample in open_ones]
    scores = iter(await reward.score_group(group.task, answers))
    return [next(scores) if score is None else score for score in known]


def _answer(sample: Sample, group: SampledGroup, folder: Path) -> Answer:
    """The input of a reward, with paths to the images."""
    record, messages = sample.record(group), sample.messages
    if messages is not None:
        messages = replaced(messages, lambda name: {"type": "image", "image": str(folder / name)})
    tokens = record["token_ids"][record.get("segments", [0])[-1] :]
    seen = [str(folder / name) for of_segment in record.get("images", ()) for name in of_segment]
    return Answer(sample.response, messages, tokens, seen, sample.reasoning or "")


def _known_score(sample: Sample) -> Score | None:
    if sample.error is not None:
        return Score(0.0)
    return None if sample.reward is None else Score(sample.reward, {"agent": sample.reward})


def _no_older(record: Sampled, origin: Origin) -> Sampled:
    """Check that no token is from an older policy than the part's, and return the record. Raises ProgramFailed."""
    oldest = min(
        (v for v in record.get("policy_versions", ()) if v != UNKNOWN), default=origin.policy_version
    )
    if oldest < origin.policy_version:
        raise ProgramFailed(
            f"the engine sampled with policy version {oldest}; these rollouts begin with version {origin.policy_version}"
        )
    return record


def _judgement(score: Score, metadata: JsonObject, *, sampled: bool) -> dict[str, object]:
    """The trajectory fields that depend on the score, merged with its other `metadata`. `sampled`: sampling did not fail."""
    stored = dict(metadata)
    if score.info:
        stored["reward_info"] = dict(score.info)
    if score.error is not None:
        stored["reward_error"] = score.error
    valid = sampled and score.error is None
    return {
        # A failed trajectory is never a success. Its computed reward stays in `reward_parts`.
        "reward": score.reward if valid else min(0.0, score.reward),
        "reward_parts": dict(score.parts),
        "valid": valid,
        "metadata": stored,
    }


def _trajectory(origin: Origin, group: SampledGroup, number: int, sample: Sample, score: Score) -> Trajectory:
    task = group.task
    metadata = {**task.metadata, "answer": task.answer, **sample.metadata}
    if sample.error is not None:
        metadata["environment_error" if sample.lost else "agent_error"] = sample.error
    made = {
        "task_id": task.task_id,
        "task_index": task.index,
        **({"eval_set": task.eval_set} if task.eval_set else {}),
        "sample": number,
        "policy_version": origin.policy_version,
        "node_rank": origin.node_rank,
        **({} if group.replica is None else {"replica": group.replica}),
        "generation": origin.generation,
        "iteration": origin.iteration,
        "split": origin.split,
        "prompt": task.prompt if isinstance(task.prompt, str) else group.conversation,
        **_no_older(sample.record(group), origin),
        "finish_reason": sample.finish_reason,
        "timings": {**sample.timings, "reward_s": round(score.seconds, 6)},
        **_judgement(score, metadata, sampled=sample.finish_reason != "error" and sample.error is None),
    }
    return cast(Trajectory, made)


class Teacher:
    def __init__(self, engine: EngineAddress) -> None:
        self._model = engine.model
        self._server = ModelServer(f"engines.{engine.model}", engine, TIMEOUT_S)

    async def mark(self, trajectories: Sequence[Trajectory]) -> None:
        """Add `teacher_logprobs` to these trajectories. Raises ProgramFailed if the teacher does not give them."""
        try:
            await asyncio.gather(*(self._mark(trajectory) for trajectory in trajectories))
        except ModelServerError as error:
            raise ProgramFailed(str(error)) from None

    async def _mark(self, trajectory: Trajectory) -> None:
        tokens, mask = trajectory["token_ids"].tolist(), trajectory["loss_mask"]
        starts = trajectory.get("segments", [0])
        ends = [*starts[1:], len(tokens)]
        parts = await asyncio.gather(*(self._ask(tokens[a:b]) for a, b in zip(starts, ends, strict=True)))
        logprobs = [value for part in parts for value in part]
        trajectory["teacher_logprobs"] = array(
            "f", [p if m else 0.0 for p, m in zip(logprobs, mask, strict=True)]
        )

    async def _ask(self, tokens: list[int]) -> list[float]:
        """The log-probability of each token given the previous ones; 0 for the first token."""
        if len(tokens) < 2:
            return [0.0] * len(tokens)
        body = {"model": self._model, "prompt": [tokens], "max_tokens": 1, "prompt_logprobs": 0}
        answer: Any = await self._server.post("/completions", body)
        try:
            return given_logprobs(answer, [tokens])[0]
        except ValueError as error:
            raise ModelServerError(f"engines.{self._model} gave {error}") from None

    async def close(self) -> None:
        await self._server.close()
