"""What a row may know: the facts of a node, its run and its iteration. A row reads them as `node.context` (fsbarrier/node.py).

All of it is typed; what the rows of phases/rl.py decide and report are the records of fsbarrier/decisions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsbarrier.decisions import BestPolicy, JsonRecord, MergeDecision, PublishDecision
from fsbarrier.errors import ProgramFailed, TooFewNodes, UsageError
from fsbarrier.protocol.facts import Join, Member, Payload
from fsbarrier.protocol.rows import Row
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.placement import Ranges, consecutive
from fsbarrier.specs import Identity

if TYPE_CHECKING:
    from fsbarrier.rundir.runrecord import TaskSource
    from fsbarrier.settings.sections import Settings

D = TypeVar("D", bound=JsonRecord)

#: among the engines that a join offers: the policy's, if it spans nodes; no frozen engine has this name
POLICY = ""


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
class PartOnDisk:
    """A part file and its durable groups, which are in its first `valid_bytes` bytes."""

    name: str
    #: the policy that rolled them out (`Context.policy_identity`)
    policy: str
    valid_bytes: int
    tasks: tuple[int, ...]
    #: those of `tasks` in whose groups the reward, the agent or every sample failed
    unjudged: frozenset[int] = frozenset()
    #: those of `tasks` in whose groups the rewards differ
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
    """Everything that a row may depend on.

    `reports`, `parts_of` and `claims_unsafe` read the shared directory. In a run each of them is patient by itself (fsbarrier/node.py).
    """

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
    phase: Row[Callable[[Any], object]]
    decisions: Mapping[str, Payload]
    joins: Mapping[int, Join] = field(default_factory=dict)
    #: phase name -> node rank -> the member's result in that earlier phase of this generation and iteration
    reports: Callable[[str], Mapping[int, Payload]] = field(default=lambda _: {})
    #: looks up the number of the newest generation; the node does so itself before it publishes
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
        return self.latest("weights_publish", PublishDecision)

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
        published, evaluated = self.published, self.find_decision("eval_rollout", MergeDecision)
        best = published.best if published is not None else None
        if self.decided("eval_rollout") is None:
            # The session before may have ended with the evaluation of this very policy.
            final = self.latest("iteration_end", MergeDecision)
            evaluated = final if final is not None and final.policy_version == self.policy_version else None
        reward, how = (evaluated.reward_mean, evaluated.sampled_how or "") if evaluated else (None, "")
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
        """This iteration's decision of a phase that must have one. Raises ProgramFailed if there is none."""
        decision = self.find_decision(phase_name, kind)
        if decision is None:
            raise ProgramFailed(f"phase {self.phase.name} needs the decision of {phase_name}, which has none")
        return decision

    def latest(self, phase_name: str, kind: type[D]) -> D | None:
        """The last decision of `phase_name`, in any iteration; None if there is none."""
        entry = self.decisions.get(phase_name)
        return kind.from_json(entry["value"]) if entry is not None and entry["value"] else None

    def reports_of(self, phase_name: str, kind: type[D]) -> dict[int, D]:
        """By node rank: the reports of the members that had something to do in this earlier phase, or before the leader in this one."""
        return {rank: kind.from_json(value) for rank, value in self.reports(phase_name).items() if value}

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
        groups = consecutive(self._holders(self.settings.placement.rollout), size)
        if not groups:
            raise TooFewNodes(f"engine.nodes={size}: fewer nodes are left that hold placement.rollout")
        return groups

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
        holders = {name: self.holders_of(name) for name in sorted(self.settings.engines)}
        return {name: held[self.node_rank] for name, held in holders.items() if self.node_rank in held}

    def holders_of(self, engine: str) -> dict[int, tuple[int, ...]]:
        """The members that have servers of a frozen engine, and their accelerators by number."""
        return self._holders(self.settings.engines[engine].placement or self.settings.placement.rollout)

    def _holders(self, placed: str) -> dict[int, tuple[int, ...]]:
        """The members that hold the role placed like this, and their accelerators. Raises TooFewNodes if there is none left."""
        holders = Ranges.parse(placed).holders(self.ranks, self.accelerators)
        if not holders:
            raise TooFewNodes(f"no node is left that holds {placed} (docs/accelerators.md, placement)")
        return holders

    @property
    def identity(self) -> Identity:
        """What a program is told about the work that it does: of which run, on which node, in which generation."""
        return Identity(
            run_id=self.run_id,
            log_path=self.paths.root,
            node_rank=self.node_rank,
            generation=self.generation,
            iteration=self.iteration,
            incarnation=self.incarnation,
            members=self.ranks,
            leader=self.leader,
            phase=self.phase.index,
            phase_name=self.phase.name,
            attempt=self.attempt,
        )
