"""One engine over several nodes (`engine.nodes`): who forms one, how its parts are started, and that they end together."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, leftovers
from engine_bench import NEVER, behaviour, largest_gap, refusal, stand_in, write_model
from recording_node import RecordingNode
from test_assign import context, rl
from test_engine_parts import flags, plan
from test_engines_lost import engine_of
from waiting import until

from fsbarrier.context import POLICY, Span
from fsbarrier.engine import command
from fsbarrier.engine.engine import Engine, EngineInfo
from fsbarrier.engine.placement import placements
from fsbarrier.engine.span import HeadListener, Meeting
from fsbarrier.errors import ProgramFailed, TooFewNodes, UsageError
from fsbarrier.network.listening import LOOPBACK, listen
from fsbarrier.protocol.facts import Join, Member
from fsbarrier.settings.placement import consecutive
from fsbarrier.settings.resolve import resolve
from fsbarrier.trajectories import iter_trajectories, scan_rank_file


def test_consecutive_nodes_form_groups_and_what_is_left_over_is_in_none() -> None:
    assert consecutive([4, 0, 2, 7], 2) == [(0, 2), (4, 7)]
    assert consecutive([4, 0, 2, 7, 5], 3) == [(0, 2, 4)]
    assert consecutive([3, 1], 1) == [(1,), (3,)]
    assert consecutive([3], 2) == []


def joined(ranks: Sequence[int], **hosts: str) -> dict[int, Join]:
    """Their joins; all are on one host, except those that are named."""
    offer = {POLICY: {"port": 7, "key": "k"}}
    return {
        r: Join(r, 1 + r, "h", 0, hosts.get(f"node{r}", "host"), (f"10.0.0.{r}",), engines=offer)
        for r in ranks
    }


def of_run(ranks: Sequence[int], own: int, nodes: int = 2, **hosts: str) -> Any:
    """What a node of a run over groups of two sees."""
    chosen: dict[str, Any] = {"num_nodes": 5, "engine.nodes": nodes, "engine.tensor_parallel_size": 2}
    settings = resolve([], {**chosen, "rank_weights": (1.0,) * 5}, cross_checks=False)
    members = tuple(Member(r, 1 + r) for r in ranks)
    return context(
        settings=settings, members=members, node_rank=own, joins=joined(ranks, **hosts), leader=ranks[0]
    )


def test_the_first_of_a_group_rolls_out_the_others_hold_their_part_and_those_left_over_nothing() -> None:
    ranks = (0, 1, 3, 4)
    ctx = of_run(ranks, 0)
    assert ctx.engine_groups == [(0, 1), (3, 4)] and set(ctx.samplers) == {0, 1, 3, 4}
    decision = rl.assigned(ctx)
    assert set(decision.shares) == {0, 3} and all(decision.shares.values())
    part = RecordingNode(of_run(ranks, 4))
    assert rl.rollout_share(part, decision) is None and not part.specs
    (serve,) = part.served
    assert serve.span is not None
    assert serve.span == Span(((3, 4), (4, 5)), 1, LOOPBACK, 7, "k", (2, 3, 1))
    assert serve.span.turn == (2, 3, 1) and "'k'" not in repr(serve.span)
    head = RecordingNode(of_run(ranks, 3))
    rl.rollout_share(head, decision)
    assert len(head.served) == len(head.specs) == 1
    # On several hosts, the head is found at its addresses.
    elsewhere = of_run(ranks, 4, node4="another").span
    assert elsewhere is not None and elsewhere.addresses == ("10.0.0.3",)
    # Where the head has nothing to do, nobody starts an engine.
    idle = replace(decision, shares={0: [1], 3: []})
    nobody = RecordingNode(of_run(ranks, 4))
    assert rl.rollout_share(nobody, idle) is None
    left_over = of_run((0, 1, 3), 3)
    assert left_over.engine_groups == [(0, 1)]
    alone = RecordingNode(left_over)
    assert rl.rollout_share(alone, rl.assigned(left_over)) is rl.start_engine(alone) is None
    assert not nobody.served and not alone.served
    with pytest.raises(TooFewNodes, match=r"engine\.nodes=2: fewer nodes are left"):
        rl.assigned(of_run((3,), 3))
    assert of_run(ranks, 3, nodes=1).span is None


def test_every_part_gets_vllms_own_arguments_for_several_nodes(tmp_path: Path) -> None:
    whole = plan(write_model(tmp_path / "m"), tensor_parallel_size=2)
    met = Meeting(2, 0, "127.0.0.1", 7007, "127.0.0.1", 5)
    head = command.argv(replace(whole, meeting=met))
    part = command.argv(replace(whole, meeting=replace(met, place=1)))
    assert [word for word in part if word not in head] == ["1", "--headless"]
    found = flags(head)
    assert (found["--nnodes"], found["--node-rank"]) == ("2", "0")
    assert (found["--master-addr"], found["--master-port"]) == ("127.0.0.1", "7007")
    assert (found["--tensor-parallel-size"], found["--distributed-executor-backend"]) == ("2", "mp")
    env = command.environment(replace(whole, meeting=met), {"NCCL_SOCKET_IFNAME": "ib0"}, "key")
    assert (env["VLLM_HOST_IP"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "--nnodes" not in command.argv(whole)


def test_a_part_has_its_share_of_the_accelerators(tmp_path: Path) -> None:
    from test_engine_parts import devices

    settings = resolve([], {"engine.nodes": 2, "engine.tensor_parallel_size": 8}, cross_checks=False).engine
    (placed,) = placements(settings, devices(8), {}, [0])
    assert placed["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    with pytest.raises(UsageError, match=r"exceeds this node's 3 accelerators times engine\.nodes=2; use 6"):
        placements(settings, devices(3), {}, [0])


# --- the parts find each other, and end together ------------------------------------------------------------------------------


class Pair:
    """Two nodes' engines that are one. Their servers are fake_vllm.py, which knows of no other part."""

    def __init__(self, folder: Path) -> None:
        python, chosen = stand_in(folder), {"engine.nodes": 2, "engine.tensor_parallel_size": 2}
        settings = resolve([], chosen, cross_checks=False).engine
        self.listening = listen(LOOPBACK)
        head_listener = HeadListener(self.listening)
        offer = head_listener.offer
        self.span = Span(((3, 1), (4, 2)), 0, LOOPBACK, int(offer["port"]), str(offer["key"]), (1, 1, 2))
        self.turns = itertools.count()
        self.head, self.part = self.engines = [
            Engine(
                settings,
                log_file=folder / f"log{n}",
                work_dir=folder / f"work{n}",
                python=python,
                head_listener=head_listener if n == 0 else None,
            )
            for n in (0, 1)
        ]

    def serve(self, model: Path, version: int, cancel: threading.Event = NEVER) -> list[EngineInfo]:
        span = replace(self.span, turn=(1, next(self.turns), 2))
        with ThreadPoolExecutor(2) as threads:
            calls = [
                threads.submit(engine.ensure, model, version, cancel=cancel, span=replace(span, place=place))
                for place, engine in enumerate(self.engines)
            ]
        return [call.result() for call in calls]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("FAKE_VLLM", behaviour(tmp_path))
    made = Pair(tmp_path)
    yield made
    for engine in made.engines:
        engine.stop()
    for one in made.listening:
        one.close()


def test_a_part_starts_with_its_head_keeps_through_new_weights_and_ends_with_any_of_them(
    tmp_path: Path, pair: Pair
) -> None:
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    head, part = pair.serve(first, 0)
    assert (head.action, part.action) == ("started", "part")
    logs = [(tmp_path / f"log{n}").read_text().splitlines() for n in (0, 1)]
    told = [next(line for line in log if " start vllm: " in line) for log in logs]
    seeds = {line.partition("--seed ")[2].split()[0] for line in told}
    assert len(seeds) == 1 and [("--headless" in line) for line in told] == [False, True]
    again = pair.serve(second, 1)
    assert [one.pid for one in again] == [head.pid, part.pid] and again[0].action == "reloaded"
    asked = [json.loads(line) for line in (tmp_path / "fake" / "requests.jsonl").read_text().splitlines()]
    # vLLM's own call reaches all parts, so the folder is one that all nodes can read.
    assert asked[-3]["kwargs"] == {"weights_path": str(second)}
    infos = [head, part]
    for place, other in ((1, pair.head), (0, pair.part)):
        killed = infos[place].pid
        os.kill(killed, signal.SIGKILL)
        until(lambda other=other: other.ended, lambda: "the other part still runs")
        assert "was ended because its part on another node ended" in other.how_it_ended()
        infos = pair.serve(second, 1)
        assert infos[0].action == "started" and killed not in [one.pid for one in infos]
    # A head that has to be started again takes a new part.
    tied = write_model(tmp_path / "c", tied=True)
    head, part = pair.serve(tied, 2)
    assert head.note.startswith("restarted: its output head is tied") and part.pid != infos[1].pid
    pair.head.stop()
    until(lambda: pair.part.ended, lambda: "it outlives its head")


def test_what_comes_without_the_key_is_sent_away_and_what_does_not_come_is_named(
    tmp_path: Path, pair: Pair
) -> None:
    model, cancel = write_model(tmp_path / "a"), threading.Event()
    with socket.create_connection((LOOPBACK[0], pair.span.port)) as stranger:
        stranger.sendall(
            json.dumps({"key": "", "nodes": [[3, 1], [4, 2]], "place": 1, "reached": []}).encode()
        )
        stranger.sendall(b"\n")
        assert pair.serve(model, 0)[0].action == "started"
        assert stranger.recv(1) == b""
    assert model.exists() and not cancel.is_set()


def test_a_node_that_does_not_come_is_named(tmp_path: Path, pair: Pair) -> None:
    pair.head.settings = replace(pair.head.settings, start_timeout_s=0.3)
    with pytest.raises(
        ProgramFailed, match=r"engine\.nodes=2: node 4 did not come in time \(engine\.start_timeout_s\)"
    ):
        pair.head.ensure(write_model(tmp_path / "a"), 0, cancel=NEVER, span=pair.span)


# --- mistakes -----------------------------------------------------------------------------------------------------------------

GOOD = ("--num-nodes", "4", "--min-nodes", "2", "engine.nodes=2", "engine.tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-nodes", "1", "--min-nodes", "1"], "engine.nodes=2: the run has only 1 node"),
        (["placement.rollout=node:3"], "engine.nodes=2: placement.rollout=node:3 has fewer nodes"),
        (
            ["engine.tensor_parallel_size=3"],
            "engine.tensor_parallel_size=3: must be a multiple of engine.nodes=2",
        ),
        (
            ["engine.replicas=2"],
            "engine.replicas=2: an engine over several nodes is the only one on each; drop it",
        ),
        (
            ["checkpoint.weights_dir=/tmp"],
            "checkpoint.weights_dir=/tmp: engine.nodes=2 has all of an engine's",
        ),
        (["--debug-mode"], "engine.nodes=2: the server is not this run's; drop --debug-mode"),
        (["engine.url=localhost"], "engine.nodes=2: the server is not this run's; drop engine.url=localhost"),
    ],
)
def test_a_mistake_ends_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in refusal(tmp_path, [*GOOD, *words])


# --- the real vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_real_vllm_two_nodes_roll_out_as_one_and_go_on_when_either_part_is_killed(
    tmp_path: Path,
) -> None:
    """The new weights reach both parts: log-probabilities of the second iteration are those that transformers computes with them."""
    flags: tuple[str, ...] = (
        "--iterations",
        "2",
        "--eval-interval",
        "0",
        "--min-nodes",
        "2",
        "engine.nodes=2",
    )
    flags += ("engine.tensor_parallel_size=2", "rollout.tasks=128", "rollout.samples=8")
    with Cluster(tmp_path, 2, *flags, program="rl") as cluster:
        cluster.start()
        for iteration, victim in ((1, 1), (2, 0)):
            wait_for_groups(cluster, iteration)
            os.kill(engine_of(cluster.processes[victim].pid), signal.SIGKILL)
        assert cluster.wait(deadline_s=900) == {0: 0, 1: 0}, cluster.said(0)
        events = cluster.events()
        assert leftovers(cluster.log_path) == {}
    ready = Counter((e["node_rank"], e["engine_action"]) for e in events if e["event"] == "engine_ready")
    assert ready[0, "started"] == 3 and ready[0, "reloaded"] == 2, ready
    assert {rank for rank, action in ready if action == "part"} == {1}
    generations = [e for e in events if e["event"] == "generation_started"]
    assert max(e["generation"] for e in generations) == 3
    for iteration, folder in ((1, model_of(cluster, 0)), (2, model_of(cluster, 1))):
        found = [*iter_trajectories(cluster.paths.merged("train", iteration))]
        groups = Counter(one["task_index"] for one in found)
        assert len(groups) == 128 and {*groups.values()} == {8}
        assert {one["node_rank"] for one in found} == {0}
        assert largest_gap(folder, found[::16], 1.0) < 1e-4


def model_of(cluster: Cluster, version: int) -> Path:
    """The folder of a policy version; 0: of the model that the run began with."""
    if not version:
        return Path(json.loads(cluster.paths.record.read_text())["model"])
    (folder,) = cluster.paths.checkpoints.glob(f"policy-{version:06d}.*")
    return folder / "model"


def wait_for_groups(cluster: Cluster, iteration: int) -> None:
    """Until some groups of an iteration, but not all, are on disk."""

    def under_way() -> bool:
        parts = cluster.paths.trajectories("train").glob(f"*iteration{iteration}_*")
        return any(len(scan_rank_file(part).groups) > 0 for part in parts)

    until(
        under_way,
        lambda: cluster.said(0),
        deadline_s=400,
        lives=lambda: cluster.processes[0].poll() is None,
    )
