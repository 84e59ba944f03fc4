"""The agent that browses (phases/agents/browser.py): its rounds beside a stand-in for the browser; in a real one; a whole run."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cluster import REPO, Cluster
from judge_server import judge_that_says
from waiting import free_port, until
from websockets.asyncio.server import ServerConnection, serve

from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.loader import load_file
from fsbarrier.rollouts.agents import EnvironmentLost
from fsbarrier.trajectories import load

sys.path.insert(0, str(REPO / "scripts"))

AGENTS = REPO / "phases" / "agents"
BROWSING = REPO / "tests" / "programs" / "browsing_agent.py"
SERVER = REPO / "phases" / "environments" / "browser_server.py"
agent = load_file(AGENTS / "browser.py", "browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


class Policy:
    """A client whose answers come from a function of what the last message shows; it keeps what it was asked."""

    def __init__(self, url: str, answer: Callable[[Mapping[str, Any]], str]) -> None:
        self.environment_url, self.answer = url, answer
        self.asked: list[list[dict[str, Any]]] = []

    async def chat(self, messages: list[dict[str, Any]]) -> SimpleNamespace:
        self.asked.append(messages)
        image, text = messages[-1]["content"]
        said = self.answer({"image": image["image"], "text": text["text"]})
        return SimpleNamespace(text=said, message={"role": "assistant", "content": said})

    def trajectory(self, **said: object) -> dict[str, object]:
        return said


def episode(policy: Policy, **task: object) -> dict[str, Any]:
    one = Task(0, "t", "what?", "x", task)
    found: dict[str, Any] = asyncio.run(agent.Browser().run(one, policy))
    return found


# --- the rounds -----------------------------------------------------------------------------------------------------------


def beside_a_stand_in(answer: Callable[[Mapping[str, Any]], str], error: str = "", **task: object) -> Any:
    """An episode in a window that counts what is done in it: what the agent returns, what it asked, and the actions."""
    actions: list[dict[str, Any]] = []

    async def window(connection: ServerConnection) -> None:
        async for text in connection:
            actions.append(json.loads(text))
            seen = {"url": f"/{len(actions)}", "image": f"picture {len(actions)}", "error": error}
            await connection.send(json.dumps(seen))

    async def go() -> Any:
        async with serve(window, "127.0.0.1", 0) as server:
            policy = Policy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", answer)
            returned = await agent.Browser().run(Task(0, "t", "what?", "x", task), policy)
            return returned, policy.asked, actions

    return asyncio.run(go())


@pytest.mark.parametrize(("difficulty", "steps"), [(1, 10), (3, 10), (4, 20), (6, 20), (7, 30), (9, 30)])
def test_the_policy_sees_four_rounds_until_its_steps_are_used_up(difficulty: int, steps: int) -> None:
    returned, asked, actions = beside_a_stand_in(lambda _: "scroll 9", difficulty=difficulty, url="/begin")
    assert returned == {"text": "", "steps": steps, "no_actions": 0, "url": f"/{steps + 1}"}
    assert actions == [{"do": "open", "url": "/begin"}, *[{"do": "scroll", "y": 9}] * steps]
    for number, messages in enumerate(asked, start=1):
        assert [one["role"] for one in messages] == ["system", *["user", "assistant"] * 3, "user"][
            : 2 * min(number, 4)
        ]
        assert messages[0]["content"].endswith("Your task: what?")
        shown = [one["content"][0]["image"] for one in messages if one["role"] == "user"]
        assert shown == [f"picture {n}" for n in range(max(1, number - 3), number + 1)]


def test_an_answer_ends_it_and_what_is_no_action_changes_nothing() -> None:
    said = iter(["I see.\nclick 5 7 ", "type 1 2 a b  c", "click here", "", "back", "answer  12 or so "])
    returned, asked, actions = beside_a_stand_in(lambda _: next(said))
    assert returned == {"text": "12 or so", "steps": 6, "no_actions": 2, "url": "/4"}
    click, type_ = (
        {"do": "click", "x": 5, "y": 7},
        {"do": "type", "x": 1, "y": 2, "text": "a b  c"},
    )
    assert actions[1:] == [click, type_, {"do": "back"}]
    told = [messages[-1]["content"][1]["text"] for messages in asked]
    assert told == ["/1", "/2", "/3", "/3 (this was no action)", "/3 (this was no action)", "/4"]


def test_without_a_browser_or_a_first_page_the_episode_is_to_be_begun_again() -> None:
    with pytest.raises(EnvironmentLost, match="the first page: no such host"):
        beside_a_stand_in(lambda _: "wait", error="no such host")
    with pytest.raises(EnvironmentLost, match=r"127\.0\.0\.1"):
        episode(Policy(f"http://127.0.0.1:{free_port()}", lambda _: "wait"))


def test_the_tasks_about_the_shop_are_tasks(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SERVER), "--tasks", str(tmp_path)], check=True)
    train, test = (read_tasks(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert (train.count, test.count) == (48, 12)
    assert {task.metadata["difficulty"] for task in train.tasks.values()} == {1, 4, 7}


# --- a real browser -------------------------------------------------------------------------------------------------------


@cache
def browser_python(folder: Path) -> str:
    """An interpreter with what the head of browser_server.py says must be installed."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "playwright", "websockets"]
    subprocess.run(install, check=True)
    return str(python)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return browser_python(tmp_path_factory.mktemp("browser") / "venv")


@pytest.fixture
def url(python: str) -> Iterator[str]:
    """A browser that serves windows."""
    port = free_port()
    server = subprocess.Popen([python, str(SERVER), str(port)])

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    until(lambda: asyncio.run(listens()), lambda: f"exit code {server.poll()}")
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait()


@needs_chromium
@pytest.mark.slow
def test_someone_who_knows_the_shop_orders_something(url: str) -> None:
    """By typing, clicking, scrolling and going back in a real Chromium; a window that was there before shows nothing of it."""
    way = iter(
        (
            ("/", "scroll 400"),
            ("/", "scroll -900"),
            ("/", "type 200 50 HEAVY boat"),
            ("/search?q=HEAVY+boat", "click 140 230"),
            ("/item/24", "back"),
            ("/search?q=HEAVY+boat", "click 140 230"),
            ("/item/24", "click 300 340"),
            ("/order/24?", "answer 3991"),
        )
    )
    expected, action = next(way)
    pictures: dict[str, str] = {}

    def answer(shown: Mapping[str, Any]) -> str:
        nonlocal expected, action
        # A slow machine shows the old page for a while.
        if shown["text"] != expected:
            return "wait"
        pictures.setdefault(expected, shown["image"])
        said = action
        expected, action = next(way, ("", ""))
        return said

    returned = episode(Policy(url, answer), difficulty=7)
    assert (returned["text"], returned["url"]) == ("3991", "/order/24?")
    assert len(set(pictures.values())) == len(pictures) == 4, "two pages look the same"
    again = Policy(url, lambda _: "answer x")
    episode(again)
    # The same page looks the same, to the byte.
    assert again.asked[0][-1]["content"][0]["image"] == pictures["/"]


@needs_chromium
@pytest.mark.slow
def test_pages_that_are_not_there_and_a_browser_that_is_killed(url: str) -> None:
    with pytest.raises(EnvironmentLost, match=r"the first page: .*ERR_"):
        episode(Policy(url, lambda _: "wait"), url="http://127.0.0.1:1/")

    def kill(_: object) -> str:
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("chrom") and "--type=" not in " ".join(process.cmdline()):
                process.kill()
        return "wait"

    with pytest.raises(EnvironmentLost):
        episode(Policy(url, kill))


# --- a run ----------------------------------------------------------------------------------------------------------------


def grade(image: bytes) -> float:
    return round(hashlib.sha256(image).digest()[0] / 255, 3)


def grade_what_is_seen(asked: dict[str, Any]) -> str:
    """A judge's answer; it is sent one image with each question."""
    (image,) = [part for part in asked["messages"][0]["content"] if part["type"] == "image_url"]
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    return f"I see.\n{grade(data)}"


@pytest.fixture
def judge() -> Iterator[str]:
    with judge_that_says(grade_what_is_seen) as url:
        yield url


@needs_chromium
@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_browses_and_trains_on_what_it_saw_as_a_judge_sees_it(
    tmp_path: Path, python: str, judge: str
) -> None:
    """The judge looks at the last screenshot of each episode, which alone decides the grade."""
    from picture_model import build_model, write_model

    data = tmp_path / "data"
    data.mkdir()
    subprocess.run([python, str(SERVER), "--tasks", str(data)], check=True)
    write_model(build_model(0), data / "model")
    words = (
        *("--iterations", "1", "--model", "model", "--data-path", str(data), "--eval-interval", "0"),
        *(f"rollout.agent={BROWSING}:Browser", f"reward.kind=judge,{BROWSING}:luck"),
        *(f"judge.url={judge}", "judge.model=m", "judge.images=last"),
        f"environment.command={shlex.join([python, str(SERVER), '{port}'])}",
        *("environment.sessions=4", "rollout.tasks=3", "rollout.samples=2", "rollout.max_tokens=24"),
        *("engine.max_model_len=2048", "rollout.completion_threshold=0.95", "rollout.grace_s=30"),
        *("rollout.task_timeout_s=900", "optimizer.warmup_steps=0"),
    )
    with Cluster(tmp_path, 1, *words, program="rl") as cluster:
        cluster.start()
        assert set(cluster.wait(deadline_s=1500).values()) == {0}, cluster.said_by_all()
        trajectories = load(cluster.paths.merged("train", 1))["trajectories"]
        shown = cluster.paths.merged("train", 1).parent / "train_images.iteration1"
        (updated,) = [event for event in cluster.events() if event["event"] == "updated"]
    assert len(trajectories) == 6 and not any("agent_error" in one["metadata"] for one in trajectories)
    assert updated["optimizer_steps"] > 0 and updated["logprob_gap_max"] < 1e-3
    assert len(list(shown.iterdir())) > 1
    for one in trajectories:
        assert one["turns"] == one["metadata"]["steps"] <= 30
        for images in one["images"]:
            assert 1 <= len(images) <= agent.WINDOW and {*images} <= {path.name for path in shown.iterdir()}
        assert one["reward_parts"]["judge"] == grade((shown / one["images"][-1][-1]).read_bytes()), one[
            "reward_info"
        ]
