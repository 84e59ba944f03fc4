"""What a program is: ordered phases, and for each phase small pure functions that say what is to be run.

A program is a table (see phases/rl.py). The state machine walks the table and never asks what a phase means; the job runner
carries out the work that the table's functions describe. Pure: these functions see a Context and return data.
The file is longer than others: it is all that one who writes a program has to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fsbarrier.decisions import BestPolicy, JsonRecord, NeededVersions, PublishDecision
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.protocol.facts import Join, Member, Payload
from fsbarrier.protocol.rows import Row, Slice, Table
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.paths import RunPaths

if TYPE_CHECKING:
    from fsbarrier.rundir.runrecord import TaskSource
    from fsbarrier.settings.sections import Settings

D = TypeVar("D", bound=JsonRecord)

#: the phases of an RL iteration, by number: what status and the journal promise to show
PHASE_NAMES = (
    "iteration_start",
    "train_assign",
    "train_rollout",
    "train_shards_ready",
    "train_aggregate",
    "eval_decide",
    "eval_rollout",
    "engine_stop",
    "batch_prepare",
    "update_ready",
    "update",
    "weights_publish",
    "engine_start",
    "iteration_end",
)
#: what `--rl-phase` may run alone
RL_SLICES = (
    Slice("rollout", "iteration_start", "eval_rollout", result="train_aggregate"),
    Slice("update", "engine_stop", "iteration_end", result="weights_publish"),
)


# --- work: what a phase asks its node to do -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """Nothing to run: `value` is the phase's result."""

    value: Payload


@dataclass(frozen=True, slots=True)
class Command:
    """A program to launch. `spec` is written to a private file; `{spec}` in argv and env is replaced by its path.

    A worker program writes its result to the path in spec["result"]; `result` False: the exit code alone decides.
    `log` names the file in the node's log folder. Among the spec's values `{engine}` becomes the addresses and keys of the local
    engines, a list, `{weights_dir}` the folder on this node for a copy of the new weights, or null, and `{distrusted}` the engines that
    the trainer found to sample otherwise in this iteration, pairs of node rank and replica.
    `extra`: what is known of the result beforehand. `event`: the name under which the result's plain values go to the journal.
    `keep`: its processes stay afterwards, for the next command that keeps them.
    """

    argv: tuple[str, ...]
    log: str
    spec: Payload = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    result: bool = True
    extra: Payload = field(default_factory=dict)
    event: str = ""
    keep: Keep | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """On each node this many processes of a command stay alive after it, with their memory (fsbarrier/supervision/kept_program.py).

    `formed`: the name of the processes that all nodes have kept from an earlier command (`Context.kept`), which take this one as their
    next job; "": a new program is started. A node keeps only one program, and none from one generation to the next.
    """

    processes: int
    formed: str = ""


@dataclass(frozen=True, slots=True)
class ServeWeights:
    """The local engines are all to serve `folder` as `policy_version`: started, reloaded in place, or left as they are.

    `threads`: how many they may compute with together, where they compute on a CPU.
    `policy`: the identity of the policy that the run published (`Context.policy_identity`); a folder that holds another is refused.
    "": any policy is served, if the folder's files are those of its own manifest.
    """

    folder: Path
    policy_version: int
    threads: int = 0
    policy: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseEngine:
    """The local engines are to give the accelerators' memory back (stop, sleep, or stay where there is none)."""


@dataclass(frozen=True, slots=True)
class OpenRendezvous:
    """The leader listens on a free port, so that the others can try its addresses before torchrun needs one of them.

    The result has "port". `loopback`: all nodes share this host, and nothing else is let in.
    """

    loopback: bool


@dataclass(frozen=True, slots=True)
class ProbeAddresses:
    """Connect to each of the leader's addresses; the result's "reached" names those that answered, in the order given."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Check a policy version's folder, then point the run at it. Of older versions keep the newest `keep`, every `keep_every`-th, and
    those that `needed` names.

    `needed` becomes a part of the result.
    `trained_on`: the iteration of the update that made this version. Trajectories that are `keep_trajectories` iterations older, or more,
    are removed (0: none are).
    """

    folder: Path
    policy_version: int
    keep: int
    trained_on: int = 0
    keep_trajectories: int = 0
    keep_every: int = 0
    needed: NeededVersions = field(default_factory=NeededVersions)


@dataclass(frozen=True, slots=True)
class PublishFile:
    """What this generation made in `source` becomes what people find under `name`, unless a newer generation exists."""

    source: Path
    name: Path


@dataclass(frozen=True, slots=True)
class Steps:
    """Several works, one after the other; their results are merged."""

    works: tuple[Work, ...]


Work = (
    Value
    | Command
    | ServeWeights
    | ReleaseEngine
    | OpenRendezvous
    | ProbeAddresses
    | PublishWeights
    | PublishFile
    | Steps
)


def fill_placeholders(word: str, values: Mapping[str, object]) -> str:
    """A word of the user's trainer command with its placeholders filled in; `{spec}` is left for later."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", "" if value is None else str(value))
    return word


# --- context: what the functions of a table may look at -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartOnDisk:
    """A part file of this iteration: which groups it durably holds, in its first `valid_bytes` bytes.

    `policy`: the policy that rolled them out, as `Context.policy_identity` names it.
    """

    path: str
    policy: str
    valid_bytes: int
    tasks: tuple[int, ...]
    #: of these, the tasks in whose groups the reward or the agent failed
    unjudged: frozenset[int] = frozenset()
    #: of these, the tasks of the groups whose rewards differ
    with_signal: frozenset[int] = frozenset()
    #: what the program said of the way in which they were sampled
    sampled_how: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that this iteration rolls out: its version and its folder ("model" below it is what vLLM loads)."""

    version: int
    model: Path
    trainer: Path | None


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that a phase's functions may depend on. Read-only."""

    run_id: str
    paths: RunPaths
    settings: Settings
    tasks: Mapping[str, TaskSource]
    model: Path | None
    node_rank: int
    incarnation: int
    members: tuple[Member, ...]
    leader: int
    generation: int
    iteration: int
    attempt: int
    phase: Row[Builder]
    decisions: Mapping[str, Payload]
    python: str
    joins: Mapping[int, Join] = field(default_factory=dict)
    #: phase name -> (node rank -> the member's result in that earlier phase of this generation and iteration)
    reports: Callable[[str], Mapping[int, Payload]] = field(default=lambda _: {})
    #: the number of the newest generation, freshly looked up; call it before anything becomes visible to others
    newest: Callable[[], int] = field(default=lambda: 0)
    #: part files that are on disk: split and iteration -> parts, oldest generation first
    parts_of: Callable[[str, int], tuple[PartOnDisk, ...]] = field(default=lambda split, iteration: ())
    #: why nodes must not take over tasks of each other on this mount; "" where they may
    claims_unsafe: Callable[[], str] = field(default=lambda: "")
    # on this node
    accelerators: int = 0
    cpus: int = 1
    #: the program that this node has kept and that lives (see Keep); "": none
    kept: str = ""

    def inventory(self, split: str) -> tuple[PartOnDisk, ...]:
        """Part files of this iteration that are on disk, oldest generation first."""
        return self.parts_of(split, self.iteration)

    @property
    def threads(self) -> int:
        """The CPUs of this host, shared among the members that run on it."""
        here = self.joins.get(self.node_rank)
        if self.cpus == 1 or here is None:
            return self.cpus
        sharing = [r for r in self.ranks if r in self.joins and self.joins[r].boot_id == here.boot_id]
        return max(1, self.cpus // max(1, len(sharing)))

    @property
    def published(self) -> PublishDecision | None:
        """The newest published policy version; None before the first."""
        value = self.latest("weights_publish")
        return PublishDecision.from_json(value) if value is not None else None

    @property
    def policy_version(self) -> int:
        """The version of the policy that this iteration rolls out: how many updates it has had."""
        published = self.published
        return published.policy_version if published is not None else 0

    @property
    def policy_identity(self) -> str:
        """Tells the policy of this iteration from every other, also from one of the same version, by its folder and the folder's digest.

        Example: after a run is taken back to an earlier iteration there are two policies of version 6. Trajectories of one must not
        pass for the other's.
        """
        published = self.published
        return "start" if published is None else checkpoints.identity(published.folder_name, published.digest)

    @property
    def policy(self) -> Policy:
        """The newest published policy; the run's model as version 0 before the first."""
        published = self.published
        if published is not None:
            folder = self.named_in(self.paths.checkpoints, published.folder)
            return Policy(published.policy_version, folder / "model", folder / "trainer")
        if self.model is None:
            raise UsageError(f"phase {self.phase.name}: this program needs a model, and the run has none")
        return Policy(0, self.model, None)

    @property
    def best_evaluated(self) -> BestPolicy | None:
        """The policy with the best evaluation so far by `checkpoint.best_by`. Each publication copies it from the one before.

        After a change of the settings, figures cannot be compared any more, and the search begins anew.
        """
        published, evaluated = self.published, self.decided("eval_rollout")
        best = published.needed.best if published is not None else None
        if evaluated is None:
            # The session before may have ended with the evaluation of this very policy.
            final = self.latest("iteration_end") or {}
            evaluated = final if final.get("policy_version") == self.policy_version else {}
        figure, how = self.settings.checkpoint.best_by, str(evaluated.get("sampled_how", ""))
        reward = evaluated.get(figure)
        if reward is None or (best is not None and best.is_comparable(figure, how) and reward <= best.reward):
            return best
        folder = published.folder_name if published is not None else None
        return BestPolicy(reward, self.policy_version, folder, figure, how)

    @property
    def reference(self) -> Path | None:
        """The model folder of the reference policy of the KL term; None without that term (`algorithm.kl_coef`)."""
        if not self.settings.algorithm.kl_coef:
            return None
        published = self.published
        name = published.needed.reference if published is not None else None
        return self.named_in(self.paths.checkpoints, name) / "model" if name else self.model

    def needed_beside(self, folder: Path, policy_version: int) -> NeededVersions:
        """The older versions that must be kept once `folder` is published as `policy_version`."""
        best = self.best_evaluated if self.settings.checkpoint.keep_best else None
        every = self.settings.algorithm.kl_reference_every if self.settings.algorithm.kl_coef else 0
        if not every:
            return NeededVersions(best)
        before = self.published.needed.reference if self.published is not None else None
        return NeededVersions(best, folder.name if policy_version % every == 0 else before or None)

    def named_in(self, folder: Path, said: object) -> Path:
        """The file in one of the run's folders that a record names by its name, or by its path on the node that made it.

        Only the name counts: no record leads out of the run, and where the run is mounted is each node's own affair.
        Raises ProgramFailed.
        """
        name = str(said).rpartition("/")[2]
        if name in ("", ".", "..") or "\0" in name:
            raise ProgramFailed(f"a record of this run names {said!r}, which is no file in {folder}")
        return folder / name

    def decided(self, phase_name: str) -> Payload | None:
        """What the leader published for `phase_name` in this iteration; None if it has not (yet)."""
        entry = self.decisions.get(phase_name)
        if entry is None or entry["iteration"] != self.iteration:
            return None
        value: Payload = entry["value"]
        return value

    def find_decision(self, phase_name: str, kind: type[D]) -> D | None:
        """`decided`, as the record that phases/rl.py wrote (fsbarrier/decisions.py); None where there is no decision."""
        value = self.decided(phase_name)
        return kind.from_json(value) if value else None

    def decision(self, phase_name: str, kind: type[D]) -> D:
        """The same, where the program's table says that there must be one. Raises ProgramFailed."""
        found = self.find_decision(phase_name, kind)
        if found is None:
            raise ProgramFailed(f"phase {self.phase.name} needs the decision of {phase_name}, which has none")
        return found

    def latest(self, phase_name: str) -> Payload | None:
        """What the leader last published for `phase_name`, in whichever iteration."""
        entry = self.decisions.get(phase_name)
        return None if entry is None else entry["value"]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple([m.rank for m in self.members])

    @property
    def weights(self) -> tuple[float, ...]:
        """The members' weights, in the order of `members`."""
        return tuple(self.settings.rank_weights[rank] for rank in self.ranks)

    def identity(self) -> dict[str, object]:
        """The fields that every worker program's spec begins with; the run's settings are added where it is written."""
        return {
            "run_id": self.run_id,
            "log_path": str(self.paths.root),
            "node_rank": self.node_rank,
            "members": list(self.ranks),
            "leader": self.leader,
            "generation": self.generation,
            "iteration": self.iteration,
            "phase": self.phase.index,
            "phase_name": self.phase.name,
            "attempt": self.attempt,
            "incarnation": self.incarnation,
        }

    def worker(self, name: str, log: str, **fields: object) -> Command:
        """A command that runs `fsbarrier.workers.<name>` with a spec of the identity and `fields`."""
        argv = (self.python, "-P", "-m", f"fsbarrier.workers.{name}", "--spec", "{spec}")
        return Command(argv, log, spec={**self.identity(), **fields})


# --- the table ------------------------------------------------------------------------------------------------------------

Builder = Callable[[Context], Work]


class Phase(Row[Builder]):
    """One row of a program, with the functions that build its work."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Program(Table[Builder]):
    """A program: its phases in order and its slices. `needs`: what a run of it must have ("model", "data").

    `imported`: the modules among its commands (`python -m MODULE`) that are imported once on each node and then forked for each start.
    Importing one must start no thread, and hold nothing that only one process may have.
    `serves_first`: the values of `--rl-phase` with which its nodes serve the policy (ServeWeights) before anything else; the engines load
    it while the nodes still join.
    """

    needs: frozenset[str] = frozenset()
    imported: tuple[str, ...] = ()
    serves_first: frozenset[str] = frozenset()
