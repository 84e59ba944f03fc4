"""Agents with a client library of another: its requests keep the episode whole. The bytes are those of the real clients (clients/)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from test_agents import TOOLS, talk, user
from test_rollout import Fake

from fsbarrier.rollouts.agent_client import Recorder

HERE = Path(__file__).parent
RECORDED = HERE / "files" / "clients"
#: what the policy is asked, so that the stand-in server answers with two calls; and then with a word
ASK = (
    '!say <think>hm</think><tool_call>{"name": "add", "arguments": {"b": "\u00e9", "a": [2, 3]}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"b": "x", "a": []}}</tool_call>!!'
)
NEXT = "!say fin!!"


async def posted(client: Recorder, content: bytes) -> httpx.Response:
    key = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=client.base_url, headers=key, trust_env=False) as http:
        return await http.post("/chat/completions", content=content)


@pytest.mark.parametrize("recorded", sorted(RECORDED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_requests_of_a_real_client_keep_its_episode_whole(fake: Fake, recorded: Path) -> None:
    first, second = recorded.read_bytes().splitlines()
    assert json.loads(first)["messages"][0]["content"] == ASK

    async def replayed(client: Recorder) -> None:
        for request, said in ((first, "call_2"), (second, "fin")):
            answer = await posted(client, request)
            assert answer.status_code == 200 and said in answer.text

    client = talk(fake, replayed, max_tokens=999)
    assert (len(client.segments), client.turns) == (1, 2)
    assert client.segments[0].history[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("guided_json", {"type": "object"}, 400),
        ("reasoning_effort", "low", 400),
        ("thinking_token_budget", 3, 400),
        ("modalities", ["text"], 200),
        ("logit_bias", {}, 200),
        ("logit_bias", {"3": 1}, 400),
        ("user", "me", 200),
        ("store", False, 200),
        ("seed", None, 200),
        ("whatever", None, 200),
        ("parallel_tool_calls", True, 200),
    ],
)
def test_a_field_of_a_request_is_honoured_or_refused(
    fake: Fake, field: str, value: object, status: int
) -> None:
    async def asks(client: Recorder) -> None:
        answer = await posted(client, json.dumps({"messages": [user("!say a!!")], field: value}).encode())
        assert answer.status_code == status
        if status == 400:
            error = answer.json()["error"]
            assert (
                error["param"] == field
                and error["type"] == "invalid_request_error"
                and field in error["message"]
            )

    talk(fake, asks)


def test_an_answer_whose_calls_cannot_be_read_says_so(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsbarrier.rollouts.engine_pool.READ_S", 0.2)

    async def asks(client: Recorder) -> None:
        body = {"messages": [user("!say unreadable!!")], "tools": TOOLS}
        answer = await posted(client, json.dumps(body).encode())
        assert answer.status_code == 400
        assert (
            "the engine has not read which tools the answer calls within 0.2 s"
            in answer.json()["error"]["message"]
        )
        (fake.folder / "gate").touch()

    talk(fake, asks)


# --- the real clients -------------------------------------------------------------------------------------------------------

PACKAGES = {
    "openai_client.py": ("openai",),
    "langchain_client.py": ("langchain-openai",),
    "litellm_client.py": ("litellm",),
    "mcp_agent.py": ("openai-agents", "mcp"),
    "openai_client.mjs": ("openai",),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PACKAGES)
def test_the_real_clients_keep_an_episode_whole(tmp_path: Path, fake: Fake, program: str) -> None:
    command = prepared(tmp_path, program)

    async def runs(client: Recorder) -> None:
        env = {"BASE_URL": client.base_url, "API_KEY": client.api_key, "ASK": ASK, "NEXT": NEXT}
        own = {"NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DUMP": "all"}
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **own, **env}, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        said, _ = await process.communicate()
        assert (process.returncode, said.decode().strip()) == (0, "fin")

    client = talk(fake, runs, max_tokens=999)
    assert (len(client.segments), client.turns) == (1, 2)


def prepared(folder: Path, program: str) -> list[str]:
    """The command that runs a client, whose packages are installed into `folder`; skips the test where they cannot be had."""
    packages = PACKAGES[program]
    if program.endswith(".mjs"):
        if not (shutil.which("node") and shutil.which("npm")):
            pytest.skip("needs node and npm")
        shutil.copy(HERE / "clients" / program, folder)
        install, command = ["npm", "install", "--silent", *packages], ["node", program]
    else:
        python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        command = [str(python), str(HERE / "clients" / program)]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(packages)} cannot be installed: {done.stderr.strip()[-200:]}")
    return command
