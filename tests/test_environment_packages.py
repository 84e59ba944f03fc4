"""Agents for packages of environments, each against the real package in an interpreter of its own, which the test makes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import starts
from test_environment import HERE, rolled
from test_rollout import SAMPLES, Fake, rolled_out, start_fake

AGENTS, SERVERS = (HERE.parent / "phases" / name for name in ("agents", "environments"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Fake]:
    server = start_fake(tmp_path / "roomy", length=4096)
    yield server
    server.process.kill()
    server.process.communicate()


def interpreter(folder: Path, *packages: str, base: str = sys.executable) -> str:
    python = folder / "venv" / "bin" / "python"
    subprocess.run([base, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return str(python)


def test_a_policy_plays_gymnasium_and_textarena(tmp_path: Path, roomy: Fake) -> None:
    """A lake of three fields, crossed to the right; and a number between 1 and 20, which is 5 with this seed."""
    python = interpreter(tmp_path, "gymnasium", "textarena", "websockets")
    lake = {"gymnasium": "FrozenLake-v1", "options": {"desc": ["SFG"], "is_slippery": False}}
    number = {"textarena": "GuessTheNumber-v0", "seed": 1}
    command = [python, str(SERVERS / "games_server.py"), "{port}"]
    done = rolled(
        tmp_path,
        roomy,
        ["2", "[5]", "7"],
        tasks=[
            {"prompt": f"!say {said}!!", "answer": "-", "reset": game}
            for said, game in (("2", lake), ("[5]", number), ("7", lake))
        ],
        **{"environment.command": shlex.join(command), "engine.max_model_len": 4096, "custom.turns": 3},
    )
    assert done.code == 0, done.stderr
    assert (done.result["agent_errors"], done.result["environment_errors"]) == (0, 0)
    found = rolled_out(tmp_path)
    rewards = [[(one["reward"], one["metadata"]["steps"]) for one in found[task]] for task in range(3)]
    assert rewards == [[(1.0, 2)] * SAMPLES, [(1.0, 1)] * SAMPLES, [(0.0, 3)] * SAMPLES]
    told = [one["content"] for one in found[0][0]["messages"] if one["role"] == "user"]
    assert "[S]FG\nAnswer with a number from 0 to 3." in told[0] and "S[F]G" in told[1]


def test_a_policy_works_in_an_environment_of_openenv(tmp_path: Path, roomy: Fake) -> None:
    """Its own skeleton of an environment: what one says comes back, and its length gives the reward. It has room for one episode."""
    python = interpreter(tmp_path, "openenv==0.10.0")
    init = [str(Path(python).parent / "openenv"), "init", "words"]
    subprocess.run(init, cwd=tmp_path, check=True, capture_output=True)
    serve = [*("-m", "uvicorn", "--app-dir", str(tmp_path), "words.server.app:app"), "--port", "{port}"]
    done = rolled(
        tmp_path,
        roomy,
        ["abc", "de"],
        sessions=1,
        tasks=[{"prompt": f"!say {word}!!", "answer": "-"} for word in ("abc", "de")],
        **{
            "environment.command": shlex.join([python, *serve]),
            "environment.health": "/health",
            "engine.max_model_len": 4096,
            "custom.observation": "echoed_message",
            "custom.turns": 2,
        },
    )
    assert done.code == 0, done.stderr
    assert (done.result["agent_errors"], done.result["environment_errors"]) == (0, 0)
    found = [group[0] for group in rolled_out(tmp_path).values()]
    assert [one["reward"] for one in found] == pytest.approx([0.6, 0.4])
    assert [one["messages"][-1]["content"] for one in found] == ["abc", "de"]


TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    word: str

class Word(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word)

class Words(vf.Taskset[Word]):
    def load(self):
        for word in ("ab", "cd", "ef"):
            yield Word(Data(prompt=f"!say {word.replace('c', 'x')}!!", word=word), self.config.task)

__all__ = ["Words"]
"""


def test_a_policy_works_in_a_taskset_of_verifiers(tmp_path: Path, roomy: Fake) -> None:
    """A taskset of three words, of which the policy says the second one wrong; verifiers' own program talks to it."""
    python = interpreter(tmp_path, "verifiers>=0.4,<0.5")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    (Path(site.stdout.strip()) / "three_words.py").write_text(TASKSET)
    config = tmp_path / "words.json"
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config.write_text(json.dumps({"taskset": {"id": "three_words"}, "agent": agent}))
    server = str(SERVERS / "verifiers_server.py")
    subprocess.run([python, server, "--tasks", str(tmp_path), "3", str(config)], check=True)
    tasks = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [task["prompt"] for task in tasks] == ["!say ab!!", "!say xd!!", "!say ef!!"]
    done = rolled(
        tmp_path,
        roomy,
        ["ab", "xd", "ef"],
        tasks=tasks,
        **{
            "rollout.agent": f"{AGENTS / 'hosted.py'}:Hosted",
            "environment.command": shlex.join([python, server, "{port}", str(config)]),
            "engine.max_model_len": 4096,
        },
    )
    assert done.code == 0, done.stderr
    assert (done.result["agent_errors"], done.result["environment_errors"]) == (0, 0)
    found = rolled_out(tmp_path)
    assert [[one["reward"] for one in found[task]] for task in range(3)] == [
        [1.0] * SAMPLES,
        [0.0] * SAMPLES,
        [1.0] * SAMPLES,
    ]
    for word, task in zip(("ab", "xd", "ef"), found, strict=True):
        for one in found[task]:
            assert "".join(map(chr, one["token_ids"])).endswith(f"{word}\x01") and sum(one["loss_mask"]) == 3


# --- NeMo-Gym -------------------------------------------------------------------------------------------------------------

#: It needs a newer Python than this one may be.
NEWER = next(
    (found for name in ("python3.12", "python3.13") if (found := shutil.which(name)) and starts(found)), None
)


@pytest.mark.skipif(NEWER is None, reason="no Python 3.12 is installed")
def test_a_policy_works_with_a_server_of_nemo_gym(tmp_path: Path, roomy: Fake) -> None:
    """A counter that begins at 3, to which the policy adds 2 in each of its three turns."""
    assert NEWER is not None
    python = interpreter(tmp_path, "nemo-gym==0.4.0", base=NEWER)
    counter = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
    call = '<tool_call>{"name": "increment_counter", "arguments": {"count": 2}}</tool_call>'
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    tool = {"type": "function", "name": "increment_counter", "parameters": schema, "strict": True}
    prompt = [{"role": "user", "content": f"!say {call}!!"}]
    given = {"responses_create_params": {"input": prompt, "tools": [tool]}, "initial_count": 3}
    tasks = [{"prompt": prompt, "answer": "-", **given, "expected_count": count} for count in (9, 8)]
    done = rolled(
        tmp_path,
        roomy,
        ["a", "b"],
        tasks=tasks,
        **{
            "rollout.agent": f"{AGENTS / 'nemo_gym.py'}:NemoGym",
            "environment.command": shlex.join(
                [python, str(SERVERS / "nemo_gym_server.py"), "{port}", counter]
            ),
            "rollout.max_tokens": 100,
            "engine.max_model_len": 4096,
            "custom.turns": 3,
        },
    )
    assert done.code == 0, done.stderr
    assert (done.result["agent_errors"], done.result["environment_errors"]) == (0, 0)
    rewards = [[one["reward"] for one in group] for group in rolled_out(tmp_path).values()]
    assert rewards == [[1.0] * SAMPLES, [0.0] * SAMPLES]
