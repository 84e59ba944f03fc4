"""The fields of a trajectory, with types and units. Only those of `REQUIRED` are mandatory.

On disk a trajectory is a plain dict. Programs of the user's own may leave out the other fields and add their own, which are kept.
A trajectory of N tokens has three arrays of length N side by side: `token_ids`, `loss_mask`, `logprobs`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Required, TypedDict

from fsbarrier.protocol.facts import JsonObject

REQUIRED = ("task_id", "sample", "reward", "policy_version", "node_rank")


class Sampled(TypedDict, total=False):
    """The fields determined by sampling."""

    # --- for display ---

    #: all turns, including the prompt
    messages: list[JsonObject]
    #: the last answer, without its thoughts
    text: str
    #: the thoughts of the last answer; absent without any
    reasoning: str
    #: number of sampled tokens of the thoughts in all answers, with the marks around them; absent without any
    reasoning_tokens: int
    #: in how many answers `rollout.max_thinking_tokens` has closed the thoughts; absent if in none
    thoughts_closed: int

    # --- for training ---

    #: int32[N]: the tokens of prompt and answers in order
    token_ids: array[int]
    #: uint8[N]: 1 where the policy sampled the token, 0 where it was given
    loss_mask: array[int]
    #: float32[N]: log-probability (nats) of each sampled token when it was sampled; 0.0 for the others
    logprobs: array[float]
    #: int32[N]: the policy version that sampled each token, -1 for the others; only if weights may have come meanwhile
    #: (`rollout.in_flight`). None is below `policy_version`.
    policy_versions: array[int]
    #: float32[N]: log-probability of each sampled token under a teacher (`algorithm.loss=distil`); absent without one
    teacher_logprobs: array[float]
    #: for each segment (or the only one), the files of its images in order, in the folder of the iteration's images
    images: list[list[str]]
    #: number of tokens of the first prompt
    prompt_tokens: int

    # --- of an agent's episode ---

    #: answers of the policy
    turns: int
    #: where each segment begins in the three arrays. A new one begins where the agent changed what had been said before.
    segments: list[int]
    #: the messages of each segment but the last
    earlier_messages: list[list[JsonObject]]


class Trajectory(Sampled, total=False):
    """One recorded interaction: samples, score and origin.

    (What an agent's `run` returns has this name too: rollouts/episode.py.)
    """

    # --- task ---

    task_id: Required[str]
    #: the task's line in its file, from 0. With several evaluation sets, the numbering continues over the sets, in the order of their
    #: names.
    task_index: int
    #: the name of its evaluation set; absent if there is only one set
    eval_set: str
    #: text, or chat messages
    prompt: str | list[dict[str, str]]
    #: from 0, within the group: all trajectories of one task
    sample: Required[int]

    # --- score ---

    reward: Required[float]
    #: the parts of the reward, by name
    reward_parts: dict[str, float]
    #: False if the trajectory failed or could not be scored; then it never counts as a success
    valid: bool
    #: "stop", "length" (cut off) or "error"
    finish_reason: str

    # --- origin ---

    #: number of updates of the weights with which its group's rollouts began; -1: unknown
    policy_version: Required[int]
    node_rank: Required[int]
    #: the node's engine that sampled it, from 0; absent if unknown
    replica: int
    generation: int
    iteration: int
    #: "train" or "test"
    split: str

    # --- the rest ---

    #: seconds: generate_s, episode_s, reward_s
    timings: dict[str, float]
    #: the task's other fields and its `answer`; after a failure also `agent_error`, `environment_error`,
    #: `reward_error` or `error`
    metadata: JsonObject


def is_judged(trajectory: Mapping[str, Any]) -> bool:
    """Whether its reward is valid, i.e. neither the reward function nor the agent failed."""
    metadata = trajectory.get("metadata")
    return not (
        isinstance(metadata, Mapping)
        and {"reward_error", "agent_error", "environment_error"} & metadata.keys()
    )


class TrajectoryFile(TypedDict):
    """The result of `torch.load` and `load` for a finished or merged file."""

    trajectories: list[Trajectory]
    metadata: JsonObject
