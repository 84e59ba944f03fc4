"""The spec of a rollout program, written by phases/rl.py: its tasks, end conditions and output paths.

Its rounds: the tasks of a round share sampling parameters and start after those of the previous round. A training rollout has one round,
plus one per possible refill. An evaluation has a round for each evaluation set, with that set's task file and sampling parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fsbarrier.data.group_stats import GroupStats
from fsbarrier.data.rank_file_writer import RankFileWriter
from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.decisions import JsonRecord, RolloutReport
from fsbarrier.engine.answer_format import format_of
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.protocol.assign import LOTS
from fsbarrier.protocol.codec import ready
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.claims import Claims, EarlyEnd, Refills, remove_old
from fsbarrier.rollouts.pictures import placeholders
from fsbarrier.rollouts.renderer import Renderer
from fsbarrier.rollouts.samples import Sampling, SamplingServer
from fsbarrier.rollouts.sharing import file_of
from fsbarrier.rundir.names import GENERATION, IMAGES_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import EngineAddress, Launch, PolicyEngine, Resident, Spec
from fsbarrier.store import files
from fsbarrier.store.retry import patiently

#: A request fails after this many seconds without output from the engine; it is tried TRIES times in total, with pauses.
REQUEST_TIMEOUT_S, TRIES = 600.0, 4


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of trajectories, stored in the part file's header and in the metadata of the finished file."""

    run_id: str
    split: str
    iteration: int
    generation: int
    node_rank: int
    policy_version: int
    #: the policy's identity, as in `Context.policy_identity`
    policy: str
    #: a digest of everything that determines how tasks are answered
    sampled_how: str = ""


@dataclass(frozen=True, slots=True)
class RolloutRound:
    """One round: its tasks on all nodes, each task file with the number of its first task, and how the tasks are sampled."""

    tasks: Sequence[int]
    files: Mapping[str, int]
    sampling: Sampling
    #: the name of the evaluation set, if there are several
    eval_set: str = ""


@ready
@dataclass(frozen=True, slots=True)
class RolloutOutcome(JsonRecord):
    """The program's output: its report, and events about environments for the journal."""

    report: RolloutReport = field(default_factory=RolloutReport)
    events: Sequence[JsonObject] = ()


@dataclass(frozen=True, slots=True)
class RolloutSpec(Spec[RolloutOutcome]):
    """One node's work in one rollout phase, for `fsbarrier.workers.rollout`."""

    launch = Launch.module("fsbarrier.workers.rollout", "rollout.log", resident=Resident("rollout"))

    split: str
    policy_version: int
    #: the policy's identity, as in `Context.policy_identity`
    policy: str
    #: the tasks with which each node begins, by rank
    shares: Mapping[int, Sequence[int]]
    #: why nodes may not take over tasks from each other; "" if they may
    fixed_shares: str
    #: the folder of the claims of this phase, and those of the previous iteration
    claims: Path
    old_claims: Sequence[Path]
    #: the share of the tasks that is enough; 1: wait for all tasks
    completion_threshold: float
    grace_s: float
    #: number of groups done by an older generation
    there: int
    #: maximum number of groups that the merge keeps; None: all
    keep: int | None
    part: Path
    #: final path of the finished part
    checkpoint: Path
    #: the rounds after the first are refills, and the phase may end after any round: the number of groups with signal from an older
    #: generation, by round; None: all rounds take place
    refills: Sequence[int] | None = None
    #: a digest of everything that determines how tasks are answered
    sampled_how: str = ""
    rounds: Sequence[RolloutRound] = ()
    #: the policy's folder; None: the model is not needed
    model: Path | None = None
    #: the servers of the policy, and the frozen engines by name
    engine: Sequence[PolicyEngine] = ()
    engines: Mapping[str, EngineAddress] = field(default_factory=dict)
    #: whether the engines may get new weights during the rollout
    in_flight: bool = False
    #: the folder for the logs of environments
    log_dir: Path = Path()

    @property
    def tasks(self) -> Sequence[int]:
        """This node's share."""
        return self.shares[self.identity.node_rank]

    @property
    def expected(self) -> list[int]:
        """The tasks of all nodes, in the order in which they are begun."""
        return [task for rollout_round in self.rounds for task in rollout_round.tasks]

    @property
    def origin(self) -> Origin:
        identity = self.identity
        return Origin(
            identity.run_id,
            self.split,
            identity.iteration,
            identity.generation,
            identity.node_rank,
            self.policy_version,
            self.policy,
            self.sampled_how,
        )

    @property
    def images(self) -> Path:
        """The folder of the images that the policy sees, beside the part file."""
        return self.part.with_name(IMAGES_FOLDER.build(self.split, self.identity.iteration))

    @property
    def within_reach(self) -> list[int]:
        """The tasks that this node may have to do."""
        shares = [self.tasks] if self.fixed_shares else self.shares.values()
        return [task for share in shares for task in share]

    def servers(self, settings: Settings) -> list[SamplingServer]:
        """The engines to sample from, with timeouts and retries."""
        banned = placeholders(self.model)
        rollout = settings.rollout
        marked = rollout.named_renderer is None
        seed = ":".join(str(part) for part in (settings.rollout.seed, self.identity.iteration, self.split))
        return [
            SamplingServer(
                url=engine.url,
                api_key=engine.api_key or "",
                model=engine.model or "",
                timeout_s=REQUEST_TIMEOUT_S,
                tries=TRIES,
                template_arguments=settings.rollout.template_arguments,
                banned=banned,
                stop=settings.rollout.stop,
                seed=seed if settings.rollout.reproducible else "",
                in_flight=self.in_flight,
                thoughts=format_of(self.model, rollout.reasoning_parser) if marked else None,
                max_thinking_tokens=settings.rollout.max_thinking_tokens,
            )
            for engine in self.engine
        ]

    def renderer(self, settings: Settings) -> Renderer | None:
        """What reads answers and appends turns instead of the server's parsers and chat template, if anything does. Raises UsageError."""
        name = settings.rollout.named_renderer
        if name is None or self.model is None:
            return None
        return Renderer(name, self.model, settings.rollout.template_arguments)

    def open_claims(self, tasks: Collection[int] | None = None, number: int = 0) -> Claims:
        """The claims on `tasks` (None: all), the tasks of round `number`. Logs the reason if this node may not take over tasks. Raises
        StoreError."""
        if self.fixed_shares and not number:
            print(f"this node only does its own share: {self.fixed_shares}", flush=True)
        alone = self.fixed_shares or len(self.shares) == 1
        return Claims(
            {
                rank: share if tasks is None else [task for task in share if task in tasks]
                for rank, share in self.shares.items()
            },
            self.identity.node_rank,
            folder=None if alone else self.claims,
            incarnation=self.identity.incarnation,
            first_lot=number * LOTS,
        )

    def remove_old_claims(self) -> None:
        """Remove this node's claims of the previous iteration, which all nodes have left."""
        for folder in self.old_claims:
            remove_old(folder, self.identity.node_rank)

    def open_early_end(self) -> EarlyEnd | None:
        """The early-end condition of the phase; None if it always waits for all tasks. Raises OSError."""
        if self.completion_threshold >= 1:
            return None
        need = math.ceil(self.completion_threshold * len(self.expected)) - self.there
        return EarlyEnd(self.claims, self.identity.node_rank, need, self.grace_s)

    def open_refills(self) -> Refills | None:
        """The refill decision; None if all rounds take place unconditionally. Raises StoreError."""
        if self.refills is None:
            return None
        assert self.keep is not None
        ranks = [rank for rank, share in self.shares.items() if share]
        return Refills(self.claims, self.identity.node_rank, ranks, self.refills, self.keep)

    def header(self) -> dict[str, object]:
        """The part file's header. `expected`: lets a merge by hand name the tasks of a node that left no file."""
        keep = {"keep": self.keep} if self.keep else {}
        rounds = (
            {}
            if self.refills is None
            else {"rounds": [len(rollout_round.tasks) for rollout_round in self.rounds]}
        )
        return {**asdict(self.origin), "expected": self.expected, **keep, **rounds}

    def publish_part(self) -> None:
        """Link the finished part to its final name. Raises OSError, and ProgramFailed if a newer generation exists.

        Example: this node's host was suspended and its rank was restarted elsewhere. The name then belongs to the new start's results.
        """

        def last_look() -> None:
            newest = max(
                GENERATION.parse_all(PosixStore().names(RunPaths(self.identity.log_path).generations)),
                default=0,
            )
            if newest > self.identity.generation:
                raise ProgramFailed(
                    f"generation {self.identity.generation} has ended; the run is in generation {newest}"
                )

        patiently(lambda: files.link(self.part, self.checkpoint, last_look))

    def report(
        self, written: RankFileWriter, claims: Sequence[Claims], *, ended_early: bool
    ) -> RolloutReport:
        """The node's report: the contents of the finished part, and the take-over statistics of all rounds."""
        stats = GroupStats.total(group.stats for group in written.groups)
        return RolloutReport(
            part=self.part.name,
            bytes=written.valid_bytes,
            groups=len(written.groups),
            trajectories=stats.trajectories,
            reward_mean=stats.reward_mean,
            tasks=[group.task_index for group in written.groups],
            ended_early=ended_early,
            taken_over=sum(len(of_round.taken_over) for of_round in claims),
            claims=sum(of_round.made for of_round in claims),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `tasks`: its task numbers on all nodes; `known`: the tasks that this node may have to do."""

    tasks: frozenset[int]
    known: Mapping[int, Task]
    sampling: Sampling

    @property
    def samples(self) -> int:
        return self.sampling.samples


def read_rounds(rounds: Sequence[RolloutRound], within_reach: Collection[int]) -> list[Round]:
    """The rounds of a spec with their tasks. Raises UsageError."""
    here = frozenset(within_reach)
    places = {
        task: file_of(task, rollout_round.files)
        for rollout_round in rounds
        for task in here.intersection(rollout_round.tasks)
    }
    indices = defaultdict[str, set[int]](set)
    for task, (path, first) in places.items():
        indices[path].add(task - first)
    # Read each file only once, because ten rounds may share a large one.
    tasks_of = {path: read_tasks(Path(path), wanted).tasks for path, wanted in indices.items()}
    known = {
        task: replace(tasks_of[path][task - first], index=task) for task, (path, first) in places.items()
    }
    return [_round(rollout_round, known) for rollout_round in rounds]


def _round(rollout_round: RolloutRound, known: Mapping[int, Task]) -> Round:
    sampling = rollout_round.sampling
    if sampling.samples > 1 and sampling.temperature == 0:
        raise UsageError(
            f"{sampling.samples} samples per task at temperature 0 would be identical; use 1 sample or a temperature above 0"
        )
    own = {
        task: replace(known[task], eval_set=rollout_round.eval_set)
        for task in rollout_round.tasks
        if task in known
    }
    return Round(frozenset(rollout_round.tasks), own, sampling)
