"""What a trajectory is: its fields with their types and units. Only those of `REQUIRED` must be there.

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
    """The fields that sampling gives."""

    # --- what people read ---

    #: every turn, the prompt's included
    messages: list[JsonObject]
    #: the last answer
    text: str

    # --- what is trained on ---

    #: int32[N]: the tokens of prompt and answers in order
    token_ids: array[int]
    #: uint8[N]: 1 where the policy sampled the token, 0 where it was given
    loss_mask: array[int]
    #: float32[N]: log-probability (nats) of each sampled token when it was sampled; 0.0 for the others
    logprobs: array[float]
    #: how many of the tokens are the first prompt
    prompt_tokens: int

    # --- of an agent's episode ---

    #: answers of the policy
    turns: int
    #: where each segment begins in the three arrays. A new one begins where the agent changed what had been said before.
    segments: list[int]
    #: the messages of each segment but the last
    earlier_messages: list[list[JsonObject]]


class Trajectory(Sampled, total=False):
    """One recorded interaction: what was sampled for a task, how it was judged, and where it comes from.

    (What an agent's `run` returns has this name too: rollouts/episode.py.)
    """

    # --- which task, and which of its group ---

    task_id: Required[str]
    #: the task's line in its file, from 0. Several sets of held-out tasks are numbered on, in the order of their names, as if all their
    #: lines stood in one file.
    task_index: int
    #: the name of its set of held-out tasks; absent where the run has a single set
    eval_set: str
    #: text, or chat messages
    prompt: str | list[dict[str, str]]
    #: from 0, within the group: all trajectories of one task
    sample: Required[int]

    # --- how it was judged ---

    reward: Required[float]
    #: what the reward was made from, by name
    reward_parts: dict[str, float]
    #: False if the trajectory failed or could not be judged: then it never counts as a success
    valid: bool
    #: "stop", "length" (cut off) or "error"
    finish_reason: str

    # --- where it comes from ---

    #: how many updates the weights that sampled it had had; -1: not known
    policy_version: Required[int]
    node_rank: Required[int]
    #: which of that node's engines sampled it, from 0; absent if not known
    replica: int
    generation: int
    iteration: int
    #: "train" or "test"
    split: str

    # --- the rest ---

    #: seconds: generate_s, episode_s, reward_s
    timings: dict[str, float]
    #: the task's other fields and its `answer`; where something went wrong `agent_error`, `reward_error` or `error`
    metadata: JsonObject


def is_judged(trajectory: Mapping[str, Any]) -> bool:
    """Whether its reward says anything: neither the reward function nor the agent failed."""
    metadata = trajectory.get("metadata")
    return not (isinstance(metadata, Mapping) and {"reward_error", "agent_error"} & metadata.keys())


class TrajectoryFile(TypedDict):
    """What `torch.load` and `load` give of a finished or merged file."""

    trajectories: list[Trajectory]
    metadata: JsonObject
