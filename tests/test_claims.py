"""What nodes tell each other in the folder of claims: who takes which task, when there is enough, how many sessions each one may open."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import shlex
import socketserver
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cluster import FAST, Cluster, leftovers
from test_environment import AGENT, HERE
from test_rollout import SAMPLES, Fake, finish, make_spec, start
from waiting import DEADLINE_S, until

from fsbarrier.protocol.assign import split_by_weight
from fsbarrier.rollouts import environment
from fsbarrier.rollouts.claims import Claims, EarlyEnd, Refills, remove_old
from fsbarrier.rollouts.environment import Environment, SessionQuota, divided
from fsbarrier.rundir.names import CUT
from fsbarrier.settings.sections import EnvironmentSettings
from fsbarrier.store import files
from fsbarrier.trajectories import load


def claims(folder: Path, shares: list[list[int]], rank: int, incarnation: int = 1) -> Claims:
    return Claims(dict(enumerate(shares)), rank, folder=folder, incarnation=incarnation)


def test_the_owner_takes_from_the_head_and_others_from_the_tail_of_the_fullest(tmp_path: Path) -> None:
    shares = [[0], [10, 11, 12, 13], [20, 21, 22]]
    first, second = claims(tmp_path, shares, 0), claims(tmp_path, shares, 1)
    assert [second.take(), second.take()] == [(10,), (11,)]
    with mock.patch("os.listdir", side_effect=AssertionError("no listing while there is a share")):
        assert first.take() == (0,) and first.made == 1
    assert [first.take() for _ in range(3)] == [(22,), (13,), (21,)]
    assert first.taken_over == [22, 13, 21]
    third = claims(tmp_path, shares, 2)
    assert third.take() == (20,)
    assert second.take() == (12,)
    assert [node.take() for node in (first, second, third)] == [(), (), ()]
    assert len(first.taken_over) == 3 and not third.taken_over


def test_many_nodes_at_once_take_each_task_once(tmp_path: Path) -> None:
    shares = split_by_weight(range(1000), [5, 1, 1, 1, 1, 1])
    taken: list[list[int]] = [[] for _ in shares]
    nodes = [claims(tmp_path, shares, rank) for rank in range(len(shares))]
    begin = threading.Barrier(len(shares))

    def work(rank: int) -> None:
        begin.wait()
        while lot := nodes[rank].take():
            taken[rank] += lot

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(task for tasks in taken for task in tasks) == Counter(range(1000))
    others = [[task for task in taken[rank] if task not in shares[rank]] for rank in range(len(shares))]
    assert [sorted(node.taken_over) for node in nodes] == [sorted(tasks) for tasks in others] and any(others)


def test_a_program_that_starts_again_gets_what_it_had_claimed(tmp_path: Path) -> None:
    shares = [[0, 1], [10, 11, 12]]
    before = claims(tmp_path, shares, 0)
    assert [before.take() for _ in range(3)] == [(0,), (1,), (12,)]
    again = claims(tmp_path, shares, 0)
    assert again.own_left == 3 and again.take() == (0, 1, 12)
    assert again.take() == (11,) and len(again.taken_over) == 2
    newer = claims(tmp_path, shares, 0, incarnation=2)  # another start of the node is another owner
    assert newer.take() == (10,)


def test_a_claim_whose_answer_was_lost_belongs_to_its_maker_alone(tmp_path: Path) -> None:
    """The server has created the name, and the client is told of an error: the next try finds the name taken, by itself or by another."""
    shares = [[0, 1, 2]]
    first, second = claims(tmp_path, shares, 0), Claims({0: [0, 1, 2]}, 1, folder=tmp_path)
    create, lost = files.create_exclusive, [OSError(errno.EIO, "the answer was lost")] * 2

    def loses_its_answer(path: Path, data: bytes, **how: Any) -> bool:
        made = create(path, data, **how)
        if lost:
            raise lost.pop()
        return made

    with mock.patch.object(files, "create_exclusive", loses_its_answer):
        assert first.take() == (0,) and not lost and first.made == 1
        lost.append(OSError(errno.EIO, "the answer was lost"))
        # The other has taken the last lot meanwhile, and of it no answer was lost.
        with mock.patch("os.listdir", return_value=[]):
            assert create(tmp_path / "lot-0000-000002", b"7 1\n", durable=False)
            assert second.take() == (1,) and not lost
    assert second.taken_over == [1] and first.take() == ()


def test_old_claims_are_removed_by_those_whose_shares_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    node = claims(folder, [[0, 1], [2]], 0)
    assert [node.take() for _ in range(3)] == [(0,), (1,), (2,)]
    early_end = EarlyEnd(folder, 1, need=0, grace_s=0.0)
    early_end.report(0)
    assert early_end.reached()
    remove_old(folder, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["durable-0001", "lot-0001-000000"]
    remove_old(folder, 1)
    remove_old(folder, 0)
    assert not folder.exists()


# --- the early end ---------------------------------------------------------------------------------------------------------


def test_the_phase_ends_after_its_grace_and_all_see_it(tmp_path: Path) -> None:
    now = [100.0]

    def view(rank: int) -> EarlyEnd:
        return EarlyEnd(tmp_path, rank, need=88, grace_s=5.0, clock=lambda: now[0])

    first, second = view(0), view(1)
    first.report(60)
    second.report(27)
    assert not first.reached() and not second.reached()
    now[0] += 1000
    second.report(28)
    assert not first.reached()  # its grace begins now
    now[0] += 4.9
    assert not first.reached() and not second.reached()
    now[0] += 0.1
    assert first.reached() and (tmp_path / CUT).exists()
    assert second.reached() and view(2).reached()


def test_a_count_that_could_not_be_written_is_written_with_the_next_report(tmp_path: Path) -> None:
    """Otherwise a node whose last group coincides with a failure would be missing from the sum for ever."""
    node = EarlyEnd(tmp_path, 0, need=5, grace_s=0.0)
    write, tries = files.write_atomic, list[Path]()

    def fails_once(path: Path, data: bytes) -> None:
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.EIO, "not now")
        write(path, data)

    with mock.patch.object(files, "write_atomic", fails_once):
        node.report(5)
        assert not node.reached()
        node.report(5)
        assert len(tries) == 2
        # What the others have been told is not told again.
        node.report(5)
        assert len(tries) == 2
    assert EarlyEnd(tmp_path, 1, need=5, grace_s=0.0).reached()


# --- refills --------------------------------------------------------------------------------------------------------------------


def node(folder: Path, rank: int, already: tuple[int, ...] = (0, 1, 0), enough: int = 6) -> Refills:
    return Refills(folder, rank, [0, 2], already, enough)


def test_all_nodes_decide_alike_on_another_round_whenever_they_look(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    first, other, late = node(folder, 0), node(folder, 2), node(folder, 2)
    first.report(0, 3)
    assert first.another_after(0) is None and other.another_after(0) is None
    other.report(0, 2)
    assert first.another_after(0) is True
    # 5, the 1 that was there before, and 2 more: enough. Who looks at round 0 only now finds too few, as the others did.
    first.report(1, 2)
    assert late.another_after(0) is True and late.another_after(1) is None
    other.report(1, 0)
    assert first.another_after(1) is False and late.another_after(1) is False
    assert (first.rounds_done(), late.rounds_done()) == (2, 2)


def test_a_program_that_starts_again_reports_no_round_twice(tmp_path: Path) -> None:
    """What it reported first has been added up by others; of a second report with another count each would choose its own."""
    folder = tmp_path / "claims"
    first, other = node(folder, 0), node(folder, 2)
    first.report(0, 1)
    other.report(0, 2)
    assert first.another_after(0) is True
    again = node(folder, 0)
    assert again.rounds_done() == 1
    again.report(0, 6)
    assert again.rounds_done() == 1 and again.another_after(0) is other.another_after(0) is True
    again.report(1, 4)
    assert sorted(path.name for path in folder.iterdir()) == [
        "done-0000-0000-000001",
        "done-0000-0001-000004",
        "done-0002-0000-000002",
    ]


# --- the sessions of an environment that all nodes have together ----------------------------------------------------------------

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
    monkeypatch.setattr(environment, "LOOK_S", 0.01)
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
        known = {"node_rank": rank, "shares": shares, "fixed_shares": "as asked"}
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
    # Whether both are used at once depends on when the nodes begin.
    assert max(at_a_time) <= 2 and at_a_time[-1] == 0
    shown = json.loads((tmp_path / "node-2" / "progress.json").read_text())["environments"]["environment"]
    assert shown["sessions"] == shown["waiting"] == shown["restarts"] == 0


# --- a whole run ----------------------------------------------------------------------------------------------------------


class Service(socketserver.ThreadingTCPServer):
    """What is limited: a session is a connection. `users`: the sessions of each environment's server; `most`: of all, at the same time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SessionHandler)
        self.users, self.most, self.lock = Counter[int](), 0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def add(self, user: int, more: int) -> None:
        with self.lock:
            self.users[user] += more
            self.most = max(self.most, self.users.total())

    def full(self, users: int) -> set[int]:
        """Those that use it, once these many use all of it."""
        now = +self.users.copy()
        return {*now} if (now.total(), len(now)) == (QUOTA, users) else set()


class SessionHandler(socketserver.StreamRequestHandler):
    server: Service

    def handle(self) -> None:
        user = int(self.rfile.readline())
        self.server.add(user, 1)
        # To its end, or that of the server that holds it.
        self.rfile.read()
        self.server.add(user, -1)


QUOTA = 4


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_the_sessions_of_a_node_that_is_killed_go_to_the_others(
    tmp_path: Path, fake: Fake, victim: int
) -> None:
    """Three daemons use all sessions of a service, and two after a kill in mid-episode; never more of them, and no task is left out."""
    folders = {name: tmp_path / name for name in ("data", "model", "words")}
    for folder in folders.values():
        folder.mkdir()
    rows = [{"prompt": f"guess {n}=", "answer": "held", "reset": {"word": "held"}} for n in range(12)]
    (folders["data"] / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folders["model"] / "config.json").write_text('{"model_type": "qwen2"}')
    (folders["model"] / "tokenizer.json").write_text("{}")
    (folders["model"] / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with Service() as service:
        port = str(service.server_address[1])
        server = [sys.executable, str(HERE / "environment_server.py"), "{port}", str(folders["words"])]
        flags = (
            *("--data-path", str(folders["data"]), "--model", str(folders["model"]), "--iterations", "1"),
            *("--rl-phase", "rollout", "--rollout-split", "train-only", "--debug-mode", *FAST),
            *(f"engine.url={fake.url}", "engine.api_key_env=VLLM_API_KEY", "engine.max_model_len=256"),
            *("rollout.tasks=12", f"rollout.samples={SAMPLES}", "rollout.max_tokens=16"),
            # Otherwise the first that is there may take all tasks.
            *(f"rollout.agent={AGENT}:OpenEnv", f"environment.sessions={QUOTA}", "rollout.take_over=false"),
            f"environment.command={shlex.join([*server, '99', port])}",
        )
        with Cluster(tmp_path, 3, *flags, program="rl") as cluster:
            cluster.env = {rank: {"VLLM_API_KEY": "the key"} for rank in range(3)}
            cluster.start()
            before = until(lambda: service.full(users=3), cluster.said_by_all)
            cluster.kill(victim)
            after = until(lambda: service.full(users=2), cluster.said_by_all)
            assert not before & after
            (folders["words"] / "go").touch()
            left = [rank for rank in range(3) if rank != victim]
            assert cluster.wait(*left) == dict.fromkeys(left, 0), cluster.said_by_all()
            assert leftovers(cluster.log_path) == {}
            merged = load(cluster.paths.merged("train", 1))["trajectories"]
        assert service.most == QUOTA and service.users.total() == 0
    assert Counter(one["task_index"] for one in merged) == dict.fromkeys(range(12), SAMPLES)
    assert {(one["valid"], one["reward"]) for one in merged} == {(True, 1.0)}
