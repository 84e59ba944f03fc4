"""A judge model: asked side by side but not too often at once, again where that may help, and its failures are in the score."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.data.tasks import Task
from fsbarrier.errors import UsageError
from fsbarrier.rewards import model_server
from fsbarrier.rewards.judge import Judge, JudgeError
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rewards.score import Score
from fsbarrier.settings.sections import JudgeSettings

KEY = "of the judge"


class StandIn(ThreadingHTTPServer):
    """Answers with what stands after "say " in a question; the first time 503 or 429 where it has "busy", never where it has "hang"."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.now, self.most, self.asked = threading.Lock(), 0, 0, list[dict[str, Any]]()
        self.together, self.over = threading.Barrier(2), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def settings(self, **changes: Any) -> JudgeSettings:
        own = {"url": f"http://127.0.0.1:{self.server_port}/v1", "model": "wise", "api_key_env": "JUDGE_KEY"}
        return JudgeSettings(**{**own, **changes})


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with server.lock:
            again = question in [each["messages"][-1]["content"] for each in server.asked]
            server.asked.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        if "together" in question:
            server.together.wait(30)
        if "hang" in question:
            server.over.wait(30)
        with server.lock:
            server.now -= 1
        status = 400 if "refuse" in question else 200
        if "busy" in question and not again:
            status = 429 if "too busy" in question else 503
        if self.headers["Authorization"] != f"Bearer {KEY}":
            status = 401
        text = question.rpartition("say ")[2].partition("\n")[0]
        value = {"choices": [{"message": {"role": "assistant", "content": f"Well.\n{text}"}}]}
        data = json.dumps(value if status == 200 else {"error": {"message": "not now"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = StandIn()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def scores(kind: str, settings: JudgeSettings, *responses: str, timeout_s: float = 60.0) -> list[Score]:
    async def run() -> list[Score]:
        reward = open_reward(kind, timeout_s=timeout_s, judge=settings)
        try:
            task = Task(0, "t", "how much?", "4", {})
            return await asyncio.gather(*(reward.score(task, response) for response in responses))
        finally:
            await reward.close()

    return asyncio.run(run())


def test_the_judges_grade_is_the_reward(judge: StandIn) -> None:
    right, half = scores("judge", judge.settings(), "say 1", "say 0.5")
    assert (right.reward, half.reward, right.parts) == (1.0, 0.5, {"judge": 1.0})
    assert right.info == {"judge": "Well.\n1"} and right.error is None
    question = judge.asked[0]
    assert (question["model"], question["temperature"]) == ("wise", 0)
    assert all(part in question["messages"][0]["content"] for part in ("how much?", "4", "say "))


def test_the_judge_is_asked_again_where_that_may_help(judge: StandIn) -> None:
    busy, limited, refused = scores("judge", judge.settings(), "busy, say 1", "too busy, say 1", "refuse")
    assert (busy.reward, busy.error) == (limited.reward, limited.error) == (1.0, None)
    assert refused.error == "the judge refuses: HTTP 400: not now"
    assert len(judge.asked) == 5


def test_a_grade_is_between_0_and_1_and_few_are_asked_for_at_once(
    judge: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_server, "CONCURRENCY", 2)
    *wrong, right = scores("judge", judge.settings(), *(f"together, say {n}" for n in (7, -1, 10, 1)))
    assert all(score.reward == 0 and "no number from 0 to 1" in str(score.error) for score in wrong)
    assert right.reward == 1 and judge.most == 2


MINE = """
async def asks(prompt, response, answer, metadata, judge):
    said = await judge.ask(f"{response} together, say {answer}")
    return {"reward": float(said.split()[-1]) / 8, "said": said}

def plain(prompt, response, answer, metadata):
    return 1.0
"""


def test_a_function_of_ones_own_may_ask_it(
    judge: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six questions, two at once."""
    monkeypatch.setattr(model_server, "CONCURRENCY", 2)
    (tmp_path / "mine.py").write_text(MINE)
    found = scores(f"{tmp_path}/mine.py:asks", judge.settings(), *map(str, range(6)))
    assert [score.reward for score in found] == [0.5] * 6 and judge.most == 2
    assert scores(f"{tmp_path}/mine.py:plain", JudgeSettings(), "x")[0].reward == 1.0
    for kind in ("judge", f"{tmp_path}/mine.py:asks"):
        with pytest.raises(
            UsageError,
            match=r"uses a judge, which needs judge.model=engines.NAME, or judge.url and judge.model",
        ):
            open_reward(kind, judge=JudgeSettings())


class Hostile(BaseHTTPRequestHandler):
    """Answers without end, or compressed."""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        if b"gzip" in body:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b" " * (1 << 20))
        except OSError:
            return


@pytest.mark.parametrize(("question", "says"), [("endless", "longer than 8 MiB"), ("gzip", "compressed")])
def test_an_answer_is_bounded_and_no_password_is_stored(question: str, says: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def ask(port: int) -> str:
        judge = Judge(
            JudgeSettings(url=f"http://me:hidden@127.0.0.1:{port}/v1", model="wise"), timeout_s=60.0
        )
        try:
            with pytest.raises(JudgeError) as failed:
                await judge.ask(question)
            return str(failed.value)
        finally:
            await judge.close()

    try:
        assert says in asyncio.run(ask(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
    gone = asyncio.run(ask(server.server_port))
    assert "does not answer" in gone and "hidden" not in gone
