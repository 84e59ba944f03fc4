"""Write a big run directory, as if many nodes had trained for days: to measure what shows runs, and to look at it.

    python scripts/lab/big_run.py /tmp/big/run                                          (60 iterations, 64 nodes, 100,000 trajectories)
    python scripts/lab/big_run.py /tmp/small/run --iterations 4 --nodes 3 --trajectories 200

No process runs, and the same command writes the same answers. Some of them are hostile: HTML, scripts, terminal sequences,
halves of surrogate pairs, a megabyte, values of unexpected types. The last iteration but one lost a node.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fake_run import FakeRun, long_run

from fsbarrier.trajectories import RankFileWriter

SAMPLES = 8
WORDS = [
    "so",
    "we",
    "add",
    "seven",
    "to",
    "nine",
    "and",
    "carry",
    "the",
    "one",
    "which",
    "gives",
    "that",
    "answer",
    "because",
    "both",
    "halves",
    "are",
    "even",
]
HOSTILE: tuple[dict[str, Any], ...] = (
    {
        "text": "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{ 7*7 }}"
    },
    {"text": "\x1b[31mred\x1b[0m \x07 \u202e reversed \x00 end"},
    {"text": "half a pair: \ud800 and the rest"},
    {"text": "x" * 1_000_000},
    {"messages": [{"role": "<b>system</b>", "content": {"not": "a text"}}, "no message", {"role": "user"}]},
    {
        "reward_parts": {"<i>part</i>": "not a number"},
        "timings": "no timings",
        "metadata": ["no", "metadata"],
    },
)


def trajectory(rng: random.Random, iteration: int, task: int, sample: int, rank: int) -> dict[str, Any]:
    """An answer of some turns, whose reward rises with the iterations."""
    length = rng.randrange(40, 240)
    said = " ".join(rng.choice(WORDS) for _ in range(length))
    right = rng.random() < 0.2 + 0.6 * iteration / 60
    cut_off = length > 225
    logprobs = [-rng.expovariate(1.5) for _ in range(length)]
    question = f"question {task}: what is {task} + {sample}?"
    made: dict[str, Any] = {
        "task_id": f"t{task}",
        "task_index": task,
        "sample": sample,
        "reward": round(float(right) + 0.1 * rng.random(), 4),
        "reward_parts": {"right": float(right), "short": round(1 - length / 240, 3)},
        "valid": True,
        "policy_version": iteration - 1,
        "node_rank": rank,
        "prompt": question,
        "text": said,
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}],
        "finish_reason": "length" if cut_off else "stop",
        "token_ids": array("i", range(100, 100 + length + 10)),
        "loss_mask": array("B", [0] * 10 + [1] * length),
        "logprobs": array("f", [0.0] * 10 + logprobs),
        "prompt_tokens": 10,
        "timings": {"generate_s": 0.02 * length, "reward_s": 0.001},
        "metadata": {"answer": str(task + sample), "level": task % 5},
    }
    if task % 37 == 5 and sample == 3:
        made["metadata"]["reward_error"] = "ZeroDivisionError: division by zero (rewards.py, line 12)"
        made["valid"] = False
    return made


def write_iteration(run: FakeRun, iteration: int, groups: int, split: str = "train") -> None:
    """The ranks' files of one iteration."""
    for rank in range(run.nodes):
        tasks = range(rank, groups, run.nodes)
        if not tasks:
            continue
        part = run.paths.part(split, iteration, rank, 1, 1, iteration - 1)
        part.parent.mkdir(exist_ok=True)
        header = {"node_rank": rank, "run_id": run.run_id, "generation": 1}
        with RankFileWriter(part, header=header) as writer:
            for task in tasks:
                rng = random.Random(f"{split} {iteration} {task}")
                group = [trajectory(rng, iteration, task, sample, rank) for sample in range(SAMPLES)]
                if task < len(HOSTILE) and split == "train":
                    group[1] |= HOSTILE[task]
                writer.append_group(task, group)


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in (("iterations", 60), ("nodes", 64), ("trajectories", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    hosts = tuple(f"gpu-{number:02d}" for number in range(max(3, args.nodes)))
    lose_at = args.iterations - 1 if args.iterations > 3 else None
    run = long_run(args.folder, args.iterations, nodes=args.nodes, hosts=hosts, lose_at=lose_at)
    groups = max(1, args.trajectories // SAMPLES // args.iterations)
    for iteration in range(1, args.iterations + 1):
        write_iteration(run, iteration, groups)
    write_iteration(run, args.iterations, max(1, groups // 8), "test")
    print(f"{args.folder}: {args.iterations} iterations of {groups} groups, {args.nodes} nodes")


if __name__ == "__main__":
    main()
