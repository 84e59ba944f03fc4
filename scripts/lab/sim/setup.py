"""The setup of a schedule, and what is drawn from its seed: settings, timeouts, mounts and how often what fails."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal, cast

from fsbarrier.coordination.poll_intervals import PollIntervals
from fsbarrier.coordination.run_rules import make_rules, poll_intervals
from fsbarrier.errors import UsageError
from fsbarrier.loader import load_program
from fsbarrier.program import Program
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.membership import BEAT_S, Limits
from fsbarrier.protocol.state import Rules
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.value_types import RlPhase
from sim.disk import SimPath
from sim.store import Habits, ReadFaults

#: the kinds of faults: name -> description, for `python scripts/lab/simulate.py --help`
KINDS = {
    "stale": "listings, contents and absences are remembered by each host for seconds; equal modification times hide changes",
    "lost": "an operation is done, and an error returned",
    "errors": "an operation fails once with ESTALE or EIO",
    "garbled": "a read gives part of a new content and part of an old one",
    "handles": "a host cannot read a file that is there (ESTALE), for a moment or for up to 40 s",
    "outage": "every operation of a node fails for a while (EIO)",
    "room": "a disk is full for one node or all (ENOSPC, EDQUOT: names can still be changed), or folders become read-only (EROFS)",
    "busy": "each operation that changes something takes up to seconds, for one node or all",
    "slow": "an operation of a node, or the end of its work, hangs for a while, and soon its heartbeats stop",
    "crash": "a node's processes are killed, also between two operations; it is started again, or not",
    "power": "a host, or all of them at once, loses power: what was not flushed may be lost or torn",
    "pause": "a node is stopped (SIGSTOP, or its whole host) and wakes up later, maybe after it was given up",
    "leave": "a node is ended by a signal",
    "twin": "a node is started a second time elsewhere while the first one lives",
    "program": "a phase's program fails",
    "stop": "an operator asks the run to end, at the next safe point or at once",
    "unreadable": "records or weights are damaged, or of a foreign format, or one host can read no generation's, until that is mended",
    "version": "a node is started again with other code than the others'",
    "junk": "files that are not ours, and torn ones, lie in every directory of the protocol",
}
USUAL = frozenset(KINDS)
#: the setting that later starts change; its first value, and those of settings that nobody may change
CHANGED = "optimizer.lr"
FIRST_LR = 0.5
START_SETTINGS: Payload = {CHANGED: FIRST_LR, "tracker.names": [], "rollout.take_over": True}
SMALL: Payload = {
    **{"rollout.tasks": 6, "rollout.samples": 1, "eval.tasks": 3, "trainer.processes_per_node": 1},
    **START_SETTINGS,
}
ROOT = SimPath("/run")
PATHS = RunPaths(cast(Path, ROOT))
# Nobody is given up before a standstill is noted (`World._note_standstills`).
LIMITS = Limits(dead_s=15.0, join_timeout_s=60.0, rejoin_timeout_s=700.0)
# Some outages are longer.
OUTAGE_S = 25.0
# the shortest time that starting nodes wait for each other
HASTY_S = 4.0

FailurePolicy = Literal["shrink", "wait", "abort"]
Split = Literal["train-only", "eval-only"] | None
#: what a schedule draws its phases, its policy and its refills from
PHASES: tuple[RlPhase, ...] = ("both", "both", "both", "rollout", "update")
POLICIES: tuple[FailurePolicy, ...] = ("shrink", "shrink", "shrink", "shrink", "wait", "wait", "abort")
REFILLS = (0, 0, 0, 0, 0, 1, 2)
SPLITS: tuple[Split, ...] = (None, None, "train-only", "eval-only")
ITERATIONS = (1, 1, 1, 1, 2, 3)
#: how many iterations a generation lasts
LONGEST = (1, 1, 2, 100)
#: durations of programs
LENGTHS = ((0.02, 0.05, 0.2), (0.02, 0.05, 0.2), (0.1, 0.2, 1.0), (0.02, 0.05, 0.1, 0.1, 0.1, 9.0))


def parse_mix(text: str) -> frozenset[str]:
    """Parse `all`, `none`, or names of KINDS separated by commas. Raises UsageError."""
    if text in ("all", "none"):
        return USUAL if text == "all" else frozenset()
    names = frozenset(name.strip() for name in text.split(","))
    unknown = sorted(names - KINDS.keys())
    if unknown:
        raise UsageError(
            f"--faults {text}: unknown {', '.join(unknown)}; there are all, none, {', '.join(KINDS)}"
        )
    return names


@dataclass(frozen=True, slots=True)
class Setup:
    """The parameters of a schedule. Fields that are None are drawn from the seed."""

    nodes: int = 3
    #: 0: drawn
    iterations: int = 1
    mix: frozenset[str] = USUAL
    policy: FailurePolicy | None = None
    min_nodes: int | None = None
    phases: RlPhase | None = None
    # seconds between a node's heartbeats
    beat_s: float | None = None
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


def draw_choice(rng: Random, phases: RlPhase, nodes: int) -> dict[str, object]:
    """What users choose for a run, beside its phases and nodes. Every fourth run has what ships."""
    if rng.random() < 0.25:
        return {}
    return {
        "eval_interval": rng.choice((0, 1, 2, 5)),
        "rollout_split": rng.choice(SPLITS) if phases == "rollout" else None,
        "rollout.max_refills": rng.choice(REFILLS),
        "update.recency": rng.choice((1, 2, 2)),
        "trainer.keep": rng.choice(("auto", "process", "nothing")),
        "checkpoint.keep": rng.choice((1, 2, 3)),
        "checkpoint.keep_trajectories": rng.choice((0, 0, 1, 2)),
        **draw_placement(rng, nodes),
    }


def draw_placement(rng: Random, nodes: int) -> dict[str, object]:
    """Most nodes do everything. In other runs some train and some roll out, mostly ahead, or some do both; engines may span two nodes, and
    some nodes have a judge."""
    if nodes == 1 or rng.random() < 0.4:
        return {}
    ranks = [*range(nodes)]
    judges = rng.sample(ranks, rng.randint(1, nodes - 1)) if rng.random() < 0.4 else []
    rng.shuffle(ranks)
    cut = rng.randint(1, nodes - 1)
    rollout, update = ranks[:cut], ranks[cut:]
    apart = rng.random() < 0.7
    if not apart:
        # Each node has a role, or the run would be refused.
        update = [*{*update, *rng.sample(ranks, rng.randint(1, nodes))}]
    ahead = rng.choice(("", "ahead", "in flight")) if apart else ""
    spans = len(rollout) > 1 and ahead != "in flight" and rng.random() < 0.4
    return {
        "placement.rollout": _whole_nodes(rollout),
        "placement.update": _whole_nodes(update),
        "rollout.ahead": int(ahead != ""),
        "rollout.in_flight": ahead == "in flight",
        **({"engine.nodes": 2, "engine.tensor_parallel_size": 2} if spans else {}),
        **(
            {"engines.judge.model": "/judge", "engines.judge.placement": _whole_nodes(judges)}
            if judges
            else {}
        ),
    }


def _whole_nodes(ranks: Collection[int]) -> str:
    return "node:" + ",".join(map(str, sorted(ranks)))


@cache
def settings_and_rules(*chosen: tuple[str, object]) -> tuple[Settings, Rules]:
    """The settings of a small run, and the rules that follow from them."""
    settings = Settings().with_values({**SMALL, **dict(chosen)})
    return settings, make_rules(settings, program(), accelerators=0)


class Draw:
    """All that is drawn for one schedule before it begins. Without faults only what no setup says is drawn."""

    def __init__(self, seed: int, setup: Setup) -> None:
        rng = self.rng = Random(seed)
        #: of the processes' clocks, which must change nothing else
        self.clocks = Random(f"clocks {seed}")
        setup = self.setup = replace(setup, iterations=setup.iterations or rng.choice(ITERATIONS))
        mix, faulty = setup.mix, bool(setup.mix)
        self.beat_s = setup.beat_s or rng.choice((BEAT_S, 3.0, 4.0))
        phases = rng.choice(PHASES) if setup.phases is None else setup.phases
        chosen = (
            draw_choice(rng, phases, setup.nodes) if faulty else {"eval_interval": 2, "update.recency": 2}
        )
        policy = setup.policy or rng.choice(POLICIES)
        min_nodes = setup.min_nodes or rng.choice((1, 1, 1, min(2, setup.nodes)))
        chosen |= {"num_nodes": setup.nodes, "rank_weights": (1.0,) * setup.nodes, "min_nodes": min_nodes}
        chosen |= {"rl_phase": phases, "on_node_failure": policy}
        self.settings, rules = settings_and_rules(*chosen.items())
        longest = rng.choice(LONGEST) if faulty else rules.longest
        self.rules = replace(rules, limits=self._limits(), longest=longest)
        usual = poll_intervals(self.settings.with_values({"coordination.beat_s": self.beat_s}))
        self.intervals: PollIntervals = replace(
            usual, dead_s=LIMITS.dead_s, outage_s=OUTAGE_S, join_factor=3.0
        )
        self.lengths: tuple[float, ...] = setup.lengths or rng.choice(LENGTHS)
        self._draw_mounts(mix)
        #: of one operation of a node
        self.error_rate = rng.choice((0.0, 0.0, 0.002, 0.01))
        self.errors = [how for how, kind in (("lost", "lost"), ("error", "errors")) if kind in mix]
        self.error_rate *= bool(self.errors)
        programs = "program" in mix
        #: of one program, and a node where none works
        self.failure_rate = rng.choice((0.0, 0.0, 0.0, 0.01, 0.08)) * programs
        self.broken_node = rng.randrange(setup.nodes) if programs and rng.random() < 0.1 else None
        #: how often the nodes of a session will not fit together
        self.refusals = int(programs and rng.random() < 0.03)
        #: verifying a checkpoint takes as long as a program
        self.slow_checks = faulty and rng.random() < 0.5
        #: how much longer an update takes than other programs, so that a lost node is noticed during it
        self.training_s = rng.choice((0.0, 0.0, 6.0)) if faulty else 0.0
        #: each node keeps a copy of the newest weights
        self.copies_weights = rng.random() < 0.3 and self.settings.engine.nodes == 1
        #: how often all are started again after the run has ended
        self.sessions = int(faulty and self.settings.rollout_split is None and rng.random() < 0.12)

    def _limits(self) -> Limits:
        """With faults, sessions sometimes begin before all nodes are there."""
        rng, faulty = self.rng, bool(self.setup.mix)
        # A session may begin while members of the last one are still suspended.
        join_s = HASTY_S if faulty and rng.random() < 0.15 else LIMITS.join_timeout_s
        # A run with a range of nodes, some of which join later.
        last_call_s = rng.choice((0.0, 2.0, 10.0)) if faulty and rng.random() < 0.15 else None
        stagger_s = LIMITS.stagger_s * self.beat_s / BEAT_S
        return replace(LIMITS, join_timeout_s=join_s, last_call_s=last_call_s, stagger_s=stagger_s)

    def _draw_mounts(self, mix: Collection[str]) -> None:
        rng, self.habits, self.coarse_s = self.rng, Habits(), 0.0
        if "stale" in mix and rng.random() < 0.6:
            self.coarse_s = rng.choice((0.0, 0.0, 0.01, 1.0))
            self.habits = Habits(
                # An NFS client may cache a listing for a minute.
                listing_s=rng.choice((0.0, 0.5, 1.0, 3.0, rng.choice((3.0, 60.0)))),
                content_s=rng.choice((0.0, 0.5, 1.0, 2.0)),
                absence_s=rng.choice((0.0, 3.0, 30.0)),
                listing_frees=rng.random() < 0.7,
            )
        self.habits = self.setup.habits or self.habits
        garbled = rng.choice((0.0, 0.0, 0.02, 0.2)) if "garbled" in mix else 0.0
        handles = rng.choice((0.0, 0.0, 0.001, 0.01)) if "handles" in mix else 0.0
        self.reads = ReadFaults(rng, garbled, handles)
        self.order = rng.randrange(3)
        #: records are on the disk as bytes, not as the objects that were written
        self.in_bytes = rng.random() < 0.15
