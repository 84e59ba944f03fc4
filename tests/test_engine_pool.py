"""Several engines of one node under one rollout: work goes to the least loaded, and from one that is gone to the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_engine_gone import AGENT, end
from test_rollout import KEY, SAMPLES, Fake, finish, groups_in, make_spec, rolled_out, start, start_fake
from waiting import until


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
