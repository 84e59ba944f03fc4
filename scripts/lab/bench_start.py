"""From the command to the first sampled token: a node of fsbarrier beside a bare vLLM server, by turns.

`python scripts/lab/bench_start.py --rounds 3` starts, with the demo's model and the same engine flags,

* a bare server, `python -m vllm.entrypoints.openai.api_server` (what `vllm serve` runs), until it has answered a completion of one token;
* one node, `python -m fsbarrier run --master`, in a new run directory, until the first group of its first rollout is durable in its part
  file. That is later than its first sampled token, by the rest of the group, the reward and a flush.

The model is made before, where there is none yet; what the node did until then is taken from its logs and its journal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsbarrier.data import demo_tasks
from fsbarrier.engine import command
from fsbarrier.engine.client import EngineClient, Refused, Unreachable
from fsbarrier.engine.model import inspect
from fsbarrier.engine.openai_http import UNIX
from fsbarrier.processes.supervisor import Child
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import EngineSettings
from fsbarrier.store.reading import read_bytes
from fsbarrier.trajectories import scan_rank_file

BARE = "vllm.entrypoints.openai.api_server"
LOOK_S = 0.02
# A start line in a program's log, as fsbarrier/processes/supervisor.py writes it.
STARTED = re.compile(rb"^--- (\S+) start ", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a start may take")
    parser.add_argument("--bare", default=BARE, help="the module that is the bare server")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-start-") as name:
        demo_tasks.make(Path(name) / "demo")
        bare, node, steps = [], [], []
        for number in range(args.rounds):
            place = Path(name) / str(number)
            place.mkdir()
            bare.append(bare_server(place, Path(name) / "demo" / "model", args.bare, args.timeout))
            seconds, profile = one_node(place, args.timeout)
            node.append(seconds)
            steps.append(profile)
            print(f"round {number + 1}: bare {bare[-1]:6.2f} s, node {seconds:6.2f} s, ", end="")
            print(", ".join(f"{what} at {when:.2f}" for what, when in profile.items()), flush=True)
    ratios = [ours / theirs for ours, theirs in zip(node, bare, strict=True)]
    print(f"bare server   {statistics.median(bare):6.2f} s  (fastest {min(bare):.2f})")
    print(f"one node      {statistics.median(node):6.2f} s  (fastest {min(node):.2f})")
    print(f"ratio         {statistics.median(ratios):6.2f}    (from {min(ratios):.2f} to {max(ratios):.2f})")
    if args.json:
        print(
            json.dumps({"bare_s": bare, "node_s": node, "ratio": statistics.median(ratios), "steps": steps})
        )
    return 0


def bare_server(place: Path, model: Path, module: str, timeout_s: float) -> float:
    """Seconds until a server has answered with its first token."""
    settings = EngineSettings(dtype="float32", max_model_len=64)
    plan = command.ServerPlan(
        python=sys.executable,
        model=inspect(model),
        settings=settings,
        socket=str(place / "bare.sock"),
        seed=1,
        accelerated=False,
        sleeps=False,
    )
    words = command.argv(plan)
    words[words.index("-m") + 1] = module
    env = command.environment(plan, os.environ, "key")
    client = EngineClient(UNIX + plan.socket, "key")
    asked = {"model": command.SERVED_NAME, "prompt": "dcba=", "max_tokens": 1}
    began = time.monotonic()
    with Child.start(words, env=env, log_file=place / "bare.log", name="bare") as server:
        for _ in looks(server, timeout_s):
            try:
                client.call("POST", "/v1/completions", asked, timeout_s=timeout_s)
            except (Unreachable, Refused):
                continue
            return time.monotonic() - began
    raise SystemExit(f"no answer; see {server.last_log_lines()}")


def one_node(place: Path, timeout_s: float) -> tuple[float, dict[str, float]]:
    """Seconds until a node's first rollout has its first group on disk, and what it did when."""
    paths = RunPaths(place / "run")
    demo = (f"{name}={value}" for name, value in demo_tasks.DEMO_SETTINGS.items() if name != "iterations")
    words = [sys.executable, "-P", "-m", "fsbarrier", "run", "--master", "--log-path", str(paths.root)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    began, began_at = time.monotonic(), time.time()
    with Child.start([*words, *demo], env=env, log_file=place / "node.log", name="node") as node:
        for _ in looks(node, timeout_s):
            if any(scan_rank_file(part).groups for part in paths.trajectories("train").glob("*.part")):
                seconds = time.monotonic() - began
                return seconds, profile(paths, began_at)
    raise SystemExit(f"no group; see {node.last_log_lines()}")


def looks(child: Child, timeout_s: float) -> Iterator[None]:
    """Look again every few milliseconds, until the program has ended or the time is over."""
    deadline = time.monotonic() + timeout_s
    while child.wait(LOOK_S) is None and time.monotonic() < deadline:
        yield


def profile(paths: RunPaths, began_at: float) -> dict[str, float]:
    """Seconds after the command: when the node had joined, and when each of its programs was started."""
    found = {}
    for journal in paths.root.glob("events/*.jsonl"):
        for line in journal.read_text().splitlines():
            entry = json.loads(line)
            if entry["event"] == "node_joined":
                found["joined"] = datetime.fromisoformat(entry["time"]).timestamp() - began_at
    for name in ("vllm", "rollout"):
        for log in paths.logs.glob(f"*/node_0/{name}.log"):
            if start := STARTED.search(read_bytes(log, 1 << 20)):
                found[name] = datetime.fromisoformat(start[1].decode()).timestamp() - began_at
    return dict(sorted(found.items(), key=lambda item: item[1]))


if __name__ == "__main__":
    sys.exit(main())
