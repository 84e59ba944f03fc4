"""The sessions of an environment that all nodes have together: each node's part, and that all of them are used, and never more."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shlex
import sys
from pathlib import Path

import pytest
from test_environment import AGENT, HERE
from test_rollout import Fake, finish, make_spec, start
from waiting import DEADLINE_S

from fsbarrier.rollouts import session_quota
from fsbarrier.rollouts.claims import remove_old
from fsbarrier.rollouts.environment import Environment
from fsbarrier.rollouts.session_quota import SessionQuota, divided
from fsbarrier.settings.sections import EnvironmentSettings

INF = float("inf")


@pytest.mark.parametrize(
    ("total", "needs", "weights", "parts"),
    [
        (20, [INF] * 3, [1, 1, 1], [7, 7, 6]),
        (20, [INF] * 2, [3, 1], [15, 5]),
        (20, [INF, 2, INF], [1, 1, 1], [9, 2, 9]),
        (20, [0, 3, 5], [1, 1, 1], [0, 3, 5]),
        # Each has one before anybody has two; and those who have none wait until others need none.
        (3, [INF] * 3, [100, 1, 1], [1, 1, 1]),
        (2, [INF] * 3, [1, 1, 1], [1, 1, 0]),
        (2, [0, INF, INF], [1, 1, 1], [0, 1, 1]),
    ],
)
def test_the_quota_is_divided_by_weight_among_those_that_need_it(
    total: int, needs: list[float], weights: list[float], parts: list[int]
) -> None:
    assert divided(total, dict(enumerate(needs)), dict(enumerate(weights))) == dict(enumerate(parts))


@pytest.mark.parametrize("seed", range(40))
def test_nodes_that_hear_late_never_use_too_many_and_the_last_one_may_use_all(
    tmp_path: Path, seed: int
) -> None:
    """Nodes look and say in any order, some of them hardly ever; each uses what it may as far as it needs it."""
    rng = random.Random(seed)
    weights = {rank: rng.choice((0.5, 1.0, 1.0, 3.0)) for rank in range(rng.randrange(2, 6))}
    total = rng.randrange(1, 12)
    nodes = {
        rank: SessionQuota(total, weights, rank, most=rng.randrange(1, 12), folder=tmp_path)
        for rank in weights
    }
    for number in range(2):
        for node in nodes.values():
            node.begin_round(number)
        needs = {rank: node.most for rank, node in nodes.items()}
        used = dict.fromkeys(nodes, 0)
        for _ in range(60):
            rank = rng.choice(list(nodes))
            needs[rank] = rng.randint(min(1, needs[rank]), needs[rank])
            used[rank] = min(used[rank], needs[rank])
            nodes[rank].exchange(needs[rank])
            used[rank] = min(nodes[rank].mine, needs[rank])
            assert sum(used.values()) <= total, (weights, total, needs, used)
        last = rng.choice(list(nodes))
        for rank in nodes.keys() - {last}:
            nodes[rank].exchange(0)
        nodes[last].exchange(needs[last])
        assert nodes[last].mine >= min(total, needs[last])
        nodes[last].exchange(0)
    for rank in nodes:
        remove_old(tmp_path, rank)
    assert not tmp_path.exists()


def test_a_node_that_is_started_again_has_a_session_and_no_file_is_written_in_vain(tmp_path: Path) -> None:
    weights = {0: 1.0, 1: 1.0}
    first, second = (SessionQuota(4, weights, rank, most=8, folder=tmp_path) for rank in weights)
    for node in (first, second, first, second):
        node.exchange(8)
    assert (first.mine, second.mine, list(tmp_path.iterdir())) == (2, 2, [])
    first.exchange(0)
    again = SessionQuota(4, weights, 0, most=8, folder=tmp_path)
    again.exchange(8)
    second.exchange(8)
    assert (again.mine, second.mine) == (1, 4)


def test_what_one_node_does_not_need_the_other_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sessions, nine episodes here and three there, each of which ends when it is told."""
    monkeypatch.setattr(session_quota, "LOOK_S", 0.01)
    used = [0, 0]
    ends: list[list[asyncio.Event]] = [[], []]

    async def episode(rank: int, node: Environment) -> None:
        async with node.session():
            used[rank] += 1
            assert sum(used) <= 4
            ends[rank].append(end := asyncio.Event())
            await end.wait()
            used[rank] -= 1
        node.episodes -= 1

    async def go() -> None:
        weights = {0: 1.0, 1: 1.0}
        nodes = []
        for rank in weights:
            quota = SessionQuota(4, weights, rank, most=64, folder=tmp_path)
            nodes.append(Environment(EnvironmentSettings(), tmp_path, quota=quota))
            nodes[rank].servers[0].url = "http://of-no-process"

        async def until_used(*wanted: int, waiting: int) -> None:
            while ((*used,), sum(node.waiting for node in nodes)) != (wanted, waiting):
                await asyncio.sleep(0.01)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as running:
            sharing = [asyncio.create_task(node._share(node.quota)) for node in nodes if node.quota]
            for rank, count in enumerate((9, 3)):
                nodes[rank].episodes = count
                for _ in range(count):
                    running.create_task(episode(rank, nodes[rank]))
            await until_used(2, 2, waiting=8)
            # More might still be given to it, so what it has is not given away.
            ends[1][0].set()
            await until_used(2, 2, waiting=7)
            ends[1][1].set()
            await until_used(2, 1, waiting=7)
            nodes[1].all_known = True
            await until_used(3, 1, waiting=6)
            assert (nodes[0].state["sessions"], nodes[0].state["most"], nodes[0].state["waiting"]) == (
                3,
                3,
                6,
            )
            # It might be started again, so it keeps one until it is done.
            ends[1][2].set()
            await until_used(3, 0, waiting=6)
            sharing[1].cancel()
            await asyncio.to_thread(nodes[1].quota.exchange, 0)  # type: ignore[union-attr]
            await until_used(4, 0, waiting=5)
            for number in range(9):
                while len(ends[0]) <= number:
                    await asyncio.sleep(0.01)
                ends[0][number].set()
            await until_used(0, 0, waiting=0)
            sharing[0].cancel()

    asyncio.run(go())


def test_two_nodes_have_two_sessions_together(tmp_path: Path, fake: Fake) -> None:
    """Rollouts of two nodes, each with a server of its own, whose episodes take a while."""
    shares = {"1": [0, 1, 2], "2": [3]}
    specs = []
    for rank in (1, 2):
        command = [sys.executable, str(HERE / "environment_server.py"), "{port}", str(tmp_path), "9"]
        chosen = {
            "rollout.agent": f"{AGENT}:OpenEnv",
            "rollout.max_tokens": 16,
            "rollout.take_over": False,
            "engine.max_model_len": 256,
            "environment.command": shlex.join(command),
            "environment.sessions": 2,
        }
        known = {"node_rank": rank, "shares": shares, "tasks": shares[str(rank)], "fixed_shares": "as asked"}
        known |= {"claims": str(tmp_path / "claims"), "sampling": {"samples": 2}}
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        specs.append(make_spec(folder, fake.url, ["slow"] * 4, **chosen, **known))
        spec = json.loads(specs[-1].read_text())
        spec["settings"]["rank_weights"] = [1.0] * 3
        specs[-1].write_text(json.dumps(spec))
        rows = [{"prompt": "guess=", "answer": "slow", "reset": {"word": "slow"}}] * 4
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = [finish(process, spec) for process, spec in [(start(spec), spec) for spec in specs]]
    assert [done.code for done in ended] == [0, 0], [done.stderr for done in ended]
    assert [done.result["trajectories"] for done in ended] == [6, 2]
    told = sorted(
        (float(at), int(more))
        for at, more in map(str.split, (tmp_path / "sessions").read_text().splitlines())
    )
    at_a_time = [*itertools.accumulate(more for _, more in told)]
    assert (max(at_a_time), at_a_time[-1]) == (2, 0)
    shown = json.loads((tmp_path / "node-2" / "progress.json").read_text())["environments"]["environment"]
    assert shown["sessions"] == shown["waiting"] == shown["restarts"] == 0
