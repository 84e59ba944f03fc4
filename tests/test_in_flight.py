"""Weights that come while the engine answers (`rollout.in_flight`): what runs goes on, and each token's policy version is known."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from complete_runs import Bench, write_tasks
from engine_bench import NEVER, behaviour, make_model, refusal, served, stand_in, write_model
from test_rollout import (
    KEY,
    SAMPLES,
    Fake,
    assert_one_line,
    finish,
    make_spec,
    rolled_out,
    start,
)
from waiting import until

from fsbarrier.engine.client import EngineClient
from fsbarrier.engine.engine import Engine
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.resolve import resolve
from fsbarrier.trajectories import load

IN_FLIGHT = (
    "placement.rollout=node:1",
    "placement.update=node:0",
    "rollout.ahead=1",
    "rollout.in_flight=true",
)
AGENT = """
from fsbarrier.rollouts.agents import Trajectory

class Twice:
    async def run(self, task, client):
        messages = [{"role": "user", "content": "!say ab!!"}]
        messages.append((await client.chat(messages)).message)
        messages.append({"role": "user", "content": "!newer!say cd!!"})
        await client.chat(messages)
        return Trajectory(reward=1.0)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Its server is fake_vllm.py."""
    monkeypatch.setenv("FAKE_VLLM", behaviour(tmp_path))
    settings = resolve([], {}, cross_checks=False).engine
    made = Engine(settings, log_file=tmp_path / "log", work_dir=tmp_path / "work", python=stand_in(tmp_path))
    yield made
    made.stop()


def test_running_requests_are_kept_and_a_server_that_cannot_is_left_as_it_is(
    tmp_path: Path, engine: Engine
) -> None:
    first = engine.ensure(write_model(tmp_path / "a"), 4, cancel=NEVER)
    newer = write_model(tmp_path / "b")
    assert engine.ensure(newer, 5, cancel=NEVER, in_flight=True).action == "reloaded"
    lines = (tmp_path / "fake" / "requests.jsonl").read_text().splitlines()
    asked = [(one["path"], one.get("new_version")) for one in map(json.loads, lines)]
    assert asked == [
        ("/update_weight_version", "4"),
        ("/pause?mode=keep", None),
        ("/collective_rpc", None),
        ("/update_weight_version", "5"),
        ("/resume", None),
    ]
    other = write_model(tmp_path / "c", width=16)
    kept = engine.ensure(other, 6, cancel=NEVER, in_flight=True)
    assert (kept.action, kept.pid, served(kept)) == ("kept", first.pid, str(newer))
    assert kept.note == "keeps its weights: the new weights have another configuration or other shapes"
    # In its own row, it is restarted for them.
    assert engine.ensure(other, 6, cancel=NEVER).action == "started"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.ahead=0"], ": requires rollout.ahead=1 (this run: rollout.ahead=0)"),
        (
            ["rollout.reproducible=true"],
            ": answers would depend on when the weights come; drop rollout.reproducible",
        ),
        (["--debug-mode"], ": the server is not this run's; drop --debug-mode"),
        (["engine.url=localhost"], ": the server is not this run's; drop engine.url=localhost"),
    ],
)
def test_a_mistake_ends_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in refusal(tmp_path, ["--num-nodes", "2", *IN_FLIGHT, *words])


def label(fake: Fake, version: int) -> None:
    body = {"new_version": str(version)}
    EngineClient(fake.url, KEY).call("POST", "/update_weight_version", body, timeout_s=30)


@pytest.mark.parametrize("agent", [False, True], ids=["answers", "an agent's turns"])
def test_each_token_is_kept_with_the_policy_version_that_sampled_it(
    tmp_path: Path, fake: Fake, agent: bool
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    label(fake, 4)
    own = {"rollout.agent": f"{tmp_path / 'agent.py'}:Twice"} if agent else {}
    prompts = ["zyx!newer=", [{"role": "user", "content": "ba="}]]
    spec = make_spec(tmp_path, fake.url, prompts, in_flight=True, sampling={"max_tokens": 8}, **own)
    process = start(spec)
    waiting = fake.folder / f"newer-{2 * SAMPLES if agent else 1}"
    until(waiting.exists, lambda: finish(process, spec), lives=lambda: process.poll() is None)
    label(fake, 5)
    done = finish(process, spec)
    assert (done.code, done.stderr) == (0, "")
    groups = rolled_out(tmp_path)
    assert {len(group) for group in groups.values()} == {SAMPLES} and len(groups) == 2
    everything = [one for group in groups.values() for one in group]
    for one in everything:
        assert one["policy_version"] == 4
        versions, mask = one["policy_versions"].tolist(), one["loss_mask"].tolist()
        assert one["policy_versions"].typecode == "i" and len(versions) == len(one["token_ids"])
        assert [version == -1 for version in versions] == [not sampled for sampled in mask]
        sampled = [version for version in versions if version >= 0]
        # It never goes back.
        assert sampled == sorted(sampled)
    counted = Counter(version for one in everything for version in one["policy_versions"])
    assert counted[4] and counted[5] and {*counted} == {-1, 4, 5}
    if not agent:
        assert groups[0][0]["policy_versions"].tolist() == [-1] * len("zyx!newer=") + [4, 5, 5, 5]


def test_tokens_of_an_older_policy_than_the_work_began_with_are_refused(tmp_path: Path, fake: Fake) -> None:
    label(fake, 3)
    spec = make_spec(tmp_path, fake.url, ["ba="], in_flight=True)
    done = finish(start(spec), spec)
    assert done.code == 1
    assert_one_line(done.stderr, "policy version 3; these rollouts begin with version 4")
    assert rolled_out(tmp_path) == {}


@pytest.mark.torch
def test_a_run_takes_the_new_weights_while_it_rolls_out_ahead(bench: Bench, tmp_path: Path) -> None:
    """Each answer that is rolled out ahead waits, in the engine, for the update's weights; so the run ends only if they come meanwhile.

    They come while both groups are under way, so that each has tokens of two versions.
    """
    both = bench.folder / "fake" / "newer"
    both.write_text("2")
    data = write_tasks(tmp_path / "data")
    train = data / "train.jsonl"
    train.write_text(train.read_text().replace("!mixed", "!mixed!newer"))
    where = (f"data_path={data}", f"model={bench.model}", "--eval-interval", "0")
    try:
        ran = bench.run(tmp_path / "run", "--iterations", "3", *where, *IN_FLIGHT, nodes=2).check()
    finally:
        both.unlink()
    taken = [event for event in ran.events("engine_ready") if event.get("in_flight")]
    assert [(one["phase_name"], one["serving"], one["engine_action"]) for one in taken] == [
        ("update", 1, "reloaded"),
        ("update", 2, "reloaded"),
    ]
    # What they serve already is not loaded again.
    loaded = [e["serving"] for e in ran.events("engine_ready") if e["phase_name"] == "engine_start"]
    assert loaded == [3]
    for iteration in (1, 2, 3):
        found = load(RunPaths(tmp_path / "run").merged("train", iteration))["trajectories"]
        assert sorted(Counter(one["task_index"] for one in found).values()) == [2, 2]
        begun = max(0, iteration - 2)
        assert {one["policy_version"] for one in found} == {begun}
        sampled = {v for one in found for v in one.get("policy_versions", ()) if v >= 0}
        assert sampled == (set() if iteration == 1 else {begun, begun + 1})
    first, *ahead = [event["staleness"] for event in ran.events("batch_prepared")]
    assert first == 0 and all(0 < one < 1 for one in ahead), ahead
    assert [event["replayed"] for event in ran.events("batch_prepared")] == [0, 4, 4]


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_real_vllm_each_token_has_the_log_probability_of_its_own_version(tmp_path: Path) -> None:
    """Against transformers: before the new weights by the old model, and from then on, over all tokens so far, exactly by the new one."""
    import torch
    from transformers import AutoModelForCausalLM

    old, new = (make_model(tmp_path / f"model{seed}", seed, positions=1024, ends=False) for seed in (1, 2))
    chosen: dict[str, Any] = {"engine.max_model_len": 1024, "rollout.max_tokens": 900}
    settings = resolve([], chosen, cross_checks=False).engine
    engine = Engine(settings, log_file=tmp_path / "vllm.log", work_dir=tmp_path / "work", threads=1)
    try:
        info = engine.ensure(old, 4, cancel=threading.Event())
        served_by = [{"url": info.url, "api_key": info.api_key, "model": info.model}]
        sampling = {"samples": 2, "max_tokens": 900}
        spec = make_spec(
            tmp_path,
            info.url,
            ["abc=", "hgf=", "dd="],
            engine=served_by,
            in_flight=True,
            sampling=sampling,
            **chosen,
        )
        process, progress = start(spec), tmp_path / "progress.json"
        until(
            lambda: progress.exists() and json.loads(progress.read_text()).get("tokens_per_s", 0) > 0,
            lambda: finish(process, spec),
            lives=lambda: process.poll() is None,
        )
        reloaded = engine.ensure(new, 5, cancel=threading.Event(), in_flight=True)
        done = finish(process, spec)
    finally:
        engine.stop()
    assert reloaded.action == "reloaded", reloaded.note
    assert (done.code, done.stderr) == (0, "")
    models = {4: old, 5: new}
    policies = {v: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for v, p in models.items()}
    trajectories = [one for group in rolled_out(tmp_path).values() for one in group]
    assert len(trajectories) == 6
    spanning, gaps, apart = 0, [], []
    for one in trajectories:
        ids = torch.tensor(one["token_ids"].tolist())
        versions = torch.tensor(one["policy_versions"].tolist())[1:]
        told = torch.tensor(one["logprobs"].tolist())[1:]
        own = {}
        for version, policy in policies.items():
            with torch.no_grad():
                own[version] = torch.log_softmax(policy(ids[None]).logits[0, :-1], -1)
            own[version] = own[version].gather(1, ids[1:, None])[:, 0]
        spanning += {4, 5} <= {*versions.tolist()}
        for version, other in ((4, 5), (5, 4)):
            of = versions == version
            if of.any():
                gaps.append(float((own[version] - told)[of].abs().max()))
                apart += (own[other] - told)[of].abs().tolist()
    print(
        f"spanning {spanning}, largest gap {max(gaps):.1e}, to the other version {mean(apart):.2f}",
        file=sys.stderr,
    )
    assert spanning == 6
    assert max(gaps) < 1e-4 < 1 < mean(apart)
