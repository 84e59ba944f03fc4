"""The setup of a schedule: nodes, faults, settings, and foreign files in its directories."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, cast

from fsbarrier.coordination.run_rules import make_rules
from fsbarrier.loader import load_program
from fsbarrier.program import Program
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Join, Payload
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Rules
from fsbarrier.protocol.timing import BEAT_S
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import (
    CheckpointSettings,
    EvalSettings,
    RolloutSettings,
    Settings,
    TrainerSettings,
    UpdateSettings,
)
from fsbarrier.settings.value_types import RlPhase
from fsbarrier.sim import faults
from fsbarrier.sim.disk import Disk, SimPath
from fsbarrier.sim.store import Habits

#: the setting that later starts change; its first value, and those of settings that nobody may change
CHANGED = "optimizer.lr"
FIRST_LR = 0.5
START_SETTINGS: Payload = {CHANGED: FIRST_LR, "tracker.names": [], "rollout.take_over": True}
ROOT = SimPath("/run")
PATHS = RunPaths(cast(Path, ROOT))
# the shortest time that starting nodes wait for each other
HASTY_S = 4.0

FailurePolicy = Literal["shrink", "wait", "abort"]
#: what a schedule draws its phases, its policy and its refills from
PHASES: tuple[RlPhase, ...] = ("both", "both", "both", "rollout", "update")
POLICIES: tuple[FailurePolicy, ...] = ("shrink", "shrink", "shrink", "shrink", "wait", "wait", "abort")
REFILLS = (0, 0, 0, 0, 0, 1, 2)
SPLITS: tuple[Literal["train-only", "eval-only"] | None, ...] = (None, None, "train-only", "eval-only")
ITERATIONS = (1, 1, 1, 1, 2, 3)
#: how many iterations a generation lasts
LONGEST = (1, 1, 2, 100)


@dataclass(frozen=True, slots=True)
class Setup:
    """The parameters of a schedule. Fields that are None are drawn from the seed."""

    nodes: int = 3
    #: 0: drawn
    iterations: int = 1
    mix: frozenset[str] = faults.USUAL
    policy: FailurePolicy | None = None
    min_nodes: int | None = None
    phases: RlPhase | None = None
    # seconds between a node's heartbeats
    beat_s: float | None = None
    limits: Limits = field(
        default_factory=lambda: Limits(dead_s=15.0, join_timeout_s=60.0, rejoin_timeout_s=40.0)
    )
    # Some outages are longer.
    outage_s: float = 25.0
    # durations of a working phase in seconds, of which one is drawn each time
    lengths: tuple[float, ...] | None = None
    habits: Habits | None = None
    # every process has its own clock
    clocks: bool = True
    # `fsbarrier.join` instead of runs
    groups: bool = False


@cache
def program() -> Program:
    return load_program("rl")


class Choice(NamedTuple):
    """What users choose for a run, beside its phases and nodes. The values here are those that ship."""

    eval_interval: int = Settings().eval_interval
    split: Literal["train-only", "eval-only"] | None = None
    refills: int = 0
    recency: int = UpdateSettings().recency
    trainer_kept: Literal["auto", "process", "nothing"] = "auto"
    versions_kept: int = CheckpointSettings().keep
    trajectories_kept: int = 0


def draw_choice(dice: Random, phases: RlPhase) -> Choice:
    """Every fourth run has what ships."""
    if dice.random() < 0.25:
        return Choice()
    return Choice(
        dice.choice((0, 1, 2, 5)),
        dice.choice(SPLITS) if phases == "rollout" else None,
        dice.choice(REFILLS),
        dice.choice((1, 2, 2)),
        dice.choice(("auto", "process", "nothing")),
        dice.choice((1, 2, 3)),
        dice.choice((0, 0, 1, 2)),
    )


@cache
def settings_and_rules(
    nodes: int, phases: RlPhase, policy: FailurePolicy, min_nodes: int, chosen: Choice
) -> tuple[Settings, Rules]:
    """The settings of a small run, and the rules that follow from them."""
    settings = Settings(
        num_nodes=nodes,
        min_nodes=min_nodes,
        rank_weights=(1.0,) * nodes,
        on_node_failure=policy,
        rl_phase=phases,
        rollout_split=chosen.split,
        eval_interval=chosen.eval_interval,
        rollout=RolloutSettings(tasks=6, samples=1, max_refills=chosen.refills),
        eval=EvalSettings(tasks=3),
        trainer=TrainerSettings(processes_per_node=1, keep=chosen.trainer_kept),
        update=UpdateSettings(recency=chosen.recency),
        checkpoint=CheckpointSettings(keep=chosen.versions_kept, keep_trajectories=chosen.trajectories_kept),
    ).with_values(START_SETTINGS)
    return settings, make_rules(settings, program())


def draw_rules(seed: int, setup: Setup, rng: Random, dice: Random, beat_s: float) -> tuple[Settings, Rules]:
    """Draw the settings and the rules of one schedule."""
    policy = rng.choice(POLICIES) if setup.policy is None else setup.policy
    phases = rng.choice(PHASES) if setup.phases is None else setup.phases
    limits = _draw_limits(setup, dice, Random(f"last call {seed}"))
    limits = replace(limits, stagger_s=limits.stagger_s * beat_s / BEAT_S)
    min_nodes = setup.min_nodes or rng.choice((1, 1, 1, min(2, setup.nodes)))
    chosen = (
        draw_choice(Random(f"chosen {seed}"), phases) if setup.mix else Choice(eval_interval=2, recency=2)
    )
    settings, rules = settings_and_rules(setup.nodes, phases, policy, min_nodes, chosen)
    longest = Random(f"longest {seed}").choice(LONGEST) if setup.mix else rules.longest
    return settings, replace(rules, limits=limits, longest=longest)


def _draw_limits(setup: Setup, dice: Random, calls: Random) -> Limits:
    """The timeouts of one schedule. With faults, sessions sometimes begin before all nodes are there."""
    # A session may begin while members of the last one are still suspended.
    join_s = HASTY_S if setup.mix and dice.random() < 0.15 else setup.limits.join_timeout_s
    # A run with a range of nodes, some of which join later.
    last_call_s = calls.choice((0.0, 2.0, 10.0)) if setup.mix and calls.random() < 0.15 else None
    return replace(setup.limits, join_timeout_s=join_s, last_call_s=last_call_s)


def litter(disk: Disk, rng: Random) -> None:
    """Put foreign and torn files into the directories."""
    coordination = ROOT / "coordination"
    torn = encode(Join(0, 99, "?", 1, "?"))[:40]
    disk.junk(coordination / "joins", "node-0000.inc-0099.json", torn)
    disk.junk(coordination / "joins", ".nfs0000000000a1", b"")
    disk.junk(coordination / "generations", "gen-000001.json.swp", b"\0" * 64)
    disk.junk(coordination / "generations", "lost+found", b"")
    disk.junk(coordination / "beats", "node-0001.inc-0001.json~", b"x")
    disk.junk(coordination / "beats", "node-0000.inc-0099.json", rng.randbytes(32))
    disk.junk(coordination / "stops", "000001.json", b"")
    disk.junk(coordination / "gen-000001" / "p99-somebodys", "notes", b"x")
