"""The race: TRL's GRPOTrainer and fsbarrier, one after the other, on the same model, tasks, reward, batch and optimiser settings.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install 'trl==1.16.0' torch      # PyTorch's CPU build
    python scripts/bench_trl.py --trl-python /tmp/trl/bin/python --seeds 0,1,2 --nodes 1,3

TRL has an environment of its own, since its pins are not ours. The demonstration (`run.sh --demo`) for nine iterations: 128 tasks of 16
samples, 4 minibatches of 512 twice. Or, with `--real-model FOLDER` (made by scripts/real_model.py), SmolLM2-135M-Instruct that learns to
add and subtract, for `--iterations`. TRL samples with transformers' own `generate`, in one process on all cores; fsbarrier starts its
nodes on the same cores. Prints, as the mean over the seeds: seconds until a held-out evaluation reached the goal, seconds from the
command to the first sampled token, an iteration by part (the first one apart, since it pays for what stays), and the most memory of all
processes together (each shared page counted once). docs/benchmarks.md says what came of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from fsbarrier.data import demo_tasks  # noqa: E402
from fsbarrier.processes.processes import below  # noqa: E402
from fsbarrier.rundir.journal import JournalReader, journal_files  # noqa: E402
from fsbarrier.view.timings import PASSED, Span, read_spans  # noqa: E402

DEMO: dict[str, Any] = {
    **demo_tasks.DEMO_SETTINGS,
    "iterations": 9,
    "eval_interval": 1,
}
REAL_MODEL: dict[str, Any] = {
    "iterations": 30,
    "eval_interval": 5,
    "eval.tasks": 80,
    "eval.temperature": 0.0,
    "reward.kind": "numeric",
    "rollout.tasks": 16,
    "rollout.samples": 8,
    "rollout.temperature": 0.7,
    "rollout.max_tokens": 32,
    "engine.max_model_len": 160,
    "engine.dtype": "bfloat16",
    "trainer.dtype": "bfloat16",
    "trainer.epochs": 1,
    "trainer.minibatch": 64,
    "trainer.max_tokens_per_micro_batch": 2048,
    "optimizer.lr": 2e-5,
    "optimizer.warmup_steps": 2,
}
PARTS = (
    "rollout",
    "scoring, merge, preparation",
    "starting the trainer",
    "the update itself",
    "evaluation",
    "rest",
)
PART_OF_PHASE = {
    "train_rollout": "rollout",
    "train_assign": "scoring, merge, preparation",
    "train_shards_ready": "scoring, merge, preparation",
    "train_aggregate": "scoring, merge, preparation",
    "batch_prepare": "scoring, merge, preparation",
    "eval_decide": "evaluation",
    "eval_rollout": "evaluation",
    "update": "the update itself",
}


@dataclass(frozen=True, slots=True)
class Race:
    """What one run took, in seconds. `parts`: of an iteration, mean of all but the first. `goal_s`: None where it was not reached."""

    tool: str
    seed: int
    startup_s: float
    first_iteration_s: float
    iteration_s: float
    parts: dict[str, float]
    goal_s: float | None
    held_out: list[float]
    peak_gb: float
    #: how many processes wanted to run on this machine when it began, as a warning: figures under load are none
    load: float


class MemoryWatch:
    """The most that a process and all its descendants took together, each shared page counted once."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid, self._end = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(1.0):
            now = sum(map(proportional_bytes, [self._pid, *below(self._pid)]))
            self.peak_bytes = max(self.peak_bytes, now)


def proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def run_watched(command: list[str], log: Path) -> tuple[float, float]:
    """Run it to its end; gives when it began, by the monotonic clock, and its peak memory in GB. Raises CalledProcessError."""
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=REPO, stdout=out, stderr=subprocess.STDOUT)
        watch = MemoryWatch(process.pid)
        with watch.running():
            code = process.wait()
    if code:
        print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
        raise subprocess.CalledProcessError(code, command)
    return began, watch.peak_bytes / 1e9


# --- TRL --------------------------------------------------------------------------------------------------------------------


def trl(python: Path, task: Path, folder: Path, run: dict[str, Any], goal: float) -> Race:
    settings = {
        "seed": run["rollout.seed"],
        "tasks": run["rollout.tasks"],
        "samples": run["rollout.samples"],
        "minibatch": run["trainer.minibatch"],
        "epochs": run["trainer.epochs"],
        "max_tokens": run["rollout.max_tokens"],
        "temperature": run["rollout.temperature"],
        "reward": run["reward.kind"],
        "bf16": run["trainer.dtype"] == "bfloat16",
        "lr": run["optimizer.lr"],
        "warmup_steps": run["optimizer.warmup_steps"],
        "iterations": run["iterations"],
        "eval_tasks": run["eval.tasks"],
        "eval_interval": run["eval_interval"],
        "eval_temperature": run["eval.temperature"],
    }
    load, log = os.getloadavg()[0], folder / "trl.log"
    script = str(REPO / "scripts" / "trl_trainer.py")
    began, peak = run_watched(
        [str(python), script, str(task), str(folder / "trl"), json.dumps(settings)], log
    )
    told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"event"')]
    evaluated = [one for one in told if one["event"] == "evaluated"]
    starts = [one["mono_s"] for one in told if one["event"] == "rollout_began"]
    ends = [*starts[1:], next(one["mono_s"] for one in told if one["event"] == "done")]
    parts: dict[str, list[float]] = defaultdict(list)
    ready = [one for one in told if one["event"] == "batch_ready"]
    updated = [one["mono_s"] for one in told if one["event"] == "updated"]
    # The first iteration is told apart.
    for n in range(1, len(starts)):
        parts["rollout"].append(ready[n]["generate_s"])
        parts["scoring, merge, preparation"].append(ready[n]["mono_s"] - starts[n] - ready[n]["generate_s"])
        parts["the update itself"].append(updated[n] - ready[n]["mono_s"])
    in_first = sum(updated[0] < one["mono_s"] < ends[0] for one in evaluated)
    parts["evaluation"] = [sum(one["seconds"] for one in evaluated[1 + in_first :]) / (len(starts) - 1)]
    return Race(
        "TRL, one process",
        run["rollout.seed"],
        startup_s=starts[0] - began,
        first_iteration_s=ends[0] - starts[0],
        iteration_s=(ends[-1] - ends[0]) / (len(ends) - 1),
        parts={name: statistics.mean(values) for name, values in parts.items()},
        goal_s=next((one["mono_s"] - began for one in evaluated if one["reward"] >= goal), None),
        held_out=[one["reward"] for one in evaluated],
        peak_gb=peak,
        load=load,
    )


# --- fsbarrier --------------------------------------------------------------------------------------------------------------


def fsbarrier(nodes: int, task: Path, folder: Path, run: dict[str, Any], goal: float) -> Race:
    log_path = folder / f"run-{nodes}"
    given = ["--data-path", str(task), "--model", str(task / "model"), "--log-path", str(log_path)]
    words = [f"{name}={value}" for name, value in run.items() if name != "iterations"]
    iterations = ["--iterations", str(run["iterations"])]
    command = [sys.executable, "-P", "-m", "fsbarrier", "launch", "local", "--nodes", str(nodes)]
    load = os.getloadavg()[0]
    began, peak = run_watched([*command, *given, *iterations, *words], folder / f"fsbarrier-{nodes}.log")
    journals = [list(JournalReader(path).read()) for path in journal_files(log_path)]
    spans = [span for span in read_spans(journals) if span.outcome == PASSED]
    evaluated = sorted(
        (e for events in journals for e in events if e.name == "evaluated"), key=lambda e: e.mono_s
    )
    rewards = [(event.mono_s - began, event.number("reward_mean") or 0.0) for event in evaluated]
    leader = [span for span in spans if span.node_rank == 0]
    begins = {span.iteration: span.began_s for span in leader if span.phase == 0}
    first = next(span for span in leader if span.phase_name == "train_rollout")
    startup_s = first.began_s + first.time.start_s - began
    first_end = begins[2]
    ended = max(span.began_s + span.seconds for span in leader)
    return Race(
        f"fsbarrier, {nodes} node{'s' if nodes > 1 else ''}",
        run["rollout.seed"],
        startup_s=startup_s,
        first_iteration_s=first_end - began - startup_s,
        iteration_s=(ended - first_end) / (run["iterations"] - 1),
        parts=parts_of([span for span in leader if span.iteration > 1]),
        goal_s=next((at for at, reward in rewards if reward >= goal), None),
        held_out=[reward for _, reward in rewards],
        peak_gb=peak,
        load=load,
    )


def parts_of(spans: list[Span]) -> dict[str, float]:
    """An iteration's mean, by part."""
    sums: dict[str, float] = defaultdict(float)
    for span in spans:
        starting = span.time.start_s + span.time.load_s if span.phase_name == "update" else 0.0
        sums["starting the trainer"] += starting
        sums[PART_OF_PHASE.get(span.phase_name, "rest")] += span.seconds - starting
    count = len({span.iteration for span in spans})
    return {name: seconds / count for name, seconds in sums.items()}


# --- the table --------------------------------------------------------------------------------------------------------------


def table(races: list[Race], goal: float) -> str:
    by_tool: dict[str, list[Race]] = defaultdict(list)
    for race in races:
        by_tool[race.tool].append(race)
    rows: list[tuple[str, list[str]]] = [
        ("seconds", [f"{tool} ({len(own)})" for tool, own in by_tool.items()])
    ]

    def row(name: str, values: list[list[float | None]]) -> None:
        rows.append((name, [spread([v for v in own if v is not None], len(own)) for own in values]))

    tools = list(by_tool.values())
    row("start-up, to the first token", [[one.startup_s for one in own] for own in tools])
    row("first iteration", [[one.first_iteration_s for one in own] for own in tools])
    row("an iteration after it", [[one.iteration_s for one in own] for own in tools])
    for part in PARTS:
        row(f"- {part}", [[one.parts.get(part) for one in own] for own in tools])
    row(f"to a held-out {goal:g}", [[one.goal_s for one in own] for own in tools])
    row("held-out at the start", [[one.held_out[0] for one in own] for own in tools])
    row("held-out at the end", [[one.held_out[-1] for one in own] for own in tools])
    row("peak memory, GB", [[one.peak_gb for one in own] for own in tools])
    row("load of the machine before", [[one.load for one in own] for own in tools])
    width = max(len(name) for name, _ in rows)
    columns = [max(len(cells[n]) for _, cells in rows) for n in range(len(tools))]
    lines = [
        " | ".join(
            [name.ljust(width), *(cell.rjust(size) for cell, size in zip(cells, columns, strict=True))]
        )
        for name, cells in rows
    ]
    return "\n".join(lines)


def spread(values: list[float], of: int) -> str:
    """The mean, and the extremes of several."""
    if not values:
        return "–"
    text = f"{statistics.mean(values):.2f}"
    if len(values) > 1:
        text += f" ({min(values):.2f}–{max(values):.2f})"
    return text if len(values) == of else f"{text}, {len(values)} of {of}"


def make_demo(folder: Path, seed: int) -> Path:
    """The demonstration's model and tasks."""
    make = [
        sys.executable,
        str(REPO / "scripts" / "demo_model.py"),
        "--out",
        str(folder),
        "--seed",
        str(seed),
    ]
    subprocess.run(make, check=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="the Python of an environment with TRL 1.16.0"
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated; default 0,1,2")
    parser.add_argument(
        "--nodes", default="1,3", help="fsbarrier's nodes on this machine, comma-separated; default 1,3"
    )
    parser.add_argument("--goal", type=float, default=0.8, help="held-out reward to reach; default 0.8")
    parser.add_argument(
        "--real-model", type=Path, help="what scripts/real_model.py made, instead of the demo"
    )
    parser.add_argument("--iterations", type=int, help="default: 9 of the demo, 30 of a real model")
    parser.add_argument("--out", type=Path, help="where the runs go; default: a new temporary folder")
    args = parser.parse_args()
    if not args.trl_python.is_file():
        parser.error(f"--trl-python {args.trl_python}: no such program")
    folder = args.out or Path(tempfile.mkdtemp(prefix="fsbarrier-race-"))
    settings = {**(REAL_MODEL if args.real_model else DEMO)}
    settings["iterations"] = args.iterations or settings["iterations"]
    races: list[Race] = []
    for seed in map(int, args.seeds.split(",")):
        here = folder / f"seed-{seed}"
        here.mkdir(parents=True)
        task = args.real_model or make_demo(folder / f"task-{seed}", seed)
        run = {**settings, "rollout.seed": seed}
        races.append(trl(args.trl_python, task, here, run, args.goal))
        for nodes in map(int, args.nodes.split(",")):
            races.append(fsbarrier(nodes, task, here, run, args.goal))
        (folder / "races.json").write_text(json.dumps([asdict(race) for race in races], indent=1))
        print(table(races, args.goal), flush=True)
    print(f"the runs are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
