"""What others say, as JSON: whatever it is, each of our readers raises what its documentation names, or nothing."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz import EXAMPLES, NASTY, bytes_like, fuzz, plain_json

from fsbarrier.data.tasks import Task
from fsbarrier.engine.client import CalledOff, EngineClient, Refused, Unreachable
from fsbarrier.engine.openai_http import refusal_text
from fsbarrier.engine.span import Link
from fsbarrier.rewards.judge import Judge, JudgeError
from fsbarrier.rewards.model_server import ClassifierReward, ModelServerError
from fsbarrier.rewards.score import Answer
from fsbarrier.rollouts.agent_client import Recorder
from fsbarrier.rollouts.agent_http import Endpoint
from fsbarrier.rollouts.answer_stream import AnswerStream
from fsbarrier.rollouts.answers import calls_in, without_thoughts
from fsbarrier.rollouts.samples import Again, EngineGone, Refusal
from fsbarrier.rollouts.sampling import Sampler, SamplingServer
from fsbarrier.settings.sections import JudgeSettings
from fsbarrier.specs import EngineAddress
from fsbarrier.store import foreign_json

DEEP = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 101 + b"]" * 101,
    b'{"a":"\\ud800"}',
    b'[1e400, "\xed\xa0\x80"]',
)
TASK = Task(0, "t", "p", None, {})
#: what each reader expects
SAID = (
    {"choices": [{"message": {"content": "1"}}]},
    {"data": [{"probs": [0.5]}]},
    {"error": {"message": "no", "code": 500}},
    {"choices": [{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}, "text": "a", "finish_reason": "stop",
                  "prompt_token_ids": [2], "stop_reason": None, "weight_versions": [{"start": 0, "end": 1, "version": "3"}]}]},
    {"tokens": [1], "max_model_len": 10, "prompt": "a"},
    {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}], "max_tokens": 4, "stop": ["x"]},
    {"key": "k", "nodes": [], "place": 1, "reached": []},
    {"data": [{"id": "policy", "root": "/m"}]},
)  # fmt: skip


def replaced(value: Any, new: Any) -> st.SearchStrategy[Any]:
    """The value with something else in one place of it."""
    if isinstance(value, dict) and value:
        return st.one_of(
            new,
            *(
                replaced(inner, new).map(lambda got, key=key: {**value, key: got})
                for key, inner in value.items()
            ),
        )
    if isinstance(value, list) and value:
        return st.one_of(new, replaced(value[0], new).map(lambda got: [got]))
    return new


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


odd = st.one_of(plain_json, st.sampled_from([10**400, -1, 2**63, "\ud800", math.inf, [[]] * 3, {"a": None}]))
said = st.one_of(
    st.sampled_from((*DEEP, *NASTY)),
    bytes_like(*map(dumped, SAID)),
    *(replaced(one, odd).map(dumped) for one in SAID),
)


class Saying(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body, status = b"", 200

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(Saying.status)
        self.send_header("Content-Length", str(len(Saying.body)))
        self.end_headers()
        self.wfile.write(Saying.body)

    do_GET = do_POST


@pytest.fixture(scope="module")
def saying() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Saying)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask_judge(url: str) -> None:
    async def go() -> None:
        judge = Judge(JudgeSettings(url=f"{url}/v1", model="wise"), timeout_s=60.0)
        try:
            await judge.ask("x")
        finally:
            await judge.close()

    asyncio.run(go())


def classify(url: str) -> None:
    async def go() -> None:
        reward = ClassifierReward(EngineAddress(f"{url}/v1", "", "m", None), 60.0)
        try:
            for score in await reward.score_group(TASK, [Answer("a", token_ids=[1])]):
                assert math.isfinite(score.reward)
        finally:
            await reward.close()

    asyncio.run(go())


def count_tokens(url: str) -> None:
    async def go() -> None:
        server = SamplingServer(url, "k", "policy", 30.0, 2)
        async with Sampler(server, connections=1, on_tokens=lambda _: None) as sampler:
            await sampler._json("POST", "/tokenize", {})

    asyncio.run(go())


def call_engine(url: str) -> None:
    client = EngineClient(url)
    client.model()
    client.call("GET", "/x", timeout_s=60.0)


OVER_HTTP: dict[str, tuple[Callable[[str], None], tuple[type[Exception], ...]]] = {
    "judge": (ask_judge, (JudgeError,)),
    "classifier": (classify, (ModelServerError,)),
    "sampler": (count_tokens, (Again, Refusal, EngineGone)),
    "engine": (call_engine, (Refused, Unreachable, CalledOff)),
}


@pytest.mark.parametrize("reader", OVER_HTTP)
@settings(fuzz, max_examples=max(20, EXAMPLES // 4))
@given(body=said, status=st.sampled_from([200, 400, 404]))
def test_whatever_a_server_answers_a_reader_raises_what_it_names(
    saying: str, reader: str, body: bytes, status: int
) -> None:
    Saying.body, Saying.status = body, status
    read, documented = OVER_HTTP[reader]
    try:
        read(saying)
    except documented:
        pass


def hear(data: bytes) -> None:
    """What a peer of an engine over several nodes may send; its connection ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link.__new__(Link)
        link.connection, link.ended, link._received = ours, False, b""
        theirs.sendall(data[:60_000] + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        while not link.ended:
            heard = link.receive(10.0)
            assert heard is None or isinstance(heard, dict)


def take(data: bytes) -> None:
    AnswerStream("http://e", [TASK], lambda group: None, lambda number: None, 1).take(
        data.decode("utf-8", "replace")
    )


def parse(data: bytes) -> None:
    value = foreign_json.parse(data)
    # Whatever is accepted can be sent on, and computed with.
    assert msgspec.json.decode(msgspec.json.encode(value)) == value
    json.dumps(value).encode()


def call_tools(data: bytes) -> None:
    """What a server's parser may make of an answer."""
    text = data.decode("utf-8", "replace")
    call: object = {"function": {"name": "f", "arguments": text}}
    try:
        listed: object = foreign_json.parse(data)
    except foreign_json.NotJson:
        listed = text
    for message in (
        {"tool_calls": [call, listed]},
        {"tool_calls": listed},
        {"tool_calls": [{"function": listed}]},
    ):
        for function in calls_in(message):
            assert isinstance(json.loads(function["arguments"]), dict)
        msgspec.json.encode(calls_in(message))
    without_thoughts(f"<think>{text}", opened=False)


READERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "parse": (parse, (foreign_json.NotJson,)),
    "refusal": (refusal_text, ()),
    "peer": (hear, ()),
    "stream": (take, (Again, Refusal, EngineGone)),
    "tool calls": (call_tools, ()),
}


@pytest.mark.parametrize("reader", READERS)
@fuzz
@given(data=said)
def test_whatever_others_say_a_reader_raises_what_it_names(reader: str, data: bytes) -> None:
    read, documented = READERS[reader]
    try:
        read(data)
    except documented:
        pass


def test_whatever_an_agent_asks_it_is_answered() -> None:
    examples: list[bytes] = []

    @fuzz
    @given(data=said)
    def collect(data: bytes) -> None:
        examples.append(data)

    collect()

    class Place:
        sampling = type("S", (), {"temperature": 1.0, "top_p": 1.0, "top_k": -1})()

    async def go() -> None:
        client, endpoint = Recorder(Place()), Endpoint()  # type: ignore[arg-type]

        async def turn(*_: object, **__: object) -> None:
            raise Refusal("no engine here")

        client.chat = client.complete = turn  # type: ignore[method-assign,assignment]
        await endpoint.open()
        with endpoint.serving(client):
            key = {"Authorization": f"Bearer {client.api_key}"}
            async with httpx.AsyncClient(base_url=client.base_url, headers=key, trust_env=False) as http:
                for data in examples:
                    for path in ("/chat/completions", "/completions"):
                        response = await http.post(path, content=data)
                        assert response.status_code == 400 and response.json()["error"]["message"], data
                odd = await http.post("/completions", content=b"{}", headers={"Host": "[x"})
                assert odd.status_code == 400
        await endpoint.close()

    asyncio.run(go())
