"""Shows that a task is learned: `python scripts/learning_curve.py [--task demo] [--seeds 0,1,2] [--nodes 3] [--out DIR] [key=value ...]`.

For each seed a tiny model is made and warmed up, and the whole product runs on it: real vLLM servers, rollouts, torchrun updates.
Prints the held-out reward of each policy version and says whether it rose from about 0.25 to above 0.75 (exit code 1 if not).
About four minutes a seed on two quiet cores.

Tasks: `demo`, the built-in one (demo_model.py); `pictures`, of which colour and how many squares are (picture_model.py); `blind`, the same
without the pictures, which nobody can learn: there the reward must stay below 0.4.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    "trainer.minibatch": 256,
    "eval_interval": 6,
    "iterations": 24,
}
TASKS: Mapping[str, tuple[Sequence[str], Mapping[str, object]]] = {
    "demo": (["demo_model.py"], demo_tasks.DEMO_SETTINGS),
    "pictures": (["picture_model.py"], PICTURES),
    "blind": (["picture_model.py", "--blind"], PICTURES),
}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run(kind: str, seed: int, nodes: int, folder: Path, further: list[str]) -> list[float]:
    """With these further settings, the held-out rewards of the policy versions of one run that were evaluated."""
    task, log_path = folder / f"task-seed{seed}", folder / f"run-seed{seed}"
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
    evaluated = [event for event in read_events(log_path) if event.name == "evaluated"]
    evaluated.sort(key=lambda event: event.integer("policy_version") or 0)
    return [reward for event in evaluated if (reward := event.number("reward_mean")) is not None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS], default="demo", help="what is learned; default demo")
    parser.add_argument("--seeds", type=numbers, default="0,1,2", help="comma-separated; default 0,1,2")
    parser.add_argument("--nodes", type=int, default=3, help="node daemons on this machine; default 3")
    parser.add_argument("--out", type=Path, help="where the runs go; default: a new temporary folder")
    parser.add_argument("settings", nargs="*", help="such as algorithm.preset=ppo critic.lr=5e-4")
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="fsbarrier-learning-"))
    curves = {seed: run(args.task, seed, args.nodes, folder, args.settings) for seed in args.seeds}
    print(f"\nheld-out reward by policy version ({args.nodes} nodes; runs in {folder})")
    passed = True
    for seed, curve in curves.items():
        learned = bool(curve) and curve[0] <= START_AT_MOST and curve[-1] > END_AT_LEAST
        right = bool(curve) and max(curve) <= START_AT_MOST if args.task == "blind" else learned
        passed = passed and right
        print(f"seed {seed}: {' '.join(f'{value:.3f}' for value in curve)}  {'PASS' if right else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
