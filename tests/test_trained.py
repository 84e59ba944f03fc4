"""A trained policy is evaluated, served and talked to with its run's settings; the server is fake_vllm.py, which sorts letters."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import all_gone
from commands import typed
from test_failure_reason import plant_vllm, rollouts
from test_hygiene import ROOT
from waiting import DEADLINE_S

from fsbarrier.data import demo_tasks
from fsbarrier.processes import processes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A run that has rolled out once, and the environment in which vLLM is the fake one."""
    folder = tmp_path_factory.mktemp("trained")
    with rollouts(folder) as cluster:
        planted = cluster.env[0] = plant_vllm(folder)
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        yield cluster.log_path, {**os.environ, **planted}


def command(*words: object) -> list[str]:
    return [sys.executable, "-P", "-m", "fsbarrier", *map(str, words)]


def done(environ: dict[str, str], *words: object, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=environ, input=said, capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_policy_is_evaluated_with_the_settings_of_its_run(
    trained: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    run, environ = trained
    before = sorted(path for path in run.rglob("*"))
    table = tmp_path / "answers.jsonl"
    ended = done(environ, "eval", run, "eval.samples=2", "--json", "--out", table)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert (figures["policy_version"], figures["tasks"], figures["trajectories"]) == (0, 4, 8)
    assert figures["reward_mean"] == 1.0 and figures["pass_at_2"] == 1.0
    assert {json.loads(line)["text"] for line in table.read_text().splitlines()} == {"abcd"}
    # Other tasks, by the default of `eval.samples`; the letters of one of them are not sorted.
    other = tmp_path / "other tasks.jsonl"
    other.write_text('{"prompt": "ab=", "answer": "ab"}\n{"prompt": "ba=", "answer": "ba"}\n')
    shown = done(environ, "eval", "--log-path", run, "--data", other)
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.split()
    assert "2 tasks, 2 trajectories" in shown.stdout and words[words.index("reward_mean") + 1] == "0.50"
    # The run itself is only read.
    assert sorted(path for path in run.rglob("*")) == before


def test_a_policy_answers_lines(trained: tuple[Path, dict[str, str]]) -> None:
    run, environ = trained
    ended = done(environ, "chat", run, "rollout.temperature=0.5", said="dcba=\n\nfe=\n")
    assert (ended.returncode, ended.stdout) == (0, "abcd\nef\n"), ended.stderr
    assert "no chat template: each line is continued by itself" in ended.stderr
    asked = Path(json.loads(environ["FAKE_VLLM"])["dir"], "requests.jsonl").read_text().splitlines()
    (request,) = [one for one in map(json.loads, asked) if one.get("prompt") == ["fe="]]
    assert (request["temperature"], request["max_tokens"]) == (0.5, 8)


def test_a_system_message_begins_each_conversation(trained: tuple[Path, dict[str, str]]) -> None:
    run, environ = trained
    refused = done(environ, "chat", run, "--system", "be brief", said="dc=\n")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "--system: the model" in refused.stderr and "no chat template" in refused.stderr
    (model,) = re.findall(r"the model (.*) has no chat template", refused.stderr)
    template = Path(model, "chat_template.jinja")
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    try:
        ended = done(environ, "chat", run, "--system", "be brief", said="dc=\n\nfe=\n")
        assert ended.returncode == 0 and "talk to the policy" in ended.stderr, ended.stderr
    finally:
        template.unlink()
    asked = Path(json.loads(environ["FAKE_VLLM"])["dir"], "requests.jsonl").read_text().splitlines()
    sent = [request["messages"] for request in map(json.loads, asked) if request.get("messages")]
    system = {"role": "system", "content": "be brief"}
    assert sent[-2:] == [[system, {"role": "user", "content": words}] for words in ("dc=", "fe=")]


def test_a_policy_is_served_until_ctrl_c(trained: tuple[Path, dict[str, str]]) -> None:
    run, environ = trained
    words = ("serve", run, "--json", "--api-key-env", "OWN_KEY")
    process = subprocess.Popen(
        command(*words), env={**environ, "OWN_KEY": "k-1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["url"].startswith("http://127.0.0.1:") and told["api_key"] == "k-1"

        def ask(key: str) -> Any:
            body = json.dumps({"model": told["model"], "prompt": ["ba="], "n": 1, "max_tokens": 8}).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            request = urllib.request.Request(f"{told['url']}/completions", body, headers)
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return json.loads(response.read())["choices"][0]["text"]

        assert ask("k-1") == "ab"
        with pytest.raises(urllib.error.HTTPError):
            ask("k-2")
        # A second client of the server talks to it too.
        chat = done(
            {**environ, "OWN_KEY": "k-1"},
            "chat",
            run,
            *("--url", told["url"], "--api-key-env", "OWN_KEY"),
            said="cb=\n",
        )
        assert chat.stdout == "bc\n", chat.stderr
        tree = processes.below(process.pid)
        assert tree
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert all_gone(tree)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.engine])])
def test_the_page_about_a_server_of_ones_own(tmp_path: Path, real: bool) -> None:
    """The two commands of docs/trying.md, with another model and data, also on a CPU with real vLLM."""
    page = (ROOT / "docs" / "trying.md").read_text()
    (serve,) = re.findall(r"^fsbarrier (serve --model .*)$", page, re.MULTILINE)
    (run,) = re.findall(r"^\./run\.sh (.*)$", page, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    copy_demo(tmp_path)
    for old, new in (
        ("/models/Qwen2.5-0.5B-Instruct", f"{tmp_path}/model"),
        ("/data/math", str(tmp_path)),
        ("8000", str(port)),
        ("4096", "64"),
    ):
        serve, run = (line.replace(old, new) for line in (serve, run))
    environ = {**os.environ, **({} if real else plant_vllm(tmp_path)), "VLLM_API_KEY": "k-3"}
    process = subprocess.Popen(command(*shlex.split(serve)), env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "is served as 'policy' until Ctrl-C" in process.stdout.readline()
        told = process.stdout.readline()
        assert f"http://127.0.0.1:{port}/v1" in told and "k-3" not in told and "$VLLM_API_KEY" in told
        few = ("rollout.tasks=4", "rollout.samples=2", "eval.tasks=2", "rollout.max_tokens=8")
        more = ("engine.max_model_len=64", "--log-path", tmp_path / "run", *few)
        ended = done(environ, "run", *shlex.split(run), *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "8 trajectories" in ended.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    finally:
        process.kill()
        process.communicate()


def copy_demo(folder: Path) -> None:
    """The demo's tasks and model."""
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(demo_tasks.FOLDER / name, folder)
    shutil.copytree(demo_tasks.FOLDER / "model", folder / "model")


def test_what_cannot_be_tried_is_said_in_one_line(
    trained: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    run, _ = trained
    for name in ("eval", "serve", "chat"):
        assert "--version 7: not on disk; available: 0" in typed(name, run, "--version", 7, code=2).err
        assert "no run there" in typed(name, tmp_path / "nowhere", code=2).err
        assert "unknown setting" in typed(name, run, "rollout.temprature=0", code=2).err
    toy = tmp_path / "toy"
    typed("run", "--program", "ping", "--iterations", "1", "--log-path", toy)
    assert "this run has no policy to export (program ping)" in typed("eval", toy, code=2).err
    assert "no such file or folder" in typed("eval", run, "--data", tmp_path / "none.jsonl", code=2).err
    assert "must end in .jsonl or .parquet" in typed("eval", run, "--out", "answers.txt", code=2).err
    assert "must be 1 to 65535" in typed("serve", run, "--port", "99999", code=2).err
    assert "this variable is not set" in typed("serve", run, "--api-key-env", "NOT_SET", code=2).err
    assert "drop one of the two" in typed("serve", run, "--model", tmp_path, code=2).err
