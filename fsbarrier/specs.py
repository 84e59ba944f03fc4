"""The programs that rows start: for each a *spec*, the record that the row writes and the program reads, and a report, which comes back.

A spec names its report (`class PrepareSpec(Spec[PrepareReport])`), so that `node.run(spec)` returns one. In the program, the decorator
`PrepareSpec.program` makes of a typed function what reads and writes the files of processes/worker_contract.py.

Rollouts have theirs in rollouts/rollout_spec.py. This module imports nothing heavy, since daemons load it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args, get_origin

from fsbarrier.data.merge import MergeRequest
from fsbarrier.decisions import JsonRecord
from fsbarrier.processes.supervisor import own_program
from fsbarrier.processes.worker_contract import Main, ProgressWriter
from fsbarrier.protocol.codec import ready
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.settings.sections import Settings

R = TypeVar("R", bound=JsonRecord)

#: in a command line: the path of the spec's file
SPEC = "{spec}"
#: the names of the resident processes that help an update or a rollout (fsbarrier/workers/helper.py), and of those that train
HELPER, TRAINER = "helper", "trainer"


@dataclass(frozen=True, slots=True)
class Resident:
    """Processes of a node that stay, with their memory and what they have imported, for its next program with this name.

    All programs with one name have the same `env`. The process HELPER does the jobs of several programs, by calling the function `work` of
    the program's module. `processes`: their number on each node.

    `reuse`: None: take whichever are there, or else start some. For TRAINER, whose processes belong together on all nodes and stay for one
    era: the name of those that all nodes have from the last such program (`Context.kept`); "": start new ones.
    """

    name: str
    processes: int = 1
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program is started. In `argv`, `{spec}` stands for the path of the spec's file."""

    argv: tuple[str, ...]
    #: the file in the node's log folder
    log: str
    env: Mapping[str, str] = field(default_factory=dict)
    #: The program inherits the sockets of the last `Node.listen`; $FSBARRIER_LISTENING names their descriptors, separated by commas. Any
    #: other program finds their port free.
    listens: bool = False
    #: The program's processes have a loopback of their own and no other network, where the host allows that; not with `listens`.
    private_network: bool = False
    #: the processes stay afterwards; None: they end with the job
    resident: Resident | None = None
    #: the node's accelerators that the program sees, by number; None: all
    devices: tuple[int, ...] | None = None

    @classmethod
    def module(cls, name: str, log: str, *words: str, resident: Resident | None = None) -> Self:
        """A module of this package, with an option --spec."""
        return cls((*own_program(name, *words), "--spec", SPEC), log, resident=resident)


def fill_placeholders(word: str, values: Mapping[str, object]) -> str:
    """Fill in the placeholders in a word of the user's trainer command, except `{spec}`."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", "" if value is None else str(value))
    return word


@dataclass(frozen=True, slots=True)
class Identity(JsonRecord):
    """Which work of which run a program does. In the spec's file these fields stand beside the spec's own ones."""

    run_id: str
    log_path: Path
    node_rank: int
    generation: int
    iteration: int
    incarnation: int = 1
    members: Sequence[int] = ()
    leader: int = 0
    #: the row's number and name
    phase: int = 0
    phase_name: str = ""
    #: the number of earlier failures of this iteration, the same on all nodes
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Spec(JsonRecord, Generic[R]):
    """What a program is told. A subclass adds its fields, and says with `launch` how its program is started.

    Every field of the report R has a default value; a dry run gives those.
    """

    launch: ClassVar[Launch]

    identity: Identity

    @classmethod
    def report_type(cls) -> type[R]:
        bases: tuple[Any, ...] = cls.__orig_bases__  # type: ignore[attr-defined]
        (kind,) = next(get_args(base) for base in bases if get_origin(base) is Spec)
        return kind  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, value: Payload) -> Self:
        return cls.converted({**value, "identity": value})

    def as_json(self) -> JsonObject:
        own = JsonRecord.as_json(self)
        return {**own.pop("identity"), **own}

    @classmethod
    def program(cls, work: Callable[[Self, Settings, ProgressWriter], R | None]) -> Main:
        """Make the `main` that `run_worker` calls: it reads the spec, calls `work`, and returns the report as JSON.

        `work` returns None in a process that writes no report: only one process of an update on each node writes it.
        """

        def main(spec: Payload, settings: Settings, progress: ProgressWriter) -> JsonObject | None:
            report = work(cls.from_json(spec), settings, progress)
            return None if report is None else report.as_json()

        return main


# --- merging ----------------------------------------------------------------------------------------------------------------


@ready
@dataclass(frozen=True, slots=True)
class MergeReport(JsonRecord):
    """What a merge says of its file (data/merge.py, AggregateReport)."""

    trajectories: int = 0
    groups: int = 0
    duplicates_dropped: int = 0
    bytes: int = 0
    reward_mean: float | None = None
    already_done: bool = False
    missing: Sequence[int] = ()
    damaged: Sequence[str] = ()
    unexpected: int = 0
    left_out: int = 0
    rolled_out_reward_mean: float | None = None
    unjudged: int = 0
    #: metrics by name: over all groups, of an evaluation, and the reward of each set of training tasks
    figures: Mapping[str, float | int | None] = field(default_factory=dict)
    #: the mean reward of each task's last group, by its number; None: no draw depends on it
    last_rewards: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class MergeSpec(Spec[MergeReport]):
    """What `fsbarrier.aggregate` is told."""

    launch = Launch.module("fsbarrier.aggregate", "helper.log", resident=Resident(HELPER))

    request: MergeRequest
    #: of an evaluation: the reward from which a trajectory counts as solved, by the name of the set ("" if there is only one)
    success: Mapping[str, float] | None = None
    #: the sets of training tasks of which the report tells the rewards, and the rewards so far if a draw depends on them
    sets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    last_rewards: Mapping[str, float] | None = None


# --- the batch --------------------------------------------------------------------------------------------------------------


@ready
@dataclass(frozen=True, slots=True)
class PrepareReport(JsonRecord):
    trajectories: int = 0
    groups: int = 0
    dropped_groups: int = 0
    #: by how many policy versions the trajectories are older than the policy to train
    staleness: float | None = None
    replayed: int = 0
    tokens: int = 0
    steps: int = 0
    reward_mean: float | None = None


@dataclass(frozen=True, slots=True)
class PrepareSpec(Spec[PrepareReport]):
    """What `fsbarrier.workers.prepare` is told."""

    launch = Launch.module("fsbarrier.workers.prepare", "helper.log", resident=Resident(HELPER))

    policy_version: int
    #: the folder of the policy to train
    model: Path
    #: the file to write
    batch: Path
    #: the files to draw the batch from, this iteration's merged file first
    merged: Sequence[Path]


@ready
@dataclass(frozen=True, slots=True)
class ExamplesReport(JsonRecord):
    trajectories: int = 0
    held_out: int = 0
    #: longer than engine.max_model_len
    cut_off: int = 0
    #: examples of which nothing to train on was left
    left_out: int = 0
    tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class ExamplesSpec(Spec[ExamplesReport]):
    """What `fsbarrier.workers.examples` is told."""

    launch = Launch.module("fsbarrier.workers.examples", "helper.log", resident=Resident(HELPER))

    policy_version: int
    #: the folder of the policy to train, with its tokenizer
    model: Path
    #: the file to write
    batch: Path
    #: the files of examples, and which of their examples to take; those of "test" are held out
    files: Mapping[str, Path]
    examples: Mapping[str, Sequence[int]]


# --- the update -------------------------------------------------------------------------------------------------------------


@ready
@dataclass(frozen=True, slots=True)
class UpdateReport(JsonRecord):
    """One node's update; the times are in seconds."""

    policy_version: int = 0
    #: by name (workers/update.py, `metrics`)
    metrics: Mapping[str, float | int | None] = field(default_factory=dict)
    max_tokens_per_micro_batch: int = 0
    device: str = ""
    distributed: str = ""
    #: why the weights are unchanged, or which older policy was trained
    note: str = ""
    trainer_state: str = ""
    #: whether it continued with the state kept in memory since the previous update
    went_on: bool = False
    seconds: float = 0.0
    load_s: float = 0.0
    work_s: float = 0.0
    save_s: float = 0.0
    #: of one process; the host's memory on a CPU
    memory_peak_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateSpec(Spec[UpdateReport]):
    """What `fsbarrier.workers.update` is told. phases/rl.py says how torchrun starts it."""

    launch = Launch.module("fsbarrier.workers.update", "update.log")

    batch: Path
    #: the folder of the policy to train, and its trainer state; None: start with a fresh optimizer
    model: Path
    trainer_state: Path | None
    #: the folder of policy version 0: the base of adapters (lora.rank), and a fallback
    first_model: Path
    #: the folder of the reference policy (algorithm.kl_coef, kl_in_reward); None: no reference policy
    reference: Path | None
    #: output folder of the new policy
    out: Path
    policy_version: int
    #: identity of the policy to train
    policy: str
    new_policy_version: int
    #: local folder for a copy of the new weights; None: no copy
    weights_dir: Path | None


# --- the trackers' program, which no row starts (run/tracking.py) ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrackSpec(JsonRecord):
    run_record: Path
    #: the descriptor of the daemon's socket: each message to the program is the number of a finished iteration, each answer a failure
    socket: int


# --- addresses of engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """A server of the policy, on this node or the user's own."""

    url: str
    api_key: str | None
    model: str | None


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a frozen engine is, as any OpenAI client takes it. `patience_s`: how long it may be gone; None: it is a server elsewhere."""

    base_url: str
    api_key: str
    model: str
    patience_s: float | None

    @property
    def root(self) -> str:
        """The base URL of vLLM's own routes."""
        return self.base_url.removesuffix("/v1")
