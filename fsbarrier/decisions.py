"""The decisions and reports of an RL iteration as typed records. No other module knows their JSON keys.

The result of a row's work is a JSON object. The leader's result is the row's *decision*, which every node reads (`Context.decision`).
A member's result is its *report*, which the leader reads (`Context.reports`). A field has a default if an older fsbarrier did not write
its key, since a run may continue under a newer version. Other keys, such as `bytes` or `seconds`, are only for people.

Files are named without their folders, which each reader knows: nodes may mount the run at different places, and no record may lead out
of it (`Context.named_in`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from fsbarrier.errors import ProgramFailed
from fsbarrier.protocol.facts import JsonObject, Payload


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A record whose JSON keys are the names of its fields."""

    @classmethod
    def from_json(cls, value: Payload) -> Self:
        """Raises ProgramFailed for an object that lacks a required key."""
        try:
            return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})
        except TypeError:
            raise ProgramFailed(f"not a {cls.__name__}: {', '.join(value) or 'an empty object'}") from None

    def as_json(self) -> JsonObject:
        return {field.name: getattr(self, field.name) for field in fields(self)}


# --- rollouts: train_assign, train_rollout, train_aggregate; eval_decide, eval_rollout ----------------------------------------


@dataclass(frozen=True, slots=True)
class PartGroups(JsonRecord):
    """The groups of `tasks` in the part file called `name`: in its first `valid_bytes` bytes, or anywhere in it (None)."""

    name: str
    valid_bytes: int | None
    tasks: Sequence[int]


@dataclass(frozen=True, slots=True)
class RolloutDecision(JsonRecord):
    """Which tasks an iteration rolls out, and which node begins with which: the decision of train_assign and of eval_decide."""

    split: str
    #: all tasks, in the order in which they are begun
    wanted: Sequence[int]
    #: node rank -> the tasks that it begins with
    shares: Mapping[int, Sequence[int]]
    #: groups that are on disk already, and merged as they are
    adopted: Sequence[PartGroups] = ()
    #: why a node that runs out takes over nothing; "" where it takes over from the slowest
    fixed_shares: str = ""
    #: how many of `wanted` each round has; None: there is one round
    rounds: Sequence[int] | None = None
    #: of each round, how many groups on disk have rewards that differ
    with_signal: Sequence[int] = ()
    #: the merge keeps at most so many groups; None: all
    keep: int | None = None

    @property
    def round_sizes(self) -> Sequence[int]:
        return [len(self.wanted)] if self.rounds is None else self.rounds

    @classmethod
    def from_json(cls, value: Payload) -> Self:
        return cls(
            split="test" if "evaluate" in value else "train",
            wanted=value["wanted"],
            shares={int(rank): share for rank, share in value["shares"].items()},
            adopted=[PartGroups.from_json(part) for part in value["adopted"]],
            fixed_shares=value["fixed_shares"],
            rounds=value.get("rounds"),
            with_signal=value.get("with_signal", ()),
            keep=value.get("keep"),
        )

    def as_json(self) -> JsonObject:
        value = {
            "wanted": self.wanted,
            "shares": {str(rank): share for rank, share in self.shares.items()},
            "adopted": [part.as_json() for part in self.adopted],
            "with_signal": self.with_signal,
            "fixed_shares": self.fixed_shares,
        }
        if self.split == "test":
            return {"evaluate": True, **value}
        rounds = {} if self.rounds is None else {"rounds": self.rounds}
        return {**value, "keep": self.keep, **rounds}


#: the decision of eval_decide in an iteration that does not evaluate
NO_EVALUATION: Payload = {"evaluate": False}


@dataclass(frozen=True, slots=True)
class RolloutReport(JsonRecord):
    """One node's rollouts. Without a `part` the node had nothing to do."""

    part: str = ""
    #: the tasks whose groups are in the part; None: the node's share
    tasks: Sequence[int] | None = None
    #: the phase ended before all tasks were done, because enough were
    ended_early: bool = False
    #: how many groups it took over from slower nodes
    taken_over: int = 0
    #: how many rounds it took part in; None: it does not say
    rounds: int | None = None


@dataclass(frozen=True, slots=True)
class MergeDecision(JsonRecord):
    """The merged trajectories of an iteration: the decision of train_aggregate, eval_rollout, and a closing iteration_end.

    Its other keys are the merge's own figures.
    """

    #: the name of the merged file
    merged: str = ""
    #: the tasks without a group, because the phase ended early
    cut_off: Sequence[int] = ()
    groups_taken_over: int = 0
    #: of rollouts to train on: the names of the merged files of the iterations before, the last one first
    earlier: Sequence[str] = ()
    #: of an evaluation: a digest of how it sampled
    sampled_how: str | None = None
    #: how many rounds took place; None: there was one
    rounds: int | None = None

    def as_json(self) -> JsonObject:
        return {
            "merged": self.merged,
            "cut_off": self.cut_off,
            "groups_cut_off": len(self.cut_off),
            "groups_taken_over": self.groups_taken_over,
            **({"earlier": self.earlier} if self.sampled_how is None else {"sampled_how": self.sampled_how}),
            **({} if self.rounds is None else {"rounds": self.rounds}),
        }


# --- update: batch_prepare, update_ready, update ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchDecision(JsonRecord):
    """The port on which the leader listens, and the name of the training batch (batch_prepare)."""

    port: int
    batch: str = ""


@dataclass(frozen=True, slots=True)
class ReachReport(JsonRecord):
    """Which of the leader's addresses one node has reached, and the trainer that it has kept (update_ready)."""

    reached: Sequence[str] = ()
    trainer: str = ""


@dataclass(frozen=True, slots=True)
class RendezvousDecision(JsonRecord):
    """Where torchrun's processes meet, and the trainer that all nodes have kept, "" for a new one (update_ready)."""

    master_addr: str
    master_port: int
    trainer: str = ""


@dataclass(frozen=True, slots=True)
class UpdateDecision(JsonRecord):
    """The name of the new policy version's folder (update)."""

    folder: str
    policy_version: int


# --- publication: weights_publish ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BestPolicy:
    """The policy version with the best mean reward in an evaluation so far. Only what was sampled in one way can be compared."""

    reward: float
    version: int
    #: among the checkpoints; None: the run's first model, which is not among them
    folder: str | None
    sampled_how: str

    @classmethod
    def from_json(cls, value: Payload) -> Self | None:
        if "best_reward" not in value:
            return None
        version, folder = value["best_policy_version"], value["best_folder"]
        return cls(value["best_reward"], version, folder, value["best_sampled_how"])

    def as_json(self) -> JsonObject:
        return {
            "best_reward": self.reward,
            "best_policy_version": self.version,
            "best_folder": self.folder,
            "best_sampled_how": self.sampled_how,
        }


@dataclass(frozen=True, slots=True)
class PublishDecision:
    """The policy version that the run serves from now on, and the best one so far, which is kept (weights_publish)."""

    policy_version: int
    #: its name among the checkpoints
    folder: str
    digest: str
    best: BestPolicy | None

    @classmethod
    def from_json(cls, value: Payload) -> Self:
        best = BestPolicy.from_json(value)
        return cls(value["policy_version"], str(value.get("folder", "")), value.get("digest", ""), best)

    def as_json(self) -> JsonObject:
        return {
            "policy_version": self.policy_version,
            "folder": self.folder,
            "digest": self.digest,
            **(self.best.as_json() if self.best is not None else {}),
        }
