"""Rollouts beside the fastest bare loop: the same prompts, the same server, the same data asked for, by turns.

`python scripts/lab/bench_rollout.py --rounds 3` starts one vLLM server with the demo's model (or `--model DIR`), then in each round

* a bare loop: one process that sends the prompts over its open connections, reads the answers as JSON and throws them away. It tries
  several numbers of prompts a request first, and keeps to the fastest. Its process is not counted, nor its imports;
* the same without log-probabilities;
* fsbarrier's rollout phase: `fsbarrier.workers.rollout`, from its start to its end, with every
  group judged and flushed to its part file. "sampling" counts from when its work begins.

`--tasks 256 --samples 1` is an evaluation of the demonstration.

The rounds stand for iterations: the prompts are other ones in each, and before each the server reloads its weights in place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsbarrier.data import demo_tasks
from fsbarrier.engine.engine import Engine
from fsbarrier.engine.openai_http import base_and_socket, bearer
from fsbarrier.processes.supervisor import Child, own_program, with_this_package
from fsbarrier.processes.worker_contract import WorkerFiles, read_result
from fsbarrier.rollouts.rollout_spec import RolloutOutcome
from fsbarrier.rollouts.samples import NEUTRAL
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import RolloutSettings, Settings
from fsbarrier.store import files
from fsbarrier.store.reading import read_bytes

PROGRAM = "fsbarrier.workers.rollout"
PROMPTS_PER_REQUEST = (1, 4, 8, 16, 64, 128)
KINDS = ("bare", "bare without log-probabilities", "fsbarrier", "fsbarrier, sampling")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured")
    parser.add_argument("--tasks", type=int, default=128, help="prompts a round")
    parser.add_argument("--samples", type=int, default=16, help="answers a prompt")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens an answer, at most")
    parser.add_argument("--model", type=Path, default=None, help="another model's folder")
    parser.add_argument(
        "--profile", type=Path, default=None, help="cProfile of each rollout, into this folder"
    )
    args = parser.parse_args()
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no folder with a config.json")
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as name:
        measure(Path(name), args)
    return 0


def measure(folder: Path, args: argparse.Namespace) -> None:
    demo_tasks.make(folder / "demo")
    chosen = {
        **{key: value for key, value in demo_tasks.DEMO_SETTINGS.items() if key != "iterations"},
        "rollout.max_tokens": args.max_tokens,
        "engine.max_model_len": max(64, args.max_tokens + 32),
        "data_path": str(folder / "demo"),
        "model": str(args.model or folder / "demo" / "model"),
        "log_path": str(folder / "run"),
    }
    settings = resolve([], chosen)
    engine = Engine(settings.engine, log_file=folder / "vllm.log", work_dir=folder)
    try:
        access = engine.ensure(Path(chosen["model"]), 0, cancel=threading.Event())
        server = {"url": access.url, "api_key": access.api_key, "model": access.model}
        lines = (folder / "demo" / "train.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        sampling = replace(settings.rollout, samples=args.samples)
        bare = BareLoop(server, sampling)
        of_round = [range(n * args.tasks, (n + 1) * args.tasks) for n in range(args.rounds + 1)]
        # The first round of all is for the server's own warming up, and to find how the bare loop is fastest.
        warm = [prompts[i % len(prompts)] for i in of_round[0]]
        bare.warm_up(warm)
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number, tasks in enumerate(of_round[1:], start=1):
            engine.ensure(Path(chosen["model"]), number, cancel=threading.Event())
            asked = [prompts[i % len(prompts)] for i in tasks]
            rates["bare"].append(bare.run(asked))
            rates["bare without log-probabilities"].append(bare.run(asked, logprobs=False))
            job = WorkerFiles(folder / f"job-{number}")
            job.write_spec(
                spec(folder, settings, sampling, server, [i % len(prompts) for i in tasks], number)
            )
            whole, sampled = rollout(job, folder, args.profile)
            rates["fsbarrier"].append(whole)
            rates["fsbarrier, sampling"].append(sampled)
            print(
                f"round {number}: " + ", ".join(f"{kind} {rates[kind][-1]:.0f}" for kind in KINDS), flush=True
            )
    finally:
        engine.stop()
    print(f"tokens a second, median of {args.rounds}; {bare.per_request} prompts a request")
    for kind in KINDS:
        ratios = [ours / best for ours, best in zip(rates[kind], rates["bare"], strict=True)]
        later = statistics.median(rates[kind][1:] or rates[kind]) / rates[kind][0]
        print(
            f"{kind:32} {statistics.median(rates[kind]):8.0f}  {statistics.median(ratios):.2f} x bare  "
            f"later rounds {later:.2f} x the first"
        )


class BareLoop:
    """One client that asks the server as fast as it can, and does nothing with the answers."""

    def __init__(self, server: dict[str, str], sampling: RolloutSettings) -> None:
        self.server, self.sampling = server, sampling
        self.per_request = 1

    def warm_up(self, prompts: Sequence[str]) -> None:
        self.run(prompts)
        rates = {}
        for count in PROMPTS_PER_REQUEST:
            self.per_request = count
            rates[count] = max(self.run(prompts), self.run(prompts))
        self.per_request = max(rates, key=lambda count: rates[count])

    def run(self, prompts: Sequence[str], *, logprobs: bool = True) -> float:
        """Tokens a second."""
        return asyncio.run(self._run(prompts, logprobs))

    async def _run(self, prompts: Sequence[str], logprobs: bool) -> float:
        base, socket = base_and_socket(self.server["url"])
        sampling = self.sampling
        asked = {
            "model": self.server["model"],
            "n": sampling.samples,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": sampling.max_tokens,
            **NEUTRAL,
            "return_token_ids": True,
            **({"logprobs": 0} if logprobs else {}),
        }
        batches = [prompts[i : i + self.per_request] for i in range(0, len(prompts), self.per_request)]
        under_way = asyncio.Semaphore(max(2, sampling.concurrency // self.per_request))
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
        async with httpx.AsyncClient(
            base_url=base, headers=bearer(self.server["api_key"]), timeout=None, transport=transport
        ) as client:

            async def ask(batch: Sequence[str]) -> int:
                async with under_way:
                    answer = await client.post("/v1/completions", json={**asked, "prompt": batch})
                    answer.raise_for_status()
                return sum(len(choice["token_ids"]) for choice in answer.json()["choices"])

            began = time.monotonic()
            tokens = sum(await asyncio.gather(*map(ask, batches)))
            return tokens / (time.monotonic() - began)


def spec(
    folder: Path,
    settings: Settings,
    sampling: RolloutSettings,
    server: dict[str, str],
    tasks: list[int],
    number: int,
) -> dict[str, object]:
    """What phases/rl.py would say to the one node of a run, in iteration `number`."""
    run = folder / "run"
    names = ("samples", "temperature", "max_tokens", "seed")
    return {
        "settings": settings.as_json(),
        "run_id": "bench",
        "log_path": str(run),
        "node_rank": 0,
        "generation": 1,
        "incarnation": 1,
        "iteration": number,
        "split": "train",
        "tasks": tasks,
        "shares": {"0": tasks},
        "fixed_shares": "",
        "claims": str(folder / "claims"),
        "old_claims": [],
        "completion_threshold": 1.0,
        "grace_s": 0.0,
        "there": 0,
        "expected": tasks,
        "keep": None,
        "part": str(run / f"{number}.part"),
        "checkpoint": str(run / f"{number}.checkpoint"),
        "policy_version": 0,
        "policy": "start",
        "rounds": [
            {
                "tasks": tasks,
                "files": {str(folder / "demo" / "train.jsonl"): 0},
                "sampling": {"top_p": 1.0, "top_k": -1, **{name: getattr(sampling, name) for name in names}},
            }
        ],
        "model": settings.model,
        "engine": [server],
    }


def rollout(job: WorkerFiles, folder: Path, profile: Path | None) -> tuple[float, float]:
    """Tokens a second of a rollout program: of all of it, and of its work alone."""
    words = own_program(PROGRAM, "--spec", str(job.spec))
    if profile is not None:
        # A profile is no measurement.
        files.make_dirs(profile)
        words[1:1] = ["-m", "cProfile", "-o", str(profile / f"{job.folder.name}.prof")]
    env, log = with_this_package(os.environ), folder / "rollout.log"
    began = time.monotonic()
    with Child.start(words, env=env, log_file=log, name=job.folder.name) as program:
        while (code := program.wait(1.0)) is None:
            pass
        seconds = time.monotonic() - began
    if code != 0:
        raise SystemExit(read_bytes(log, 1 << 20).decode())
    report = RolloutOutcome.from_json(read_result(job.result, PROGRAM)).report
    return report.completion_tokens / seconds, report.tokens_per_s


if __name__ == "__main__":
    sys.exit(main())
