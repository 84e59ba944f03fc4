"""Models beside the policy: a judge, a reward model, a teacher. Their servers are reached, restarted, and put to sleep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from complete_runs import Bench
from engine_bench import NEVER, behaviour, make_model, refusal, stand_in, write_model
from waiting import until

from fsbarrier.coordination.run_rules import roles
from fsbarrier.data.tasks import Task
from fsbarrier.engine.frozen import MOST_DEATHS, FrozenEngine
from fsbarrier.engine.replicas import Replicas
from fsbarrier.network.listening import LOOPBACK
from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.state import Role
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rewards.score import Answer, Score
from fsbarrier.run.admission import check_nodes
from fsbarrier.run.fingerprint import Fingerprint
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.settings.sections import FrozenEngineSettings, JudgeSettings, Settings
from fsbarrier.trajectories import load

TASK = Task(0, "t", "how much?", "4", {})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrozenEngine]:
    """An engine of two replicas, which serve."""
    monkeypatch.setenv("FAKE_VLLM", behaviour(tmp_path))
    replicas = Replicas(
        FrozenEngineSettings(replicas=2, start_timeout_s=240.0),
        log_dir=tmp_path / "logs",
        work_dir=tmp_path / "work",
        python=stand_in(tmp_path),
        frozen="rm",
    )
    engine = FrozenEngine(replicas, LOOPBACK)
    infos = engine.ensure(write_model(tmp_path / "model"), None, threads=2, cancel=NEVER)
    assert [info.action for info in infos] == ["started"] * 2
    yield engine
    engine.stop()


def classified(engine: FrozenEngine, *answers: Sequence[int], kind: str = "engines.rm") -> list[Score]:
    async def ask() -> list[Score]:
        judge = JudgeSettings(model="engines.rm")
        reward = open_reward(kind, judge=judge, engines={"rm": engine.address})
        try:
            return await reward.score_group(TASK, [Answer("4", None, ids) for ids in answers])
        finally:
            await reward.close()

    return asyncio.run(ask())


def pids(engine: FrozenEngine) -> list[int]:
    return [one._server.child.pid for one in engine.replicas.engines if one._server is not None]


def kill_all(engine: FrozenEngine) -> None:
    until(lambda: engine._reviving is None or engine._reviving.done())
    for pid in pids(engine):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: all(one.ended for one in engine.replicas.engines))


def test_any_client_reaches_the_servers_with_the_key_only(engine: FrozenEngine, tmp_path: Path) -> None:
    address = engine.address
    assert address.base_url == f"http://127.0.0.1:{engine.port}/v1" and address.model == "rm"
    assert httpx.get(f"{address.base_url}/models", trust_env=False).status_code == 401
    with httpx.Client(headers={"Authorization": f"Bearer {address.api_key}"}, trust_env=False) as client:
        assert client.get(f"{address.base_url}/models").json()["data"][0]["root"] == str(tmp_path / "model")
    assert [one.reward for one in classified(engine, [1] * 7, [1])] == [0.7, 0.1]
    assert [one.reward for one in classified(engine, [1], kind="judge")] == [0.5]
    asked = [json.loads(line) for line in (tmp_path / "fake" / "requests.jsonl").read_text().splitlines()]
    assert asked[0]["use_activation"] is False and asked[0]["input"] == [[1] * 7, [1]]
    # Nothing listens beyond this machine.
    assert [one.getsockname()[0] for one in engine._listening] == ["127.0.0.1"]


def test_a_request_waits_for_a_server_that_has_died(engine: FrozenEngine) -> None:
    before = pids(engine)
    deadly = list(map(ord, "!die"))
    assert [one.reward for one in classified(engine, deadly, [1])] == [0.4, 0.1]
    kill_all(engine)
    (score,) = classified(engine, [1] * 3)
    assert (score.reward, score.error) == (0.3, None)
    assert not {*before} & {*pids(engine)} and engine.failure == ""


def test_a_restart_is_told_with_the_last_lines_and_shown(engine: FrozenEngine, tmp_path: Path) -> None:
    kill_all(engine)
    assert engine.status == {"states": ["down", "down"], "restarts": 0}
    assert classified(engine, [1])[0].error is None
    until(lambda: engine.status["states"] == ["up", "up"])
    until(lambda: engine.status["restarts"] == 2)
    assert engine.status["why"].startswith("vLLM was ended by signal 9")
    first, second = engine.news()
    told = {"event": "engine_restarted", "engine": "rm", "why": engine.status["why"]}
    assert told.items() <= first.items() and told.items() <= second.items()
    assert str(tmp_path / "logs" / "vllm-rm.log") in first["log"][0] and first["log"][1:]
    assert engine.news() == []


def test_replicas_that_die_in_turn_are_not_counted_together(engine: FrozenEngine) -> None:
    """Two replicas that die MOST_DEATHS times each are as many deaths of each as one engine may have."""
    for _ in range(MOST_DEATHS):
        for number in (0, 1):
            until(lambda: engine._reviving is None or engine._reviving.done())
            dying = engine.replicas.engines[number]
            os.kill(pids(engine)[number], signal.SIGKILL)
            until(lambda dying=dying: dying.ended)
            engine._sockets = engine._sockets[number:][:1]
            assert classified(engine, [1])[0].error is None
    until(lambda: engine.status["restarts"] == 2 * MOST_DEATHS)
    assert engine.failure == ""
    # The next rollout begins to count anew.
    engine.ensure(engine._folder, None, threads=2, cancel=NEVER)
    kill_all(engine)
    assert classified(engine, [1])[0].error is None and engine.failure == ""


def test_an_engine_that_always_dies_is_given_up(engine: FrozenEngine) -> None:
    url, key = f"{engine.address.root}/health", {"Authorization": f"Bearer {engine.address.api_key}"}
    for death in range(MOST_DEATHS + 1):
        kill_all(engine)
        if death < MOST_DEATHS:
            assert httpx.get(url, headers=key, trust_env=False, timeout=240.0).status_code == 200
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        httpx.get(url, headers=key, trust_env=False, timeout=240.0)
    assert engine.failure.startswith("engines.rm: engine 0 died 4 times: vLLM was ended by signal 9")


MINE = """
import httpx

async def ask(engine):
    async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {engine.api_key}"}) as client:
        body = {"model": engine.model, "messages": [{"role": "user", "content": "?"}]}
        answer = await client.post(f"{engine.base_url}/chat/completions", json=body)
    return answer.json()["choices"][0]["message"]["content"]

async def asks(prompt, response, answer, metadata, engines):
    return float((await ask(engines["wise"])).split()[-1]) / 2

class Asks:
    async def run(self, task, client):
        await client.complete(task.prompt)
        return client.trajectory(said=await ask(client.engines["wise"]))
"""


# --- whole runs ---------------------------------------------------------------------------------------------------------------


def test_rewards_of_frozen_engines_and_one_that_dies(bench: Bench, tmp_path: Path) -> None:
    rm = tmp_path / "rm"
    write_model(rm, architectures=["Qwen2ForSequenceClassification"])
    (rm / "tokenizer.json").write_text("{}")
    tasks = [{"prompt": f"{'21' * (n + 1)}!mixed{'!die' * n}=", "answer": "x"} for n in range(2)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "mine.py").write_text(MINE)
    words = (
        f"reward.kind=engines.rm,judge,{tmp_path}/mine.py:asks",
        f"rollout.agent={tmp_path}/mine.py:Asks",
    )
    words += ("judge.model=engines.wise", f"engines.rm.model={rm}", "placement.rm=all", "eval_interval=0")
    words += (f"engines.wise.model={bench.model}", f"data_path={tmp_path}", f"model={bench.model}")
    ended = bench.run(tmp_path / "run", "--iterations", "1", *words).check()
    trajectories = load(RunPaths(tmp_path / "run").merged("train", 1))["trajectories"]
    assert len(trajectories) == 4
    for one in trajectories:
        assert one["valid"] and one["reward"] == pytest.approx(len(one["token_ids"]) / 10 + 0.75)
        assert one["reward_parts"] == {
            "rm": pytest.approx(len(one["token_ids"]) / 10),
            "judge": 0.5,
            "asks": 0.25,
        }
        assert one["metadata"]["said"] == "Well.\n0.5"
    ready = [(event.get("engine"), event["engine_action"]) for event in ended.events("engine_ready")]
    assert sorted(map(str, ready)) == [
        "('rm', 'started')",
        "('wise', 'started')",
        "(None, 'reloaded')",
        "(None, 'started')",
    ]
    assert not ended.events("work_failed")


def test_a_node_that_rolls_out_reaches_the_engine_of_another(bench: Bench, tmp_path: Path) -> None:
    """It is offered in the node's join, with its key; an engine that is everywhere is offered to nobody."""
    words = (
        "placement.rollout=node:0",
        "placement.update=node:0",
        "placement.wise=node:1",
        "reward.kind=judge",
    )
    words += (
        "judge.model=engines.wise",
        f"engines.wise.model={bench.model}",
        f"engines.own.model={bench.model}",
    )
    log_path = tmp_path / "run"
    bench.run(log_path, "--iterations", "1", *words, "eval_interval=0", nodes=2).check()
    paths = RunPaths(log_path)
    trajectories = load(paths.merged("train", 1))["trajectories"]
    assert {(one["node_rank"], one["reward"]) for one in trajectories} == {(0, 0.5)}
    logs = {rank: sorted(one.name for one in paths.node_logs(1, rank).glob("vllm*")) for rank in (0, 1)}
    assert logs == {0: ["vllm-own.log", "vllm.log"], 1: ["vllm-wise.log"]}
    joins = [PosixStore().read(paths.join(rank, 1), Join) for rank in (0, 1)]
    assert [join and [*join.engines] for join in joins] == [[], ["wise"]]


def test_a_lost_node_takes_its_engines_along() -> None:
    engines = {
        "wise": FrozenEngineSettings(model="M", placement="node:1"),
        "own": FrozenEngineSettings(model="M"),
    }
    placed = {"placement.rollout": "node:0", "placement.update": "all", "num_nodes": 3}
    assert roles(0, Settings(engines=engines), placed) == [
        Role("placement.rollout", frozenset({0}), asked="=node:0"),
        Role("placement.wise", frozenset({1}), asked="=node:1"),
    ]


@pytest.mark.parametrize(("ranges", "holders"), [("node:0-1", {0, 1}), ("all", {0, 1, 2})])
def test_an_engine_over_nodes_needs_as_many_of_them(ranges: str, holders: set[int]) -> None:
    began = Settings().with_values({"engine.nodes": 2, "engine.tensor_parallel_size": 2})
    placed = {"placement.rollout": ranges, "placement.update": "all", "num_nodes": 3}
    asked = f"={ranges} for engine.nodes=2"
    assert roles(0, began, placed) == [Role("placement.rollout", frozenset(holders), 2, asked)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["placement.rolout=all"], "placement.rolout=all: there is no engine rolout; give engines.rolout.model, or name a role"),
        (["engines.x.model=M", "program=ping"], "engines.x: program ping has no model; drop it"),
        (["placement.inference=all"], "placement.inference=all: there is no such stage: the trainer computes the log-probabilities"),
        (["engines.x.replicas=1"], "engines.x: there is no engine x; give engines.x.model"),
        (["engines.x.model=/nowhere"], "engines.x.model=/nowhere: no such folder"),
        (["judge.model=engines.wise"], "judge.model=engines.wise: there is no engine wise; give engines.wise.model"),
        (["reward.kind=engines.rm"], "reward.kind=engines.rm: there is no engine rm; give engines.rm.model"),
        (["engines.x.model=M", "placement.x=node:1"], "placement.x=node:1: there is no node 1; nodes are 0 to 0"),
        (["engines.x.model=M", "placement.x=b"], "placement.x=b: must be all, accelerators such as"),
        (["engines.a b.model=M"], "the name of a set or an engine may have letters, digits, _ and -"),
        (["engines.x.model=M", "reward.kind=engines.x"], "has no classifier head"),
        (["engines.x.model=M", "engines.x.extra_args=-tp 2"], "engines.x.extra_args: -tp: not supported; use engines.x."),
        (["engines.rm.model=RM", "judge.model=engines.rm"], "RM has a classifier head and writes no text"),
        (["engines.x.model=M", "reward.kind=judge", "judge.model=engines.x", "judge.images=all"], "M takes none (no vision_config)"),
        (["judge.images=last"], "judge.images=last: is for reward.kind=judge, and this run has reward.kind=exact"),
        (["engines.other.model=OTHER", "reward.kind=engines.other"], "has another number for 'a' than that of"),
        (["engines.x.model=M", "judge.model=engines.x", "judge.url=http://h/v1"], "judge.model=engines.x: contradicts judge.url=http://h/v1"),
    ],
)  # fmt: skip
def test_a_mistake_ends_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    tokens = {"M": {"a": 0, "b": 1}, "RM": {"a": 0, "b": 1, "c": 2}, "OTHER": {"a": 1, "b": 0}}
    for name, vocabulary in tokens.items():
        kind = "ForCausalLM" if name == "M" else "ForSequenceClassification"
        write_model(tmp_path / name, architectures=[f"Qwen2{kind}"])
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert said in refusal(tmp_path, words)


def test_engines_on_one_accelerator_must_fit_together() -> None:
    def refused(**changes: object) -> list[str]:
        values = {f"engines.judge.{name}": value for name, value in {"model": "M", **changes}.items()}
        settings = Settings(num_nodes=4, rank_weights=(1.0,) * 4).with_values(
            {"placement.rollout": "0-19", "placement.update": "24-31", "allow_idle": True, **values}
        )
        node = replace(Fingerprint(), accelerators=[("nvidia X", 80 * 2**30, 0)] * 8)
        found = check_nodes(dict.fromkeys(range(4), node), {}, settings, 0)
        return [one.found for one in found if one.refused]

    assert refused(placement="20-23", tensor_parallel_size=4) == []
    (said,) = refused()
    assert said == (
        "engine.gpu_memory_utilization=0.85 and engines.judge.gpu_memory_utilization=0.85 are more than accelerator 0 of node 0 has; "
        "lower them, or place the engines apart"
    )
    assert refused(gpu_memory_utilization=0.15) == []
    assert refused(placement="0-7", replicas=1, gpu_memory_utilization=0.15) == []
    (said,) = refused(placement="20-23", tensor_parallel_size=8)
    assert said.startswith("node 2: engines.judge.tensor_parallel_size=8: exceeds this node's 4 accelerators")
    assert refused(placement="30-33") == ["there is no accelerator 32; 4 nodes with 8 each have 0 to 31"]


# --- the real vLLM ------------------------------------------------------------------------------------------------------------


def make_classifier(folder: Path) -> Path:
    """A tiny reward model with random weights."""
    import torch
    from transformers import AutoConfig, Qwen3ForSequenceClassification

    make_model(folder, 5, architecture="Qwen3")
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reward_model_scores_as_transformers_does(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3ForSequenceClassification

    folder = make_classifier(tmp_path / "rm")
    replicas = Replicas(
        FrozenEngineSettings(max_model_len=64, start_timeout_s=600.0),
        log_dir=tmp_path / "logs",
        work_dir=tmp_path / "work",
        frozen="rm",
    )
    engine = FrozenEngine(replicas, LOOPBACK)
    answers = [[2, 3, 4, 5], [7] * 20, list(range(2, 18)), [9]]
    try:
        engine.ensure(folder, None, threads=1, cancel=NEVER)
        found = classified(engine, *answers)
    finally:
        engine.stop()
    model = Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = [float(model(torch.tensor([ids])).logits[0, 0]) for ids in answers]
    assert max(map(abs, expected)) > 0.1
    assert [one.error for one in found] == [None] * 4
    assert [one.reward for one in found] == pytest.approx(expected, abs=1e-4)
