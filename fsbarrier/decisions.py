"""The decisions and reports of an RL iteration as typed records. No other module knows their JSON keys.

The result of a row's work is a JSON object. The leader's result is the row's *decision*, which every node reads (`Context.decision`).
A member's result is its *report*, which the leader reads (`Context.reports_of`).

Files are named without their folders, which each reader knows: nodes may mount the run at different places, and no record may lead out
of it (`Context.named_in`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from fsbarrier.errors import ProgramFailed
from fsbarrier.protocol.codec import ready
from fsbarrier.protocol.facts import JsonObject, Payload


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A record whose JSON keys are the names of its fields."""

    @classmethod
    def from_json(cls, value: Payload) -> Self:
        """Raises ProgramFailed for an object that lacks a required key, or has a value of another type. Other keys are ignored."""
        return cls.converted(value)

    @classmethod
    def converted(cls, value: Payload) -> Self:
        """Convert a JSON object to this record; in JSON, paths and keys that are numbers are text. A subclass may override `from_json`
        to add to the object first."""
        try:
            return msgspec.convert(value, cls, str_keys=True, dec_hook=lambda wanted, text: wanted(text))
        except msgspec.ValidationError as error:
            raise ProgramFailed(f"not a {cls.__name__}: {error}") from None

    def as_json(self) -> JsonObject:
        plain: JsonObject = msgspec.to_builtins(self, str_keys=True, enc_hook=str)
        return plain


# --- rollouts: train_assign, train_rollout, train_aggregate; eval_decide, eval_rollout ----------------------------------------


@ready
@dataclass(frozen=True, slots=True)
class PartGroups(JsonRecord):
    """The groups of `tasks` in the part file called `name`: in its first `valid_bytes` bytes, or anywhere in it (None)."""

    name: str
    valid_bytes: int | None
    tasks: Sequence[int]


@ready
@dataclass(frozen=True, slots=True)
class RolloutDecision(JsonRecord):
    """The tasks that an iteration rolls out, and each node's initial share: the decision of train_assign and of eval_decide."""

    #: all tasks, in the order in which they are begun
    wanted: Sequence[int]
    #: node rank -> its initial share of the tasks
    shares: Mapping[int, Sequence[int]]
    #: groups that are already on disk and are merged unchanged
    adopted: Sequence[PartGroups] = ()
    #: why an idle node takes over no tasks; "" if it takes over tasks from the slowest nodes
    fixed_shares: str = ""
    #: the number of tasks of `wanted` in each round; None: there is one round
    rounds: Sequence[int] | None = None
    #: the number of groups on disk with differing rewards, by round
    with_signal: Sequence[int] = ()
    #: maximum number of groups that the merge keeps; None: all
    keep: int | None = None
    #: whether the tasks are held-out tasks
    evaluate: bool = False

    @property
    def split(self) -> str:
        return "test" if self.evaluate else "train"

    @property
    def round_sizes(self) -> Sequence[int]:
        return [len(self.wanted)] if self.rounds is None else self.rounds


#: the decision of eval_decide in an iteration that does not evaluate
NO_EVALUATION = RolloutDecision((), {})


@ready
@dataclass(frozen=True, slots=True)
class RolloutReport(JsonRecord):
    """One node's rollouts."""

    part: str = ""
    #: the tasks whose groups are in the part; None: the node's share
    tasks: Sequence[int] | None = None
    #: the phase ended before all tasks were done, because enough were
    ended_early: bool = False
    #: how many groups it took over from slower nodes
    taken_over: int = 0
    #: the number of rounds it took part in; None: not reported
    rounds: int | None = None
    #: size of the finished part
    bytes: int = 0
    groups: int = 0
    trajectories: int = 0
    reward_mean: float | None = None
    #: lots claimed, and groups finished by an earlier start of the program
    claims: int = 0
    resumed_groups: int = 0
    #: numbers of trajectories, by outcome
    invalid: int = 0
    truncated: int = 0
    refused: int = 0
    timed_out: int = 0
    reward_errors: int = 0
    agent_errors: int = 0
    environment_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0


@ready
@dataclass(frozen=True, slots=True)
class MergeDecision(JsonRecord):
    """The merged trajectories of an iteration: the decision of train_aggregate, eval_rollout, and a closing iteration_end."""

    #: the name of the merged file
    merged: str = ""
    #: the tasks without a group, because the phase ended early
    cut_off: Sequence[int] = ()
    groups_taken_over: int = 0
    #: for training rollouts: the names of the merged files of earlier iterations, newest first
    earlier: Sequence[str] = ()
    #: for an evaluation: a digest of how it sampled
    sampled_how: str | None = None
    #: how many rounds took place; None: there was one
    rounds: int | None = None
    #: the policy that was sampled
    policy_version: int | None = None
    policy: str = ""
    #: the size of the merged file
    bytes: int = 0
    reward_mean: float | None = None
    #: task number -> the mean reward of its last group; None: task selection does not depend on it
    last_rewards: Mapping[str, float] | None = None
    #: task number -> how often it was drawn, and how often its group was finished; None: each drawn task is finished
    draws: Mapping[str, Sequence[int]] | None = None


# --- update: batch_prepare, update_ready ------------------------------------------------------------------------------


@ready
@dataclass(frozen=True, slots=True)
class BatchDecision(JsonRecord):
    """The port on which the node listens where the update's processes meet, and the name of the training batch (batch_prepare).

    If the leader is not that node, the node's report has the port alone.
    """

    #: text in a dry run
    port: int | str
    batch: str = ""


@ready
@dataclass(frozen=True, slots=True)
class ReachReport(JsonRecord):
    """The addresses of that node that one node can reach, and the trainer that it has kept (update_ready)."""

    reached: Sequence[str] = ()
    trainer: str = ""


@ready
@dataclass(frozen=True, slots=True)
class NewVersion(JsonRecord):
    """The policy version that an update makes: the name of its folder, and its number. Both are decided before it is made, so a later
    generation knows by name what the nodes that train have finished."""

    folder: str
    policy_version: int


@ready
@dataclass(frozen=True, slots=True)
class RendezvousDecision(JsonRecord):
    """What the update makes, where torchrun's processes meet, and the trainer that all nodes have kept, "" for a new one (update_ready)."""

    makes: NewVersion
    master_addr: str
    #: text in a dry run
    master_port: int | str
    trainer: str = ""
    #: the next iteration's rollouts, which run meanwhile (`rollout.ahead`); None: none
    ahead: RolloutDecision | None = None


@ready
@dataclass(frozen=True, slots=True)
class EnginesReport(JsonRecord):
    """How many engines serve the new policy on one node (engine_start)."""

    engines: int


# --- publication: weights_publish ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BestPolicy:
    """The policy version with the best mean reward in an evaluation so far. Only evaluations that sampled in the same way are compared."""

    reward: float
    version: int
    #: name among the checkpoints; None: the run's first model, which is not a checkpoint
    folder: str | None
    sampled_how: str


@ready
@dataclass(frozen=True, slots=True)
class PublishDecision(JsonRecord):
    """The policy version that the run serves from now on, and the best one so far, which is kept (weights_publish)."""

    policy_version: int
    #: its name among the checkpoints
    folder: str = ""
    digest: str = ""
    best: BestPolicy | None = None
    #: the identity of the policy version that this one was trained from (`Context.policy_identity`)
    previous: str = ""
