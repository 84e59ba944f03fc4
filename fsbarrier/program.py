"""The types of a program: a table of phases, and pure functions that turn a Context into Work for each phase.

See phases/rl.py for an example. The state machine walks the table without knowing what a phase means, and the job runner
(run/work_kinds.py, with a table of all kinds) does the Work.

The file is longer than others, because it is everything that the author of a program has to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fsbarrier.decisions import BestPolicy, JsonRecord, PublishDecision
from fsbarrier.errors import ProgramFailed, TooFewNodes, UsageError
from fsbarrier.protocol.facts import Join, Member, Payload
from fsbarrier.protocol.rows import Row, Slice, Table
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.placement import Ranges, consecutive

if TYPE_CHECKING:
    from fsbarrier.rundir.runrecord import TaskSource
    from fsbarrier.settings.sections import Settings

D = TypeVar("D", bound=JsonRecord)

#: the phases of an RL iteration by number; status and the journal show these names
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
#: among the engines that a join offers: the policy's, if it spans nodes; no frozen engine has this name
POLICY = ""
#: the slices that `--rl-phase` can run alone
RL_SLICES = (
    Slice("rollout", "iteration_start", "eval_rollout", result="train_aggregate"),
    Slice("update", "engine_stop", "iteration_end", result="weights_publish"),
)


# --- work: what a phase asks a node to do -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """Nothing to do: `value` is the result, `events` are lines for the journal, objects with an "event" each."""

    value: Payload
    events: Sequence[Payload] = ()


#: the names of the resident processes that help an update or a rollout (fsbarrier/workers/helper.py), and of those that train
HELPER, TRAINER = "helper", "trainer"


@dataclass(frozen=True, slots=True)
class Command:
    """Launch a program.

    `spec` is written to a private file, whose path replaces `{spec}` in argv and env. In the spec's values, the node replaces
    `{engine}` with a list of the local engines' addresses and keys, `{engines}` with those of the frozen engines by name,
    `{log_dir}` with the folder of its logs, and `{weights_dir}` with the folder on this node for a copy of the new weights, or null.
    """

    argv: tuple[str, ...]
    #: the file in the node's log folder
    log: str
    spec: Payload = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    #: the program writes its result to the path in spec["result"]; False: only its exit code counts
    result: bool = True
    #: values that are added to the result
    extra: Payload = field(default_factory=dict)
    #: the journal's event with the result's plain values; "": none
    event: str = ""
    #: The program inherits the sockets of the last OpenRendezvous; $FSBARRIER_LISTENING names their descriptors, separated by commas. Any
    #: other program finds their port free.
    listens: bool = False
    #: the processes stay afterwards; None: they end with the job
    resident: Resident | None = None
    #: the node's accelerators that the program sees, by number; None: all
    devices: tuple[int, ...] | None = None
    #: what the local engines serve as soon as it is complete, without ending the program's requests; None: nothing new
    in_flight: ServeWeights | None = None


@dataclass(frozen=True, slots=True)
class Resident:
    """Processes of a node that stay, with their memory and what they have imported, for its next command with this name.

    All commands with one name have the same `env`. The process HELPER does the jobs of several programs, by calling the function `work` of
    the command's module. `processes`: their number on each node.

    `reuse`: None: take whichever are there, or else start some. For TRAINER, whose processes belong together on all nodes and stay for one
    era: the name of those that all nodes have from the last such command (`Context.kept`); "": start new ones.
    """

    name: str
    processes: int = 1
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The nodes of one engine (`engine.nodes`), its head first, by rank and incarnation; where the head is found."""

    nodes: tuple[tuple[int, int], ...]
    #: this node's place among them; 0: the head
    place: int
    addresses: tuple[str, ...]
    port: int
    key: str = field(repr=False)
    #: the row in which they are asked to serve, by its generation and iteration
    turn: tuple[int, int, int] = field(compare=False)


@dataclass(frozen=True, slots=True)
class ServeWeights:
    """Make all local engines serve `folder` as `policy_version`: start them, reload them in place, or leave them as they are.

    `devices`: the node's accelerators that they use, by number; None: all.
    `threads`: the number of CPU threads for all of them together, if they compute on a CPU.
    `policy`: the identity of the published policy (`Context.policy_identity`); a folder with another one is refused. "": any policy is
    served whose files match the folder's manifest.
    """

    folder: Path
    policy_version: int
    threads: int = 0
    policy: str = ""
    devices: tuple[int, ...] | None = None
    #: the nodes that share one engine with this one; None: each has its own
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class ServeFrozen:
    """Make this node's servers of the frozen engine `engines.NAME` serve its model. `devices`, `threads`: as in ServeWeights."""

    name: str
    threads: int = 0
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReleaseEngine:
    """Make the local engines free the accelerators' memory: they stop or sleep; without accelerators they stay. `frozen`: the names of
    the frozen engines that do so too."""

    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenRendezvous:
    """Listen on a free port of these addresses, so that the other nodes can test them before the update's program takes one over.

    The result has "port". If all addresses are loopback, only this host, which all nodes share, can connect.
    """

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeAddresses:
    """Connect to each of the leader's addresses. The result's "reached" lists those that answered, in the given order."""

    addresses: tuple[str, ...]
    #: text in a dry run
    port: int | str


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Check a policy version's folder, publish it, and clean up. The result is a decisions.PublishDecision."""

    folder: Path
    policy_version: int
    #: keep this many of the newest versions
    keep: int
    #: the iteration whose update made this version
    trained_on: int = 0
    #: remove trajectories that are at least this many iterations older; 0: none
    keep_trajectories: int = 0
    #: keep every n-th version; 0: no
    keep_every: int = 0
    #: the best version so far, which is kept too
    best: BestPolicy | None = None
    #: the identity of the version before (`Context.policy_identity`)
    previous: str = ""


@dataclass(frozen=True, slots=True)
class PublishFile:
    """Publish the file `source` under its public `name`, unless a newer generation exists."""

    source: Path
    name: Path


@dataclass(frozen=True, slots=True)
class Steps:
    """Do several works in order; their results are merged."""

    works: tuple[Work, ...]


Work = (
    Value
    | Command
    | ServeWeights
    | ServeFrozen
    | ReleaseEngine
    | OpenRendezvous
    | ProbeAddresses
    | PublishWeights
    | PublishFile
    | Steps
)


def fill_placeholders(word: str, values: Mapping[str, object]) -> str:
    """Fill in the placeholders in a word of the user's trainer command, except `{spec}`."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", "" if value is None else str(value))
    return word


# --- context: the input of the table's functions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartOnDisk:
    """A part file and its durable groups, which are in its first `valid_bytes` bytes."""

    name: str
    #: the policy that rolled them out (`Context.policy_identity`)
    policy: str
    valid_bytes: int
    tasks: tuple[int, ...]
    #: the tasks among these in whose groups the reward or the agent failed, or every sample
    unjudged: frozenset[int] = frozenset()
    #: the tasks among these in whose groups the rewards differ
    with_signal: frozenset[int] = frozenset()
    #: a digest of how they were sampled
    sampled_how: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that this iteration rolls out: its version, the model's folder, and the trainer state's (None: there is none)."""

    version: int
    model: Path
    trainer: Path | None


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that a phase's functions may depend on."""

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
    #: phase name -> node rank -> the member's result in that earlier phase of this generation and iteration
    reports: Callable[[str], Mapping[int, Payload]] = field(default=lambda _: {})
    #: looks up the number of the newest generation; call it before publishing anything
    newest: Callable[[], int] = field(default=lambda: 0)
    #: split and iteration -> the part files on disk, oldest generation first
    parts_of: Callable[[str, int], tuple[PartOnDisk, ...]] = field(default=lambda split, iteration: ())
    #: why nodes must not take over each other's tasks on this mount; "" if they may
    claims_unsafe: Callable[[], str] = field(default=lambda: "")
    # on this node
    accelerators: int = 0
    cpus: int = 1
    #: the name of the live processes that train (see Resident); "": none
    kept: str = ""

    def inventory(self, split: str) -> tuple[PartOnDisk, ...]:
        """The part files of this iteration, oldest generation first."""
        return self.parts_of(split, self.iteration)

    @property
    def threads(self) -> int:
        """This node's share of the host's CPUs, which all members on the host share."""
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
        return "start" if published is None else checkpoints.identity(published.folder, published.digest)

    @property
    def recent_policies(self) -> tuple[str, ...]:
        """The identities of the policies whose rollouts this iteration may train on: its own, and with `rollout.ahead` the one before."""
        published = self.published
        before = (published.previous,) if published is not None and published.previous else ()
        return (self.policy_identity, *(before if self.settings.rollout.ahead else ()))

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
        """The policy with the best mean reward in an evaluation so far. Each publication copies it from the one before.

        After a change of the settings, figures cannot be compared any more, and the search begins anew.
        """
        published, evaluated = self.published, self.decided("eval_rollout")
        best = published.best if published is not None else None
        if evaluated is None:
            # The session before may have ended with the evaluation of this very policy.
            final = self.latest("iteration_end") or {}
            evaluated = final if final.get("policy_version") == self.policy_version else {}
        reward, how = evaluated.get("reward_mean"), str(evaluated.get("sampled_how", ""))
        if reward is None or (best is not None and best.sampled_how == how and reward <= best.reward):
            return best
        folder = published.folder if published is not None else None
        return BestPolicy(reward, self.policy_version, folder, how)

    @property
    def reference(self) -> Path | None:
        """The model folder of the reference policy, the run's first model; None where no KL divergence from it is asked for."""
        algorithm = self.settings.algorithm
        return self.model if algorithm.kl_coef or algorithm.kl_in_reward else None

    def named_in(self, folder: Path, name: str) -> Path:
        """The path of a file in `folder` that a record names. Raises ProgramFailed for a name that leads out of it."""
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ProgramFailed(f"a record of this run names {name!r}, which is no file in {folder}")
        return folder / name

    def decided(self, phase_name: str) -> Payload | None:
        """The decision of `phase_name` in this iteration; None if there is none (yet)."""
        entry = self.decisions.get(phase_name)
        if entry is None or entry["iteration"] != self.iteration:
            return None
        value: Payload = entry["value"]
        return value

    def find_decision(self, phase_name: str, kind: type[D]) -> D | None:
        """The decision of `phase_name` in this iteration as a record of fsbarrier/decisions.py; None if there is none."""
        value = self.decided(phase_name)
        return kind.from_json(value) if value else None

    def decision(self, phase_name: str, kind: type[D]) -> D:
        """The same, but raises ProgramFailed if there is none."""
        found = self.find_decision(phase_name, kind)
        if found is None:
            raise ProgramFailed(f"phase {self.phase.name} needs the decision of {phase_name}, which has none")
        return found

    def latest(self, phase_name: str) -> Payload | None:
        """The last decision of `phase_name`, in any iteration."""
        entry = self.decisions.get(phase_name)
        return None if entry is None else entry["value"]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple([m.rank for m in self.members])

    @property
    def samplers(self) -> dict[int, tuple[int, ...]]:
        """The members that have the policy's engines, and their accelerators by number (`placement.rollout`)."""
        held = self._holders(self.settings.placement.rollout)
        return {rank: held[rank] for group in self.engine_groups for rank in group}

    @property
    def engine_groups(self) -> list[tuple[int, ...]]:
        """The members that share an engine (`engine.nodes`). The first of each group rolls out; those left over have no engine.

        Raises TooFewNodes if there is no group left.
        """
        size = self.settings.engine.nodes
        found = consecutive(self._holders(self.settings.placement.rollout), size)
        if not found:
            raise TooFewNodes(f"engine.nodes={size}: fewer nodes are left that hold placement.rollout")
        return found

    @property
    def span(self) -> Span | None:
        """The nodes that share an engine with this one, if engines span several."""
        if self.settings.engine.nodes == 1:
            return None
        group = next(ranks for ranks in self.engine_groups if self.node_rank in ranks)
        joins = [self.joins[rank] for rank in group]
        one_host = len({join.boot_id for join in joins}) == 1
        offer = joins[0].engines.get(POLICY, {"port": 0, "key": ""})
        return Span(
            tuple((join.rank, join.incarnation) for join in joins),
            group.index(self.node_rank),
            ("127.0.0.1",) if one_host else joins[0].addresses,
            int(offer["port"]),
            str(offer["key"]),
            (self.generation, self.iteration, self.phase.index),
        )

    @property
    def trainers(self) -> dict[int, tuple[int, ...]]:
        """The members that train, and their accelerators by number (`placement.update`)."""
        return self._holders(self.settings.placement.update)

    @property
    def frozen(self) -> dict[str, tuple[int, ...]]:
        """The frozen engines that have servers on this node, with their accelerators by number (`engines.NAME.placement`)."""
        found = {name: self.holders_of(name) for name in sorted(self.settings.engines)}
        return {name: held[self.node_rank] for name, held in found.items() if self.node_rank in held}

    def holders_of(self, engine: str) -> dict[int, tuple[int, ...]]:
        """The members that have servers of a frozen engine, and their accelerators by number."""
        return self._holders(self.settings.engines[engine].placement or self.settings.placement.rollout)

    def _holders(self, placed: str) -> dict[int, tuple[int, ...]]:
        """Raises TooFewNodes if no member is left that holds the role."""
        found = Ranges.parse(placed).holders(self.ranks, self.accelerators)
        if not found:
            raise TooFewNodes(f"no node is left that holds {placed} (docs/accelerators.md, placement)")
        return found

    def identity(self) -> dict[str, object]:
        """The fields that every spec has. The node adds the run's settings."""
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
        """A command that runs `fsbarrier.workers.<name>`, with `identity` and `fields` in its spec."""
        argv = (self.python, "-P", "-m", f"fsbarrier.workers.{name}", "--spec", "{spec}")
        return Command(argv, log, spec={**self.identity(), **fields})


# --- the table ------------------------------------------------------------------------------------------------------------

Builder = Callable[[Context], Work]


def build_work(build: Builder, context: Context) -> Work:
    """The work that a row's function describes. Raises TypeError if it describes none, and whatever the function raises."""
    work: object = build(context)
    if not isinstance(work, Work):
        # A callable object has no name.
        name = getattr(build, "__name__", type(build).__name__)
        raise TypeError(f"{name} returned {type(work).__name__}, which is no work (Value, Command, ...)")
    return work


class Phase(Row[Builder]):
    """One row of a program; `each` and `leader` are functions that build the work."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Program(Table[Builder]):
    """A program: its phases in order, and its slices."""

    #: what a run must have: a "model"; files in the data path, of tasks ("data") or of "examples" for supervised fine-tuning
    needs: frozenset[str] = frozenset()
    #: by dotted name: settings where the user chooses none, and those that cannot be chosen
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def reads_data(self) -> bool:
        """Whether a run must have a data path."""
        return not self.needs.isdisjoint({"data", "examples"})
