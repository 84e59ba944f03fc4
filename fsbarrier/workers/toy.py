"""The toy program's worker: writes deterministic trajectories, or just takes its time.

`python -m fsbarrier.workers.toy --spec SPEC.json`; the spec's `do` is rollout, update or wait, `seconds` how long it takes.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.errors import FsbarrierError
from fsbarrier.rollouts import assignment
from fsbarrier.rollouts.early_end import Tail
from fsbarrier.rundir import checkpoints
from fsbarrier.supervision import signals
from fsbarrier.trajectories import ShardWriter

STEPS = 20  # how often a waiting phase shows progress


def main() -> int:
    spec = json.loads(Path(sys.argv[sys.argv.index("--spec") + 1]).read_text())
    signal.signal(signal.SIGTERM, signals.end)
    work = {"rollout": rollout, "update": update, "wait": wait}[spec["do"]]
    try:
        result = work(spec)
    except FsbarrierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    files.write_atomic(Path(spec["result"]), json.dumps(result).encode())
    return 0


def rollout(spec: dict[str, Any]) -> dict[str, Any]:
    """One group of one trajectory a task, durable as soon as it is there."""
    assignment.tidy(spec)
    begin = time.monotonic()
    claims, tail = assignment.open_claims(spec), assignment.open_tail(spec)
    pause_s = spec["seconds"] / len(spec["tasks"]) / spec["speed"]
    part, total, cut = Path(spec["part"]), 0.0, False
    files.make_dirs(part.parent)
    with ShardWriter(part, prefix=spec["prefix"], header=assignment.header(spec)) as writer:
        there = {group.task_index for group in writer.groups}  # of an earlier start that was cut off
        while not cut and (lot := claims.take()):
            todo = [task for task in lot if task not in there]
            for number, task in enumerate(todo):
                cut = pause(pause_s, tail)
                if cut:
                    break
                record = trajectory(spec, task)
                total += record["reward"]
                writer.append_group(task, [record])
                done = len(writer.groups)
                if tail:
                    tail.say(done)
                left = len(todo) - number - 1 + claims.own_left
                progress(spec, done, done + left, "trajectories", total / done)
        info = writer.finish(assignment.origin(spec))
        tasks = [group.task_index for group in writer.groups]
    files.link_or_copy(part, Path(spec["checkpoint"]))
    return {
        "part": spec["part"],
        "bytes": info.bytes,
        "groups": info.groups,
        "trajectories": info.trajectories,
        "reward_mean": info.reward_mean,
        "seconds": round(time.monotonic() - begin, 6),
        **assignment.result(claims, tasks, ended_early=cut),
    }


def pause(seconds: float, tail: Tail | None) -> bool:
    """Let the time of one task pass; True where the phase ends meanwhile."""
    end, idle = time.monotonic() + seconds, threading.Event()
    while (left := end - time.monotonic()) > 0:
        if tail and tail.over():
            return True
        idle.wait(min(left, tail.pause_s) if tail else left)
    return False


def trajectory(spec: dict[str, Any], task: int) -> dict[str, Any]:
    """The same record for the same split, iteration and task, whoever makes it: only `node_rank` tells."""
    digest = hashlib.sha256(f"{spec['split']}:{spec['iteration']}:{task}".encode()).digest()
    reward = digest[0] / 255
    tokens = array("i", digest[1:9])
    return {
        "task_id": f"toy-{task}",
        "task_index": task,
        "sample": 0,
        "reward": reward,
        "reward_parts": {"toy": reward},
        "policy_version": spec["policy_version"],
        "node_rank": spec["node_rank"],
        "generation": spec["generation"],
        "iteration": spec["iteration"],
        "split": spec["split"],
        "prompt": f"task {task}",
        "messages": [
            {"role": "user", "content": f"task {task}"},
            {"role": "assistant", "content": digest.hex()},
        ],
        "text": digest.hex(),
        "token_ids": tokens,
        "prompt_tokens": 4,
        "loss_mask": array("B", [0] * 4 + [1] * 4),
        "logprobs": array("f", [0.0] * 4 + [-byte / 64 for byte in digest[9:13]]),
        "finish_reason": "stop",
        "valid": True,
        "timings": {},
        "metadata": {},
    }


def update(spec: dict[str, Any]) -> dict[str, Any]:
    """Take the time of an update; the node that is given `out` leaves a policy version there."""
    wait(spec)
    version = spec["new_policy_version"]
    if spec["out"] is None:
        return {"policy_version": version}
    out = Path(spec["out"])
    files.make_dirs(out / "model")
    files.make_dirs(out / "trainer")
    for name in ("model/config.json", "trainer/state.json"):
        files.write_atomic(out / name, json.dumps({"toy": True, "policy_version": version}).encode())
    checkpoints.write_manifest(out, version)
    return {"out": str(out), "policy_version": version}


def wait(spec: dict[str, Any]) -> dict[str, Any]:
    idle = threading.Event()
    for done in range(STEPS):
        progress(spec, done, STEPS, "steps", None)
        idle.wait(spec["seconds"] / STEPS)
    return {}


def progress(spec: dict[str, Any], done: int, total: int, unit: str, reward: float | None) -> None:
    fields = {
        "done": done,
        "total": total,
        "unit": unit,
        "reward_mean": reward,
        "tokens_per_s": None,
        "note": "",
    }
    files.write_atomic(Path(spec["progress"]), json.dumps(fields).encode())


if __name__ == "__main__":
    sys.exit(main())
