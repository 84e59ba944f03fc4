"""How long a rollout phase takes with a node that is slower than its weight says: fixed shares, take-over, and the ideal.

`python scripts/lab/bench_take_over.py --speeds 1,1,0.333` starts the toy program's rollout once for each node, twice: its tasks take
their time and nothing else, so the difference is who did them. The claims are real files in a real directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsbarrier.protocol.assign import split_by_weight
from fsbarrier.rollouts.rollout_spec import RolloutRound, RolloutSpec
from fsbarrier.rollouts.samples import Sampling
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import Identity
from fsbarrier.trajectories import scan_rank_file
from fsbarrier.workers.toy import ToyRollout

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """One phase: each node's result (with its `seconds` of work), and the tasks in the parts, in the order of the nodes."""

    results: list[dict[str, Any]]
    tasks: list[int]

    @property
    def seconds(self) -> float:
        """The last node's."""
        return max(float(result["seconds"]) for result in self.results)

    @property
    def over_ideal(self) -> float:
        """How many times as long as if these nodes, as fast as each was, had all ended at the same moment."""
        rates = sum(float(result["groups"] / result["seconds"]) for result in self.results)
        return self.seconds * rates / len(self.tasks)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=300, help="tasks of the phase")
    parser.add_argument("--phase-s", type=float, default=10.0, help="seconds that a node's share should take")
    parser.add_argument("--speeds", default="1,1,0.333", help="of each node, beside what its weight says")
    parser.add_argument("--weights", default="", help="of each node (default: all equal)")
    parser.add_argument(
        "--dir", type=Path, default=None, help="the filesystem to measure (default: the temporary one)"
    )
    args = parser.parse_args()
    speeds = [float(word) for word in args.speeds.split(",")]
    weights = [float(word) for word in args.weights.split(",")] if args.weights else [1.0] * len(speeds)
    rates = [weight * speed for weight, speed in zip(weights, speeds, strict=True)]
    ideal = args.phase_s * sum(weights) / sum(rates)
    for name, take_over in (("fixed shares", False), ("take-over", True)):
        with tempfile.TemporaryDirectory(prefix="bench-take-over-", dir=args.dir) as folder:
            outcome = roll_out(Path(folder), args.tasks, args.phase_s, speeds, weights, take_over=take_over)
        counts = "/".join(str(result["groups"]) for result in outcome.results)
        print(
            f"{name:13} {outcome.seconds:7.2f} s  {outcome.seconds / ideal:5.2f} x the ideal of the speeds given, "
            f"{outcome.over_ideal:.3f} x that of the speeds reached; groups {counts}"
        )
        if claims := sum(result["claims"] for result in outcome.results):
            print(f"{'':13} {claims} claims")
    print(f"{'ideal':13} {ideal:7.2f} s")
    return 0


def roll_out(
    folder: Path,
    tasks: int,
    seconds: float,
    speeds: Sequence[float],
    weights: Sequence[float],
    *,
    take_over: bool,
    **changes: Any,
) -> Outcome:
    """One phase of as many nodes as there are speeds, each a process of its own. `changes`: fields of the specs."""
    shares = split_by_weight(range(tasks), weights)
    children = []
    for rank, speed in enumerate(speeds):
        spec = toy_spec(folder, rank, shares, seconds=seconds, speed=speed)
        spec["rollout"] |= {"fixed_shares": "" if take_over else "as asked for", **changes}
        file = folder / f"spec-{rank}.json"
        file.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "fsbarrier.workers.toy", "rollout", "--spec", str(file)]
        children.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
    if any([child.wait() for child in children]):
        raise SystemExit("a toy rollout failed; what it says is above")
    files = [folder / f"result-{rank}.json" for rank in range(len(speeds))]
    results = [json.loads(file.read_text())["report"] for file in files]
    rank_files = sorted((folder / "train_trajectories").glob("*.checkpoint"))
    groups = [group for file in rank_files for group in scan_rank_file(file).groups]
    return Outcome(results, [group.task_index for group in groups])


def toy_spec(
    folder: Path, rank: int, shares: Sequence[Sequence[int]], *, seconds: float, speed: float
) -> dict[str, Any]:
    """What the toy program's rollout is told on node `rank`."""
    name = f"train_trajectories.pt.iteration1_rank_{rank}.checkpoint"
    identity = Identity("bench", folder, rank, generation=1, iteration=1)
    rollout = RolloutSpec(
        identity,
        split="train",
        policy_version=0,
        policy="start",
        shares=dict(enumerate(shares)),
        fixed_shares="",
        claims=folder / "claims",
        old_claims=[],
        completion_threshold=1.0,
        grace_s=0.0,
        there=0,
        keep=None,
        part=folder / "train_trajectories" / f"{name}.g0001i0001.part",
        checkpoint=folder / "train_trajectories" / name,
        rounds=[RolloutRound([task for share in shares for task in share], {}, Sampling(1, 1.0, 1.0, -1, 1))],
    )
    return {
        **ToyRollout(identity, rollout, seconds, speed).as_json(),
        "settings": Settings().as_json(),
        "result": str(folder / f"result-{rank}.json"),
        "progress": str(folder / f"progress-{rank}.json"),
    }


if __name__ == "__main__":
    sys.exit(main())
