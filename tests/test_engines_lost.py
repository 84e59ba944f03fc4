"""Engines that die in the middle of a rollout, alone or among several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, leftovers
from commands import typed
from test_rollout import KEY, SAMPLES, Fake, finish, groups_in, make_spec, rolled_out, run, start, start_fake
from waiting import until

from fsbarrier.trajectories import iter_trajectories, scan_rank_file


def restarted(fake: Fake, folder: Path, **mode: Any) -> Fake:
    """Another server at the address of one that has ended."""
    return start_fake(folder, port=int(fake.url.rpartition(":")[2]), **mode)


def awaits(folder: Path) -> str:
    """What a rollout says that it waits for."""
    return str(json.loads((folder / "progress.json").read_text()).get("awaits", ""))


def end(fake: Fake) -> None:
    fake.process.kill()
    fake.process.communicate()


@pytest.mark.parametrize("agent", [False, True])
def test_a_server_of_others_that_is_started_again_costs_only_what_was_in_flight(
    tmp_path: Path, agent: bool
) -> None:
    fake = start_fake(tmp_path / "fake")
    changes: dict[str, Any] = {"engine.url": fake.url, "engine.start_timeout_s": 60.0}
    if agent:
        (tmp_path / "mine.py").write_text(AGENT)
        changes |= {"rollout.agent": f"{tmp_path}/mine.py:Twice", "rollout.max_tokens": 8}
    spec = make_spec(tmp_path, fake.url, ["ba=", "dc!gate=", "fe!gate="], **changes)
    process, part = start(spec), tmp_path / "trajectories" / "part"
    at_gate = fake.folder / "at-gate"
    until(lambda: at_gate.exists() and groups_in(part) == 1, lives=lambda: process.poll() is None)
    end(fake)
    said = until(lambda: awaits(tmp_path), lives=lambda: process.poll() is None)
    assert f"the engine at {fake.url} does not answer" in said
    assert said.endswith("waiting up to 60 s (engine.start_timeout_s) until it answers")
    again = restarted(fake, tmp_path / "again")
    (again.folder / "gate").touch()
    done = finish(process, spec)
    try:
        assert (done.code, done.stderr) == (0, "")
        assert awaits(tmp_path) == ""
        assert done.result["groups"] == 3 and done.result["invalid"] == 0
        assert {len(group) for group in rolled_out(tmp_path).values()} == {SAMPLES}
        assert done.result["reward_mean"] == (pytest.approx(0.0) if agent else 1.0)
        asked = [str(request["prompt"]) for request in again.requests()]
        assert asked and not any("ba=" in prompt for prompt in asked)
    finally:
        end(again)


AGENT = """
class Twice:
    async def run(self, task, client):
        messages = list(task.messages)
        for _ in range(2):
            messages += [(await client.chat(messages)).message, {"role": "user", "content": "and?"}]
"""

REWARD = """
from pathlib import Path

async def reward(prompt, response, answer, metadata):
    Path(metadata["gate"]).touch()
    return 1.0
"""


def test_rewards_are_computed_while_other_rollouts_go_on(tmp_path: Path) -> None:
    """The second task is answered only once the first has been judged."""
    fake = start_fake(tmp_path / "fake")
    (tmp_path / "mine.py").write_text(REWARD)
    spec = make_spec(tmp_path, fake.url, ["ba=", "dc!gate="], **{"reward.kind": f"{tmp_path}/mine.py:reward"})
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    gate = str(fake.folder / "gate")
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({**line, "gate": gate}) + "\n" for line in lines)
    )
    try:
        done = run(spec)
    finally:
        end(fake)
    assert done.code == 0 and done.result["reward_mean"] == 1.0 and done.result["groups"] == 2


@pytest.mark.slow
def test_a_node_says_at_once_which_server_of_the_user_it_waits_for(tmp_path: Path) -> None:
    """So does `status`. It goes on when the server is back."""
    fake, folders = start_fake(tmp_path / "fake"), {name: tmp_path / name for name in ("data", "model")}
    for folder in folders.values():
        folder.mkdir()
    rows = [{"prompt": prompt, "answer": "x"} for prompt in ("ba=", "dc!gate=")]
    (folders["data"] / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folders["model"] / "config.json").write_text('{"model_type": "qwen2"}')
    (folders["model"] / "tokenizer.json").write_text("{}")
    (folders["model"] / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    flags = (
        *("--data-path", str(folders["data"]), "--model", str(folders["model"]), "--iterations", "1"),
        *("--rl-phase", "rollout", "--rollout-split", "train-only", "--debug-mode", f"engine.url={fake.url}"),
        *("engine.api_key_env=VLLM_API_KEY", "engine.max_model_len=256", "rollout.tasks=2"),
        *(f"rollout.samples={SAMPLES}", "rollout.max_tokens=16"),
    )
    with Cluster(tmp_path, 1, *flags, program="rl") as cluster:
        cluster.env = {0: {"VLLM_API_KEY": KEY}}
        cluster.start()
        until((fake.folder / "at-gate").exists, cluster.said_by_all)
        end(fake)
        waits = f"train_rollout: the engine at {fake.url} does not answer"
        until(lambda: waits in cluster.said_by_all(), cluster.said_by_all)
        said = typed("status", "--log-path", cluster.log_path).out
        assert f"the engine at {fake.url} does not answer" in " ".join(said.split())
        again = restarted(fake, tmp_path / "again")
        try:
            until(lambda: "train_rollout goes on" in cluster.said_by_all(), cluster.said_by_all)
            (again.folder / "gate").touch()
            assert cluster.wait(0) == {0: 0}, cluster.said_by_all()
        finally:
            end(again)


# --- several engines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[Fake]]:
    servers = [start_fake(tmp_path / f"fake-{number}") for number in range(2)]
    yield servers
    for server in servers:
        if server.process.poll() is None:
            end(server)


def spec_for(folder: Path, fakes: list[Fake], prompts: list[Any], **changes: Any) -> Path:
    engine = [{"url": fake.url, "api_key": KEY, "model": "policy"} for fake in fakes]
    return make_spec(folder, fakes[0].url, prompts, engine=engine, **changes)


def prompts_at(fake: Fake) -> list[str]:
    return [prompt for request in fake.requests() for prompt in request["prompt"]]


def test_work_is_spread_and_a_group_stays_where_it_is(tmp_path: Path, fakes: list[Fake]) -> None:
    # Everything waits at the gates until all is sent.
    prompts = [f"{letter}a!gate=" for letter in "bcdefghi"]
    spec = spec_for(tmp_path, fakes, prompts, **{"rollout.concurrency": 4})
    process = start(spec)

    def all_is_sent() -> bool:
        begun = all((fake.folder / "at-gate").exists() for fake in fakes)
        return begun and sum(len(prompts_at(fake)) for fake in fakes) == len(prompts)

    until(all_is_sent, lives=lambda: process.poll() is None)
    shown = json.loads((tmp_path / "progress.json").read_text())
    for fake in fakes:
        (fake.folder / "gate").touch()
    done = finish(process, spec)
    assert (done.code, done.stderr, done.result["groups"]) == (0, "", 8)
    assert [len(prompts_at(fake)) for fake in fakes] == [4, 4]
    assert sorted(prompts_at(fakes[0]) + prompts_at(fakes[1])) == sorted(prompts)
    # Each trajectory says which engine made it.
    for group in rolled_out(tmp_path).values():
        (replica,) = {item["replica"] for item in group}
        assert group[0]["prompt"] in prompts_at(fakes[replica])
    assert [(one["replica"], one["up"]) for one in shown["engines"]] == [(0, True), (1, True)]


@pytest.mark.parametrize("agent", [False, True])
def test_the_other_engines_finish_what_a_dead_one_had_begun(
    tmp_path: Path, fakes: list[Fake], agent: bool
) -> None:
    changes: dict[str, Any] = {"rollout.concurrency": 2, "engine.start_timeout_s": 60.0}
    if agent:
        (tmp_path / "mine.py").write_text(AGENT)
        changes |= {"rollout.agent": f"{tmp_path}/mine.py:Twice"}
    gone, stays = fakes
    (stays.folder / "gate").touch()
    spec = spec_for(tmp_path, fakes, ["ba!gate=", "dc!gate=", "fe!gate=", "hg!gate="], **changes)
    process, part = start(spec), tmp_path / "trajectories" / "part"
    at_gate = gone.folder / "at-gate"
    until(lambda: at_gate.exists() and groups_in(part) == 2, lives=lambda: process.poll() is None)
    end(gone)
    done = finish(process, spec)
    assert (done.code, done.stderr) == (0, "")
    assert done.result["groups"] == 4 and done.result["invalid"] == 0
    assert {len(group) for group in rolled_out(tmp_path).values()} == {SAMPLES}


# --- the real engine ------------------------------------------------------------------------------------------------------------

TASKS, ANSWERS = 512, 8
DEADLINE_S = 400.0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_killed_engine_costs_only_what_was_in_flight(tmp_path: Path, replicas: int) -> None:
    flags = ("--iterations", "1", "--rl-phase", "rollout", "--rollout-split", "train-only")
    flags += (f"rollout.tasks={TASKS}", f"rollout.samples={ANSWERS}", "rollout.concurrency=8")
    flags += (f"engine.replicas={replicas}",)
    with Cluster(tmp_path, 1, *flags, program="rl") as cluster:
        cluster.start()
        paths = cluster.paths
        wait_for_groups(paths, cluster)
        os.kill(engine_of(cluster.processes[0].pid), signal.SIGKILL)
        assert cluster.wait(deadline_s=DEADLINE_S) == {0: 0}, cluster.said(0)
        groups = Counter(
            trajectory["task_index"] for trajectory in iter_trajectories(paths.merged("train", 1))
        )
        assert len(groups) == TASKS and set(groups.values()) == {ANSWERS}
        ends = {trajectory["finish_reason"] for trajectory in iter_trajectories(paths.merged("train", 1))}
        assert ends <= {"stop", "length"}, "what the killed engine cut off counts for nothing"
        ready = [event["replica"] for event in cluster.events() if event["event"] == "engine_ready"]
        generations = [event for event in cluster.events() if event["event"] == "generation_started"]
        if replicas == 2:
            assert ready == [0, 1] and len(generations) == 1, "the phase was not tried again"
        else:
            assert ready == [0, 0] and len(generations) == 2
            (failed,) = [event for event in cluster.events() if event["event"] == "work_failed"]
            assert "vLLM was ended by signal 9" in failed["error"]
        logs = sorted(path.name for path in paths.node_logs(1, 0).glob("vllm*.log"))
        assert logs == ["vllm-1.log", "vllm.log"][-replicas:]
        assert leftovers(cluster.log_path) == {}


def wait_for_groups(paths: Any, cluster: Cluster) -> None:
    """Until some groups, but not all, are on disk."""

    def under_way() -> bool:
        parts = paths.trajectories("train").glob("*.part")
        return any(0 < len(scan_rank_file(part).groups) < TASKS // 2 for part in parts)

    until(
        under_way,
        lambda: cluster.said(0),
        deadline_s=DEADLINE_S,
        lives=lambda: cluster.processes[0].poll() is None,
    )


def engine_of(daemon: int) -> int:
    """The server's process below a daemon: the innermost one whose command names it."""
    servers = []
    for each in psutil.Process(daemon).children(recursive=True):
        # One that ends just now, such as an episode of an agent, has no command line any more.
        with contextlib.suppress(psutil.Error):
            servers += [each] if "fsbarrier.workers.vllm_server" in each.cmdline() else []
    return int(servers[-1].pid)
