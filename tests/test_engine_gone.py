"""An engine that dies in the middle of a rollout and comes back, and rewards that are computed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_rollout import SAMPLES, Fake, finish, groups_in, make_spec, rolled_out, run, start, start_fake
from waiting import until


def restarted(fake: Fake, folder: Path, **mode: Any) -> Fake:
    """Another server at the address of one that has ended."""
    return start_fake(folder, port=int(fake.url.rpartition(":")[2]), **mode)


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
    again = restarted(fake, tmp_path / "again")
    (again.folder / "gate").touch()
    done = finish(process, spec)
    try:
        assert (done.code, done.stderr) == (0, "")
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
