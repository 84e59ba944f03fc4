"""Shows that a task is learned: `python scripts/learning_curve.py [--task demo] [--seeds 0,1,2] [--nodes 3] [--out DIR] [key=value ...]`.

`--beside rollout.ahead=1` runs each seed once more with that setting, and compares the means of both by sample and by second:
`python scripts/learning_curve.py --nodes 2 --beside rollout.ahead=1 placement.rollout=node:1 placement.update=node:0`.

For each seed a tiny model is made and warmed up, and the whole product runs on it: real vLLM servers, rollouts, torchrun updates.
Prints the held-out reward of each policy version and says whether it rose from about 0.25 to above 0.75 (exit code 1 if not).
About four minutes a seed on two quiet cores.

Tasks: `demo`, the built-in one (demo_model.py); `pictures`, of which colour and how many squares are (picture_model.py); `blind`, the same
without the pictures, which nobody can learn: there the reward must stay below 0.4.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from fsbarrier.data import demo_tasks  # noqa: E402
from fsbarrier.rundir.journal import read_events  # noqa: E402

START_AT_MOST, END_AT_LEAST = 0.40, 0.75


# The script that makes each task, with its arguments; and the settings.
PICTURES = {
    "rollout.tasks": 64,
    "rollout.samples": 16,
    "rollout.max_tokens": 4,
    "engine.max_model_len": 256,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "cosine",
    "optimizer.decay_steps": 128,
    "trainer.minibatch": 256,
    # The features of an untrained vision encoder tell colours, but hardly how many squares there are.
    "trainer.freeze": "none",
    "eval_interval": 5,
    "iterations": 16,
}
TASKS: Mapping[str, tuple[Sequence[str], Mapping[str, object]]] = {
    "demo": (["demo_model.py"], demo_tasks.DEMO_SETTINGS),
    "pictures": (["picture_model.py"], PICTURES),
    "blind": (["picture_model.py", "--blind"], PICTURES),
}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@dataclass(frozen=True)
class Evaluated:
    """One policy version's held-out reward. `samples`: that it has learned from; `seconds`: since the first evaluation."""

    samples: int
    seconds: float
    reward: float


def run(
    kind: str, seed: int, nodes: int, folder: Path, further: list[str], name: str = ""
) -> list[Evaluated]:
    """With these further settings, the policy versions of one run that were evaluated. `name`: a part of its folder's name."""
    task, log_path = folder / f"task-seed{seed}", folder / f"run-seed{seed}{name}"
    (script, *arguments), chosen = TASKS[kind]
    make = [
        sys.executable,
        str(REPO / "scripts" / script),
        "--out",
        str(task),
        "--seed",
        str(seed),
        *arguments,
    ]
    if not task.exists():
        subprocess.run(make, check=True)
    flags = [
        "--nodes",
        str(nodes),
        "--log-path",
        str(log_path),
        "--data-path",
        str(task),
        "--model",
        str(task / "model"),
    ]
    settings = [f"{key}={value}" for key, value in chosen.items() if key != "iterations"]
    iterations = ["--iterations", str(chosen["iterations"])]
    command = [
        sys.executable,
        "-m",
        "fsbarrier",
        "launch",
        "local",
        *flags,
        *iterations,
        *settings,
        f"rollout.seed={seed}",
        *further,
    ]
    subprocess.run(command, check=True, cwd=REPO)
    events = read_events(log_path)
    sampled = {
        event.iteration: event.integer("trajectories") or 0 for event in events if event.name == "rolled_out"
    }
    evaluated = [
        event for event in events if event.name == "evaluated" and event.number("reward_mean") is not None
    ]
    evaluated.sort(key=lambda event: event.integer("policy_version") or 0)
    found = []
    for event in evaluated:
        version, reward = event.integer("policy_version") or 0, event.number("reward_mean") or 0.0
        samples = sum(count for iteration, count in sampled.items() if iteration <= version)
        found.append(Evaluated(samples, event.at - evaluated[0].at, reward))
    return found


def compare(names: Sequence[str], curves: Sequence[Sequence[Sequence[Evaluated]]]) -> None:
    """Print the means over the seeds of each way to run. `curves`: of each way, of each seed."""
    print(f"{'samples':>8}" + "".join(f"{name:>28}" for name in names))
    for version in range(min(len(curve) for seeds in curves for curve in seeds)):
        cells = []
        for seeds in curves:
            points = [curve[version] for curve in seeds]
            rewards = [point.reward for point in points]
            cells.append(
                f"{mean(point.seconds for point in points):8.0f} s {mean(rewards):.3f} ({min(rewards):.2f}-{max(rewards):.2f})"
            )
        print(f"{curves[0][0][version].samples:8}" + "".join(f"{cell:>28}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS], default="demo", help="what is learned; default demo")
    parser.add_argument("--seeds", type=numbers, default="0,1,2", help="comma-separated; default 0,1,2")
    parser.add_argument("--nodes", type=int, default=3, help="node daemons on this machine; default 3")
    parser.add_argument("--out", type=Path, help="where the runs go; default: a new temporary folder")
    parser.add_argument(
        "--beside", metavar="KEY=VALUE", help="run each seed once more with this setting, and compare"
    )
    parser.add_argument("settings", nargs="*", help="such as algorithm.preset=ppo critic.lr=5e-4")
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="fsbarrier-learning-"))
    ways = [("", []), *([(args.beside, [args.beside])] if args.beside else [])]
    found: list[list[list[Evaluated]]] = [[] for _ in ways]
    # By turns, so that a machine that becomes busier is so for both.
    for seed in args.seeds:
        for curves, (name, more) in zip(found, ways, strict=True):
            settings = [*args.settings, *more]
            curves.append(run(args.task, seed, args.nodes, folder, settings, f"-{name}" if name else ""))
    print(f"\nheld-out reward by policy version ({args.nodes} nodes; runs in {folder})")
    passed = True
    for curves, (name, _) in zip(found, ways, strict=True):
        for seed, curve in zip(args.seeds, curves, strict=True):
            rewards = [point.reward for point in curve]
            learned = bool(rewards) and rewards[0] <= START_AT_MOST and rewards[-1] > END_AT_LEAST
            right = bool(rewards) and max(rewards) <= START_AT_MOST if args.task == "blind" else learned
            passed = passed and right
            shown = " ".join(f"{value:.3f}" for value in rewards)
            print(f"{name} seed {seed}: {shown}  {'PASS' if right else 'FAIL'}".strip())
    if args.beside:
        print(f"load of this machine at the end: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")
        compare(["without", args.beside], found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
