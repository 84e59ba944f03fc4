"""Weights that come while an agent's episodes run (`rollout.in_flight`), with the real vLLM, which is killed then, or its node's daemon."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from cluster import Cluster, leftovers
from test_engines_lost import engine_of
from test_in_flight import IN_FLIGHT
from waiting import until

from fsbarrier.trajectories import Trajectory, iter_trajectories, scan_rank_file

TASKS, SAMPLES, DEADLINE_S = 12, 4, 400.0
# Its last turn waits while there is a file `hold`, and then half of the tasks while there is a file `held`, so that they are unfinished.
AGENT = """
import asyncio
from pathlib import Path

class Held:
    async def run(self, task, client):
        first = await client.complete(task.prompt, max_tokens=5)
        await gone(client.custom["hold"])
        await client.complete(task.prompt + first.text + "zyxw=", max_tokens=5)
        if task.prompt < "n":
            await gone(client.custom["hold"] + "-half")
        return client.trajectory(reward=float(first.text.strip() == task.answer))

async def gone(name):
    while Path(name).exists():
        await asyncio.sleep(0.1)
"""


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("victim", ["engine", "daemon"])
def test_what_is_killed_while_episodes_take_new_weights_costs_no_group(tmp_path: Path, victim: str) -> None:
    """It is killed when it has them, and half of the groups are done. Each token has the log-probability of the version that it names."""
    (tmp_path / "agent.py").write_text(AGENT)
    hold, half = tmp_path / "hold", tmp_path / "hold-half"
    flags: tuple[str, ...] = ("--iterations", "2", "--eval-interval", "0", *IN_FLIGHT, f"custom.hold={hold}")
    flags += (f"rollout.agent={tmp_path / 'agent.py'}:Held", f"rollout.tasks={TASKS}")
    flags += (f"rollout.samples={SAMPLES}", "rollout.concurrency=48", "rollout.max_tokens=16")
    with Cluster(tmp_path, 2, *flags, program="rl") as cluster:
        cluster.start()
        cluster.in_phase(1, 7)
        hold.touch()
        half.touch()
        until(lambda: has_taken_weights(cluster), cluster.said_by_all, deadline_s=DEADLINE_S)
        hold.unlink()
        until(lambda: groups_of_next(cluster), cluster.said_by_all, deadline_s=DEADLINE_S)
        if victim == "engine":
            os.kill(engine_of(cluster.processes[1].pid), signal.SIGKILL)
        else:
            cluster.kill(1)
            cluster.start(1)
        half.unlink()
        assert cluster.wait(deadline_s=900) == {0: 0, 1: 0}, cluster.said_by_all()
        assert leftovers(cluster.log_path) == {}
    # The update may have been made anew; tokens of the first attempt's weights keep their version number.
    made = sorted(cluster.paths.checkpoints.glob("policy-000001.*"))
    models = {
        0: [Path(json.loads(cluster.paths.record.read_text())["model"])],
        1: [folder / "model" for folder in made],
    }
    for iteration in (1, 2):
        found = [*iter_trajectories(cluster.paths.merged("train", iteration))]
        groups = Counter(one["task_index"] for one in found)
        assert len(groups) == TASKS and {*groups.values()} == {SAMPLES}
        gaps, versions = compared(found, models)
        assert max(gaps.values()) < 1e-4, gaps
        if iteration == 2:
            assert {0, 1} in versions, versions


def has_taken_weights(cluster: Cluster) -> bool:
    """Whether an engine of node 1 has loaded weights since its start."""
    logs = cluster.log_path.glob("logs/attempt_*/node_1/vllm.log")
    return any("Reloading and processing weights took" in log.read_text() for log in logs)


def groups_of_next(cluster: Cluster) -> bool:
    """Whether groups of the second iteration are on disk."""
    parts = cluster.paths.trajectories("train").glob("*iteration2_*.part")
    return any(scan_rank_file(part).groups for part in parts)


def compared(
    found: list[Trajectory], models: dict[int, list[Path]]
) -> tuple[dict[int, float], list[set[int]]]:
    """The largest gap to what transformers computes, by policy version, and the versions in each trajectory, which never go back."""
    import torch
    from transformers import AutoModelForCausalLM

    policies = {
        version: [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]
        for version, paths in models.items()
    }
    gaps, seen = dict.fromkeys(models, 0.0), []
    for one in found:
        ids, sampled = (
            torch.tensor(one["token_ids"].tolist()),
            torch.tensor(one["loss_mask"].tolist())[1:] > 0,
        )
        told = torch.tensor(one["logprobs"].tolist())[1:]
        known = one.get("policy_versions")
        named = torch.full_like(ids, one["policy_version"]) if known is None else torch.tensor(known.tolist())
        of_tokens = named[1:][sampled].tolist()
        assert of_tokens == sorted(of_tokens)
        seen.append({*of_tokens})
        for version in seen[-1]:
            of, nearest = sampled & (named[1:] == version), math.inf
            for policy in policies[version]:
                with torch.no_grad():
                    own = torch.log_softmax(policy(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[
                        :, 0
                    ]
                nearest = min(nearest, float((own - told)[of].abs().max()))
            gaps[version] = max(gaps[version], nearest)
    return gaps, seen
