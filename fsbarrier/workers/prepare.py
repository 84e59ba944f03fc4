"""Phase 8: merged trajectories to one training batch, with advantages and the order of the minibatches fixed.

`python -m fsbarrier.workers.prepare --spec SPEC.json`. The batch is a torch file of plain tensors: all trajectories' tokens one
after the other, `offsets` between them, and for each optimizer step the indices of its trajectories. `current` tells those that the
policy to be trained has sampled itself from those of older ones, or of other runs, whose log-probabilities are not its own.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsbarrier import files
from fsbarrier.errors import UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import AlgorithmSettings, Settings
from fsbarrier.supervision.worker_contract import Progress, run_worker
from fsbarrier.training.batch import load_tensors
from fsbarrier.training.losses import group_advantages
from fsbarrier.training.replay import Draw, Recency
from fsbarrier.trajectories import NotOurs, iter_trajectories, scan_shard

Trajectory = Mapping[str, Any]


@dataclass
class Batch:
    """Sequences laid end to end: a trajectory each, or each segment of one. `weights`: advantages (grpo), rewards (rft)."""

    token_ids: list[Tensor] = field(default_factory=list)
    loss_mask: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    current: list[bool] = field(default_factory=list)

    def add(self, trajectory: Trajectory, weight: float, current: bool) -> None:
        tokens = torch.as_tensor(trajectory["token_ids"], dtype=torch.int32)
        mask = torch.as_tensor(trajectory["loss_mask"], dtype=torch.uint8)
        logprobs = torch.as_tensor(trajectory["logprobs"], dtype=torch.float32)
        where = f"task {trajectory['task_id']}, sample {trajectory['sample']}"
        if not len(tokens) == len(mask) == len(logprobs):
            raise UsageError(f"{where}: token_ids, loss_mask and logprobs have different lengths")
        if not bool(torch.isfinite(logprobs[mask.bool()]).all()):
            raise UsageError(f"{where}: a log-probability is not a finite number")
        starts = [int(start) for start in trajectory.get("segments", (0,))]
        for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if not 0 <= begin <= end:
                raise UsageError(f"{where}: its segments do not begin one after the other ({starts})")
            sampled = mask[begin:end].clone()
            sampled[:1] = 0  # nothing predicts the first token
            if int(sampled.sum()) == 0:
                continue
            self.token_ids.append(tokens[begin:end])
            self.loss_mask.append(sampled)
            self.logprobs.append(logprobs[begin:end])
            self.weights.append(weight)
            self.rewards.append(float(trajectory["reward"]))
            self.current.append(current)


def main(spec: dict[str, Any], settings: Settings, progress: Progress) -> dict[str, Any]:
    batch, offered = Batch(), Offered()
    recency = Recency.of(settings.update)
    seed = f"{settings.rollout.seed}:{spec['iteration']}"
    draw: Draw[tuple[list[Trajectory], bool]] = Draw(recency, seed=f"{seed}:recency")
    for age, merged in enumerate(sources(spec, recency)):
        if age and recency.draws and not merged.exists():
            continue  # its iteration was not rolled out, or is no longer kept
        groups = offered.groups_in(merged, spec, progress)
        if recency.draws:
            draw.offer(age, ((group, own) for group, own in groups if teaches(group, settings.algorithm)))
        else:
            offered.taught += sum(add_group(batch, group, settings.algorithm, own) for group, own in groups)
    for _, (group, own) in draw.chosen():
        offered.taught += add_group(batch, group, settings.algorithm, own)
    steps = minibatches(
        len(batch.weights),
        settings.trainer.minibatch,
        settings.trainer.epochs,
        seed=seed,
    )
    out = Path(spec["batch"])
    files.make_dirs(out.parent)
    save(out, batch, steps, spec)
    return {
        "batch": str(out),
        "trajectories": len(batch.weights),
        "groups": offered.groups,
        "dropped_groups": offered.groups - offered.taught,
        "replayed": batch.current.count(False),
        "tokens": sum(int(mask.sum()) for mask in batch.loss_mask),
        "steps": len(steps),
        "reward_mean": offered.reward / offered.trajectories if offered.trajectories else None,
    }


def sources(spec: Mapping[str, Any], recency: Recency) -> list[Path]:
    """The merged files, newest iteration first. A run directory stands for its file of the spec's iteration and those before."""
    named = [Path(path) for path in spec["merged"]]
    if len(named) != 1 or not named[0].is_dir():
        return named
    newest = spec["iteration"]
    numbers = range(newest, max(0, newest - recency.iterations), -1)
    return [RunPaths(named[0]).merged("train", number) for number in numbers]


@dataclass
class Offered:
    """What was there to learn from. `reward`: the sum, of the newest file; `taught`: groups that are in the batch."""

    groups: int = 0
    trajectories: int = 0
    reward: float = 0.0
    taught: int = 0

    def groups_in(
        self, merged: Path, spec: Mapping[str, Any], progress: Progress
    ) -> Iterator[tuple[list[Trajectory], bool]]:
        """The groups of a file, each with whether the policy to be trained has sampled it in this run."""
        if not merged.exists():
            raise UsageError(
                f"{merged}: not there, so iteration {spec['iteration']} has nothing to learn from; roll out first "
                "(--rl-phase rollout), or name what to learn from (update.trajectories)"
            )
        run_id = run_of(merged)
        for group in groups_of(trajectories_in(merged)):
            self.groups += 1
            self.trajectories += len(group)
            self.reward += sum(counted_reward(t) for t in group)
            progress.show(self.trajectories, 0, "trajectories")
            own = run_id in (None, spec["run_id"]) and group[0]["policy_version"] == spec["policy_version"]
            yield group, own


def run_of(path: Path) -> str | None:
    """The run that made a merged file; None where it does not say."""
    try:
        found = scan_shard(path, verify=False).header.get("run_id")
    except NotOurs:
        return None
    return str(found) if found is not None else None


def trajectories_in(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a merged file, also of one that torch.save made. Raises UsageError, ProgramFailed for anything else."""
    try:
        scan = scan_shard(path, verify=False)
    except NotOurs:
        scan = None
    if scan is not None:
        if not scan.finished:  # a part of the rollouts would look like all of them
            raise UsageError(
                f"{path} is not a whole file of trajectories; merge it again (fsbarrier.aggregate)"
            )
        yield from iter_trajectories(path)
        return
    found = load_tensors(path, "file of trajectories").get("trajectories")
    if not isinstance(found, list):
        raise UsageError(f"{path} is no file of trajectories: it has no list of that name")
    yield from found


def counted_reward(trajectory: Trajectory) -> float:
    """A trajectory's reward; one that failed or was cut off never counts as a success, whatever its reward says."""
    reward = float(trajectory["reward"])
    return reward if trajectory["valid"] else min(reward, 0.0)


def was_judged(trajectory: Trajectory) -> bool:
    """Whether it is known how good it was: not where the reward or the agent failed, which is no fault of the policy."""
    return not {"reward_error", "agent_error"} & trajectory.get("metadata", {}).keys()


def groups_of(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Consecutive trajectories of one task and policy version; a merged file holds each group together."""
    group: list[Trajectory] = []
    for trajectory in trajectories:
        if group and any(trajectory[key] != group[0][key] for key in ("task_index", "policy_version")):
            yield group
            group = []
        group.append(trajectory)
    if group:
        yield group


def teaches(group: list[Trajectory], algorithm: AlgorithmSettings) -> bool:
    """Whether there is anything to learn from a group."""
    return add_group(Batch(), group, algorithm, current=True)


def add_group(batch: Batch, group: list[Trajectory], algorithm: AlgorithmSettings, current: bool) -> bool:
    """Add what of a group there is to learn from; False if nothing.

    grpo: a failed or cut-off trajectory stays in its group, as no success. rft: successes only, weighted by their rewards.
    One that nobody could judge is left out, and nothing is compared with it.
    """
    group = [trajectory for trajectory in group if was_judged(trajectory)]
    if not group:
        return False
    rewards = torch.tensor([counted_reward(t) for t in group], dtype=torch.float64)
    before = len(batch.weights)
    if algorithm.loss == "rft":
        for trajectory in group:
            if trajectory["valid"] and trajectory["reward"] > 0:
                batch.add(trajectory, float(trajectory["reward"]), current)
    elif not (algorithm.drop_zero_signal and bool((rewards == rewards[0]).all())):
        advantages = group_advantages(rewards, normalize_std=algorithm.normalize_std)
        for trajectory, advantage in zip(group, advantages.tolist(), strict=True):
            batch.add(trajectory, advantage, current)
    return len(batch.weights) > before


def minibatches(count: int, size: int, epochs: int, *, seed: str) -> list[Tensor]:
    """The indices of each optimizer step: each epoch is a shuffled pass, cut into equal pieces of about `size`."""
    steps: list[Tensor] = []
    for epoch in range(epochs if count else 0):
        order = list(range(count))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        steps += torch.tensor(order, dtype=torch.int64).chunk(max(1, round(count / size)))
    return steps


def save(out: Path, batch: Batch, steps: list[Tensor], spec: Mapping[str, Any]) -> None:
    lengths = torch.tensor([0, *(len(t) for t in batch.token_ids)], dtype=torch.int64)

    def flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)

    content = {
        "token_ids": flat(batch.token_ids, torch.int32),
        "loss_mask": flat(batch.loss_mask, torch.uint8),
        "logprobs": flat(batch.logprobs, torch.float32),
        "offsets": lengths.cumsum(0),
        "weights": torch.tensor(batch.weights, dtype=torch.float32),
        "rewards": torch.tensor(batch.rewards, dtype=torch.float32),
        "current": torch.tensor(batch.current, dtype=torch.uint8),
        "steps": steps,
        "metadata": {key: spec[key] for key in ("run_id", "iteration", "generation", "policy_version")},
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    files.write_atomic(out, buffer.getvalue(), durable=True)


if __name__ == "__main__":
    sys.exit(run_worker(main))
