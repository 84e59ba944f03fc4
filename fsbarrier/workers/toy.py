"""The programs of the toy: they write deterministic trajectories, or only wait.

`python -m fsbarrier.workers.toy rollout|update|wait --spec SPEC.json`; each has its own spec.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.decisions import JsonRecord
from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.rollouts.claims import EarlyEnd
from fsbarrier.rollouts.rollout_spec import Origin, RolloutOutcome, RolloutSpec
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import Launch, Spec
from fsbarrier.store import files
from fsbarrier.trajectories import RankFileWriter

#: number of progress updates of a waiting phase
STEPS = 20


class Nothing(JsonRecord):
    """An empty report."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ToyRollout(Spec[RolloutOutcome]):
    """The toy's rollout of one node. `seconds`: how long the node's share takes at a speed of 1."""

    launch = Launch.module("fsbarrier.workers.toy", "rollout.log", "rollout")

    rollout: RolloutSpec
    seconds: float
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class ToyUpdate(Spec[Nothing]):
    """The toy's update on one node. `out`: where this node writes the new policy version; None: another node does."""

    launch = Launch.module("fsbarrier.workers.toy", "update.log", "update")

    seconds: float
    out: Path | None
    new_policy_version: int


@dataclass(frozen=True, slots=True)
class ToyWait(Spec[Nothing]):
    launch = Launch.module("fsbarrier.workers.toy", "work.log", "wait")

    seconds: float


def rollout(spec: ToyRollout, settings: Settings, progress: ProgressWriter) -> RolloutOutcome:
    """Write one group with one trajectory per task, each durable immediately."""
    assignment = spec.rollout
    assignment.remove_old_claims()
    begin = time.monotonic()
    claims, early_end = assignment.open_claims(), assignment.open_early_end()
    pause_s = spec.seconds / len(assignment.tasks) / spec.speed
    reward_sum, ended_early = 0.0, False
    files.make_dirs(assignment.part.parent)
    with RankFileWriter(assignment.part, header=assignment.header()) as writer:
        # Groups from an earlier start of this program.
        written = {group.task_index for group in writer.groups}
        while not ended_early and (lot := claims.take()):
            todo = [task for task in lot if task not in written]
            for number, task in enumerate(todo):
                ended_early = pause(pause_s, early_end)
                if ended_early:
                    break
                made = trajectory(assignment.origin, task)
                reward_sum += made["reward"]
                writer.append_group(task, [made])
                done = len(writer.groups)
                if early_end:
                    early_end.report(done)
                left = len(todo) - number - 1 + claims.own_left
                mean = reward_sum / done
                progress.show(done, done + left, "trajectories", last=not left, reward_mean=mean)
        writer.finish()
    assignment.publish_part()
    report = assignment.report(writer, [claims], ended_early=ended_early)
    return RolloutOutcome(replace(report, seconds=round(time.monotonic() - begin, 6)))


def pause(seconds: float, early_end: EarlyEnd | None) -> bool:
    """Wait for the duration of one task; True if the phase ends early."""
    end, idle = time.monotonic() + seconds, threading.Event()
    while (left := end - time.monotonic()) > 0:
        if early_end and early_end.reached():
            return True
        idle.wait(min(left, early_end.pause_s) if early_end else left)
    return False


def trajectory(origin: Origin, task: int) -> Trajectory:
    """A trajectory that is the same on every node except for `node_rank`."""
    digest = hashlib.sha256(f"{origin.split}:{origin.iteration}:{task}".encode()).digest()
    reward = digest[0] / 255
    return {
        "task_id": f"toy-{task}",
        "task_index": task,
        "sample": 0,
        "reward": reward,
        "reward_parts": {"toy": reward},
        "policy_version": origin.policy_version,
        "node_rank": origin.node_rank,
        "generation": origin.generation,
        "iteration": origin.iteration,
        "split": origin.split,
        "prompt": f"task {task}",
        "messages": [
            {"role": "user", "content": f"task {task}"},
            {"role": "assistant", "content": digest.hex()},
        ],
        "text": digest.hex(),
        "token_ids": array("i", list(digest[1:9])),
        "prompt_tokens": 4,
        "loss_mask": array("B", [0] * 4 + [1] * 4),
        "logprobs": array("f", [0.0] * 4 + [-byte / 64 for byte in digest[9:13]]),
        "finish_reason": "stop",
        "valid": True,
        "timings": {},
        "metadata": {},
    }


def update(spec: ToyUpdate, settings: Settings, progress: ProgressWriter) -> Nothing:
    """Wait for the duration of an update; the node with `out` writes a policy version there."""
    pass_time(spec.seconds, progress)
    version, out = spec.new_policy_version, spec.out
    if out is None:
        return Nothing()
    files.make_dirs(out / "model")
    files.make_dirs(out / "trainer")
    for name in ("model/config.json", "trainer/state.json"):
        files.write_atomic(out / name, json.dumps({"toy": True, "policy_version": version}).encode())
    checkpoints.write_manifest(out, version)
    return Nothing()


def wait(spec: ToyWait, settings: Settings, progress: ProgressWriter) -> Nothing:
    pass_time(spec.seconds, progress)
    return Nothing()


def pass_time(seconds: float, progress: ProgressWriter) -> None:
    idle = threading.Event()
    for done in range(STEPS):
        progress.show(done, STEPS, "steps")
        idle.wait(seconds / STEPS)


PROGRAMS = {
    "rollout": ToyRollout.program(rollout),
    "update": ToyUpdate.program(update),
    "wait": ToyWait.program(wait),
}

if __name__ == "__main__":
    sys.exit(run_worker(PROGRAMS[sys.argv.pop(1)]))
