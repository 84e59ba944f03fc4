"""Agents: several turns, recorded to the token; against a stand-in server (fake_vllm.py) whose tokens are letters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_rollout import KEY, SAMPLES, Fake, assert_one_line, finish, make_spec, rolled_out, run, start
from waiting import until

from fsbarrier.data.group_stats import GroupStats, metrics
from fsbarrier.data.images import sources
from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.engine.answer_format import BY_NAME, USUAL
from fsbarrier.engine.model import parser_of, recognised
from fsbarrier.errors import UsageError
from fsbarrier.processes.processes import Stat, below
from fsbarrier.rewards.kinds import check_answers
from fsbarrier.rewards.score import Answer, Reward, Score
from fsbarrier.rollouts.agent_client import Recorder, finished
from fsbarrier.rollouts.agent_http import Endpoint
from fsbarrier.rollouts.agents import load_agent
from fsbarrier.rollouts.engine_pool import EnginePool, Reservation
from fsbarrier.rollouts.episode import Episode, Segment, Trajectory
from fsbarrier.rollouts.group_trajectories import judged_group
from fsbarrier.rollouts.rollout_spec import Origin
from fsbarrier.rollouts.samples import Sample, SampledGroup, Sampling, SamplingServer

END = 1
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


def letters(text: str) -> list[int]:
    return [*map(ord, text)]


def talk(fake: Fake, conversation: Any, **options: Any) -> Recorder:
    """Run `conversation(client)`; gives the client with what it recorded."""

    async def go() -> Recorder:
        own = {"max_thinking_tokens": options.pop("limit", None), "thoughts": options.pop("thoughts", USUAL)}
        server = SamplingServer(fake.url, KEY, "policy", 30.0, 2, **own)
        sampling = Sampling(1, 1.0, 1.0, -1, options.pop("max_tokens", 100))
        async with EnginePool([server], connections=4, on_tokens=lambda _: None, patience_s=1.0) as pool:
            if options.pop("look", False):
                await pool.query_models()
            client, endpoint = Recorder(Reservation(pool, 1, sampling)), Endpoint()
            await endpoint.open()
            with endpoint.serving(client):
                await conversation(client)
            await endpoint.close()
            return client

    return asyncio.run(go())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_later_turn_extends_the_earlier_ones_to_the_token(fake: Fake) -> None:
    async def three_turns(client: Recorder) -> None:
        messages = [user("!say xy!!")]
        for text in ("!say zz!!", "!say w!!", ""):
            messages += [(await client.chat(messages)).message, user(text)]

    client = talk(fake, three_turns)
    (segment,) = client.segments
    shown = ("u:!say xy!!\na:", "\nu:!say zz!!\na:", "\nu:!say w!!\na:")
    said = [[*letters(text), END] for text in ("xy", "zz", "w")]
    ids: list[int] = []
    mask: list[int] = []
    for before, answer in zip(shown, said, strict=True):
        ids += [*letters(before), *answer]
        mask += [0] * len(before) + [1] * len(answer)
    assert (segment.token_ids, segment.loss_mask) == (ids, mask)
    assert segment.logprobs == [-i / 1000 if m else 0.0 for i, m in zip(ids, mask, strict=True)]
    assert segment.prompt_tokens == len(shown[0]) and client.turns == 3
    prompts = [request["prompt"] for request in fake.requests()]
    for earlier, answer, later in zip(prompts, said, prompts[1:], strict=False):
        assert later[0][: len(earlier[0]) + len(answer)] == [*earlier[0], *answer]


def test_the_end_that_a_history_has_does_not_follow_the_one_that_was_sampled(fake: Fake) -> None:
    # As in gpt-oss' format, in which the template writes <|end|> where <|return|> was sampled.
    marks = replace(USUAL, ends=("\x01", "\n"))

    async def two_turns(client: Recorder) -> None:
        first = await client.chat([user("!say no!!")])
        await client.chat([user("!say no!!"), first.message, user("!say so!!")])

    for thoughts, between in ((USUAL, "\n"), (marks, "")):
        (segment,) = talk(fake, two_turns, thoughts=thoughts).segments
        text = "".join(map(chr, segment.token_ids))
        assert text == f"u:!say no!!\na:no\x01{between}u:!say so!!\na:so\x01"
    assert BY_NAME["openai_gptoss"].ends == ("<|return|>", "<|end|>")


def test_tool_calls_are_read_and_their_results_follow(fake: Fake) -> None:
    async def with_a_tool(client: Recorder) -> None:
        messages = [user(f"!say {CALL}!!")]
        reply = await client.chat(messages, tools=TOOLS)
        (call,) = reply.tool_calls
        assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'} and reply.text == CALL
        messages += [
            reply.message,
            {"role": "tool", "tool_call_id": call["id"], "content": "5 !say five!!"},
        ]
        assert (await client.chat(messages, tools=TOOLS)).text == "five"

    (segment,) = talk(fake, with_a_tool).segments
    text = "".join(map(chr, segment.token_ids))
    assert text == f"1 tools\nu:!say {CALL}!!\na:{CALL}\x01\nt:5 !say five!!\na:five\x01"


def test_a_client_that_writes_the_history_anew_keeps_the_episode_whole(fake: Fake) -> None:
    """What clients do to it: arguments with other separators, keys sorted, letters escaped, calls renamed and numbered, thoughts dropped,
    content null, spaces stripped, empty fields added."""
    args = {"b": "\u00e9", "a": [2, 3]}
    said = f"<think>hm</think> so <tool_call>{json.dumps({'name': 'add', 'arguments': args}, ensure_ascii=False)}</tool_call>"

    async def rewritten(client: Recorder) -> None:
        first = await client.chat([user(f"!say {said}!!")], tools=TOOLS)
        assert (
            first.message["reasoning_content"] == "hm"
            and first.message["content"] == "so"
            and first.text == said
        )
        (call,) = first.tool_calls
        assert json.loads(call["function"]["arguments"]) == args
        function = {"arguments": json.dumps(args, sort_keys=True, separators=(",", ":")), "name": "add"}
        again = {
            **{"role": "assistant", "content": " so ", "refusal": None, "annotations": []},
            "tool_calls": [{"index": 0, "id": "toolu_9", "type": "function", "function": function}],
        }
        tool = {"role": "tool", "tool_call_id": "toolu_9", "content": "5"}
        turned = [{key: one[key] for key in sorted(one)} for one in TOOLS]
        messages = [user(f" !say {said}!!\n"), again, tool]
        second = await client.chat([*messages, user("!say x!!")], tools=turned)
        other = {
            **again,
            "tool_calls": [{**again["tool_calls"][0], "function": {**function, "arguments": "{}"}}],
        }
        assert second.text == "x" and len(client.segments) == 1
        await client.chat([messages[0], other, tool, user("!say x!!")], tools=TOOLS)

    client = talk(fake, rewritten)
    assert len(client.segments) == 2 and client.segments[0].history[1]["reasoning_content"] == "hm"
    assert metrics([GroupStats.of([{**as_record(client), "reward": 1.0}])])["segments_per_episode"] == 2


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [
        (f"<think>if {CALL}</think>no", f"if {CALL}", "no"),
        (f"<think>on {CALL}", f"on {CALL}", ""),
        ("a <think>b</think>", None, "a <think>b</think>"),
    ],
)
def test_a_call_that_is_only_thought_of_is_none(
    fake: Fake, said: str, reasoning: str | None, content: str
) -> None:
    async def thinking(client: Recorder) -> None:
        reply = await client.chat([user(f"!say {said}!!")], tools=TOOLS)
        assert (reply.tool_calls, reply.message.get("reasoning_content")) == ([], reasoning)
        assert (reply.message["content"], reply.text) == (content, said)

    talk(fake, thinking)


def test_the_tools_reach_the_template_in_the_order_given(fake: Fake) -> None:
    async def asks(client: Recorder) -> None:
        await client.chat([user("!say a!!")], tools=TOOLS)

    talk(fake, asks)
    lines = (json.loads(line) for line in (fake.folder / "requests.jsonl").read_text().splitlines())
    shown, *_ = (one["tools"] for one in lines if one["path"] == "/tokenize" and "tools" in one)
    assert json.dumps(shown) == json.dumps(TOOLS)


@pytest.mark.parametrize(
    ("template", "added", "parser"),
    [
        ("{{ '<tool_call>' }}<function=x>", (), "qwen3_coder"),
        ("<tool_call>{'name'}", (), "hermes"),
        ("<tool_call><arg_key>", (), "glm45"),
        ("<|python_tag|>", ("<|python_tag|>",), "llama3_json"),
        ("<|python_tag|>", (), None),
        ("{{ messages }}", (), None),
    ],
)
def test_the_format_of_calls_is_recognised_by_the_template(
    tmp_path: Path, template: str, added: Sequence[str], parser: str | None
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"content": one} for one in added]})
    )
    assert recognised(tmp_path) == parser
    assert parser_of(tmp_path, None) == (parser or "hermes") and parser_of(tmp_path, "mistral") == "mistral"


def test_a_changed_history_and_calls_side_by_side_begin_segments(fake: Fake) -> None:
    async def rewritten(client: Recorder) -> None:
        first = await client.chat([user("!say ab!!")])
        await client.chat([user("in short: !say c!!"), first.message, user("and?")])
        history = [user("in short: !say c!!"), first.message, user("and?")]
        assert client.segments[1].history[:3] == history
        again = [*client.segments[1].history, user("!say d!!")]
        await asyncio.gather(client.chat(again), client.chat(again))

    client = talk(fake, rewritten)
    assert len(client.segments) == 3 and client.turns == 4
    assert [sum(segment.loss_mask) for segment in client.segments] == [3, 2 + 2, 2]
    record = as_record(client)
    assert record["segments"] == [0, *running(len(s.token_ids) for s in client.segments[:-1])]
    assert len(record["token_ids"]) == sum(len(segment.token_ids) for segment in client.segments)
    assert [len(messages) for messages in record["earlier_messages"]] == [2, 6]


def test_other_tools_begin_a_segment(fake: Fake) -> None:
    """The policy has seen the first tools at the beginning of the first segment, so a turn with others cannot continue it."""
    renamed = [{"type": "function", "function": {**TOOLS[0]["function"], "name": "subtract"}}]

    async def changes_tools(client: Recorder) -> None:
        messages = [user("!say a!!")]
        for offered in (TOOLS, TOOLS, renamed, None):
            reply = await client.chat(messages, tools=offered)
            messages += [reply.message, user("!say b!!")]

    client = talk(fake, changes_tools)
    texts = ["".join(map(chr, segment.token_ids)) for segment in client.segments]
    assert [text.startswith("1 tools") for text in texts] == [True, True, False]
    assert [sum(segment.loss_mask) for segment in client.segments] == [4, 2, 2]


def running(lengths: Iterator[int]) -> list[int]:
    total, sums = 0, []
    for length in lengths:
        total += length
        sums.append(total)
    return sums


def as_record(client: Recorder) -> dict[str, Any]:
    from fsbarrier.data.tasks import Task
    from fsbarrier.rollouts.samples import SampledGroup

    episode = finished(client, Trajectory(), error=None, seconds=1.0)
    return episode.record(SampledGroup(Task(0, "t", "p", None, {}), [], (episode,)))


def test_text_goes_on_from_its_tokens_too(fake: Fake) -> None:
    async def text(client: Recorder) -> None:
        first = await client.complete("q !say ab!! ")
        await client.complete(f"q !say ab!! {first.text} !say c!! ")
        await client.complete("something else = ")

    first, second = talk(fake, text).segments
    assert first.token_ids == [
        *letters("q !say ab!! ab"),
        END,
        *letters(" !say c!! c"),
        END,
    ]
    assert sum(first.loss_mask) == 3 + 2 and second.loss_mask[0] == 0


def test_any_client_can_be_used_and_is_recorded(fake: Fake) -> None:
    async def over_http(client: Recorder) -> None:
        key = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=client.base_url, headers=key, trust_env=False) as http:
            body = {"model": "any", "messages": [user(f"!say {CALL}!!")], "tools": TOOLS, "temperature": 1.0}
            answer = (await http.post("/chat/completions", json=body)).json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls" and answer["usage"]["completion_tokens"] == 70
            body["messages"] += [choice["message"], {"role": "tool", "content": "!say 5!!"}]
            answer = (await http.post("/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": "5"}
            for wrong, status, said in (
                ({"temperature": 0.2}, 400, "temperature=0.2: must equal the run's setting"),
                ({"n": 2}, 400, "n=2: must equal the run's setting"),
                ({"seed": 3}, 400, "seed: not supported in a recorded turn (3); drop it"),
                ({"tool_choice": "required"}, 400, '"param":"tool_choice"'),
                ({"parallel_tool_calls": False}, 400, '"type":"invalid_request_error"'),
                ({"response_format": {"type": "json_object"}}, 400, "response_format: not supported"),
                ({"logprobs": True}, 400, "logprobs: not supported"),
            ):
                refused = await http.post("/chat/completions", json={**body, **wrong})
                assert refused.status_code == status and said in refused.text
            models = await http.get("/models")
            assert models.json()["data"][0]["id"] == client.model
            other = await http.get("/models", headers={"Authorization": "Bearer x"})
            assert (other.status_code, (await http.get("/files")).status_code) == (401, 404)

            # A client of either generation limits an answer: the newer name counts if both are there.
            for limits in (
                {"max_completion_tokens": 4},
                {"max_tokens": 3},
                {"max_completion_tokens": 2, "max_tokens": 5},
            ):
                await http.post("/chat/completions", json={"messages": [user("!say x!!")], **limits})
            assert [request["max_tokens"] for request in fake.requests()[-3:]] == [4, 3, 2]

    client = talk(fake, over_http)
    assert len(client.segments) == 4 and client.turns == 5


def test_a_streamed_answer_comes_in_one_piece(fake: Fake) -> None:
    events: list[list[Any]] = []

    async def streamed(client: Recorder) -> None:
        key = {"Authorization": f"Bearer {client.api_key}"}
        other = CALL.replace("2", "7").replace("add", "sub")
        turn = {"messages": [user(f"!say {CALL}{other}!!")], "tools": TOOLS, "stream": True}
        async with httpx.AsyncClient(base_url=client.base_url, headers=key, trust_env=False) as http:
            for path, body in (
                ("/chat/completions", {**turn, "stream_options": {"include_usage": True}}),
                ("/completions", {"prompt": "!say ab!!", "stream": True}),
            ):
                answer = await http.post(path, json=body)
                assert answer.headers["content-type"].startswith("text/event-stream")
                *data, done, rest = answer.text.split("\n\n")
                assert (done, rest) == ("data: [DONE]", "")
                events.append([json.loads(line.removeprefix("data: ")) for line in data])

    assert talk(fake, streamed).turns == 2
    (said, end, usage), (text, text_end) = events
    delta = said["choices"][0]["delta"]
    assert (delta["role"], delta["content"], said["object"]) == ("assistant", "", "chat.completion.chunk")
    assert [(call["index"], call["id"], call["function"]) for call in delta["tool_calls"]] == [
        (0, "call_1", {"name": "add", "arguments": '{"a": 2, "b": 3}'}),
        (1, "call_2", {"name": "sub", "arguments": '{"a": 7, "b": 3}'}),
    ]
    assert [one["choices"][0]["finish_reason"] for one in (said, end)] == [None, "tool_calls"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 139
    assert (text["choices"][0]["text"], text["object"]) == ("ab", "text_completion")
    assert [one["choices"][0]["finish_reason"] for one in (text, text_end)] == [None, "stop"]


# --- the whole program ------------------------------------------------------------------------------------------------------

AGENT = """
import asyncio, ctypes, os, subprocess, threading, time
from pathlib import Path
from fsbarrier.rollouts.agents import EnvironmentLost, Trajectory

FOLDER = Path(__file__).parent

class Twice:
    async def run(self, task, client):
        messages = list(task.messages)
        reply = await client.chat(messages)
        messages += [reply.message, {"role": "user", "content": f"again: {client.custom['word']}"}]
        await client.chat(messages)
        if "!raise" in messages[0]["content"]:
            raise KeyError("no\\nsuch thing")
        if "!leave" in messages[0]["content"]:
            raise SystemExit(0)
        if "!own" in messages[0]["content"]:
            return client.trajectory(reward=0.25, text="mine", turns_wanted=2)
        if "!none" in messages[0]["content"]:
            return Trajectory()

class Stubborn:
    async def run(self, task, client):
        try:
            await client.chat(task.messages)
        except Exception:
            pass

class Odd:
    async def run(self, task, client):
        await client.chat(task.messages)
        word = task.prompt.partition("!")[2]
        return client.trajectory(reward="1.0" if word == "text" else float(word))

class Worst:
    async def run(self, task, client):
        # One in a session of its own, whose parent has ended: nothing but the episode's process leads to it.
        escaped = "(setsid sleep 1000 & echo $! >> started)"
        subprocess.run(["sh", "-c", f"{escaped}; sleep 1000 & echo $! >> started"], cwd=FOLDER, check=True)
        await client.chat(task.messages)
        match task.prompt.partition("!")[2]:
            case "wait":
                try:
                    await asyncio.Event().wait()
                finally:
                    (FOLDER / "released").touch()
            case "thread":
                await asyncio.to_thread(threading.Event().wait)
            case "block":
                time.sleep(1000)
            case "crash":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)

class Life:
    @classmethod
    async def open(cls, custom):
        (FOLDER / "opened").write_text("once", newline="")
        return {"pid": os.getpid(), "word": custom["word"]}

    @classmethod
    async def close(cls):
        (FOLDER / "opened").rename(FOLDER / "closed")

    async def run(self, task, client):
        os.kill(client.opened["pid"], 0)
        assert client.opened["word"] == "!say ok!!" and (FOLDER / "opened").exists()
        await client.chat(task.messages)

class Loses:
    async def run(self, task, client):
        await client.chat(task.messages)
        with (FOLDER / task.prompt).open("a") as tries:
            tries.write("x")
        once = FOLDER / "lost once"
        if "!lost" in task.prompt or ("!once" in task.prompt and not once.exists()):
            # Another task's episodes may come first, and must not use up this one's loss.
            if "!once" in task.prompt:
                once.touch()
            raise EnvironmentLost("it is gone")

class Half:
    async def open(self, custom): pass
    async def run(self, task, client): pass

class Plain:
    def run(self, task, client): pass

class Few:
    async def run(self): pass

class Needs:
    def __init__(self, x): pass
    async def run(self, task, client): pass

class Nothing: pass

def function(): pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(AGENT)
    return tmp_path / "mine.py"


def agent_spec(folder: Path, fake: Fake, prompts: list[str], agent: str, **changes: Any) -> Path:
    defaults = {
        "rollout.agent": agent,
        "rollout.max_tokens": 8,
        "reward.kind": "exact",
        "custom.word": "!say ok!!",
    }
    return make_spec(folder, fake.url, prompts, **{**defaults, **changes})


def test_episodes_become_trajectories(tmp_path: Path, fake: Fake, file: Path) -> None:
    spec = agent_spec(tmp_path, fake, ["ab!own", "ab!none"], f"{file}:Twice")
    done = run(spec)
    assert (done.code, done.stderr) == (0, "")
    own, judged = rolled_out(tmp_path)[0][0], rolled_out(tmp_path)[1][0]
    assert (own["reward"], own["text"], own["valid"]) == (0.25, "mine", True)
    assert own["reward_parts"] == {"agent": 0.25} and own["metadata"]["turns_wanted"] == 2
    assert own["turns"] == 2 and "segments" not in own
    assert [message["role"] for message in own["messages"]] == ["user", "assistant", "user", "assistant"]
    assert "".join(map(chr, own["token_ids"])).endswith("u:again: !say ok!!\na:ok\x01")
    assert len(own["token_ids"]) == len(own["loss_mask"]) == len(own["logprobs"])
    assert own["prompt_tokens"] == len("u:ab!own\na:") and set(own["timings"]) == {
        "generate_s",
        "episode_s",
        "reward_s",
    }
    assert (judged["text"], judged["reward_parts"]) == ("ok", {"exact": 0.0})
    assert done.result["completion_tokens"] == sum(
        sum(t["loss_mask"]) for g in rolled_out(tmp_path).values() for t in g
    )
    assert sorted(rolled_out(tmp_path)) == [0, 1] and len(rolled_out(tmp_path)[1]) == SAMPLES


def test_a_task_without_an_answer_needs_an_agent_that_gives_the_reward(
    tmp_path: Path, fake: Fake, file: Path
) -> None:
    spec = agent_spec(
        tmp_path, fake, ["ab!own", "ab!none"], f"{file}:Twice", **{"rollout.max_error_share": 0.5}
    )
    tasks = tmp_path / "train.jsonl"
    tasks.write_text('{"prompt": "ab!own"}\n{"prompt": "ab!none"}\n')
    done = run(spec)
    assert (done.code, done.result["reward_errors"]) == (0, SAMPLES), done.stderr
    own, judged = rolled_out(tmp_path)[0][0], rolled_out(tmp_path)[1][0]
    assert (own["reward"], own["valid"], judged["valid"]) == (0.25, True, False)
    assert judged["metadata"]["reward_error"] == "reward.kind=exact needs an answer, and the task has none"
    check_answers("exact", read_tasks(tasks).tasks.values(), tasks, agent=True)
    said = (
        "train.jsonl, line 1: reward.kind=exact needs an answer, and the task has none (its fields: prompt)"
    )
    with pytest.raises(UsageError, match=re.escape(said)):
        check_answers("exact", read_tasks(tasks).tasks.values(), tasks)


def test_an_agent_that_raises_is_marked_counted_and_ends_the_phase_above_a_share(
    tmp_path: Path, fake: Fake, file: Path
) -> None:
    prompts = ["ab=", "ab!raise", "dc=", "ab!leave", "cd="]
    done = run(agent_spec(tmp_path, fake, prompts, f"{file}:Twice", **{"rollout.max_error_share": 0.5}))
    assert (
        done.code == 0
        and done.result["agent_errors"] == 2 * SAMPLES
        and done.result["invalid"] == 2 * SAMPLES
    )
    groups = rolled_out(tmp_path)
    for item, said in (
        (groups[1][0], "KeyError: 'no\\nsuch thing'"),
        (groups[3][0], "SystemExit: 0"),
    ):
        assert (item["valid"], item["reward"], item["finish_reason"]) == (False, 0.0, "error")
        assert said in item["metadata"]["agent_error"] and sum(item["loss_mask"]) > 0
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["note"] == f"{2 * SAMPLES} agent errors"
    more = tmp_path / "more"
    more.mkdir()
    done = run(agent_spec(more, fake, ["ab!raise", "ab="], f"{file}:Twice"))
    assert done.code == 1
    # Before it the log has the traceback.
    *_, last = done.stderr.splitlines()
    for part in ("the agent failed for 4 of 8 trajectories", "rollout.max_error_share=0.1", "KeyError"):
        assert part in last


def test_an_agents_reward_is_a_finite_number_or_its_failure(tmp_path: Path, fake: Fake, file: Path) -> None:
    prompts = ["ab!0.5", "ab!nan", "ab!inf", "ab!text"]
    done = run(agent_spec(tmp_path, fake, prompts, f"{file}:Odd", **{"rollout.max_error_share": 0.8}))
    assert (done.code, done.result["agent_errors"]) == (0, 3 * SAMPLES)
    good, *bad = [rolled_out(tmp_path)[task][0] for task in range(4)]
    assert (good["reward"], good["valid"]) == (0.5, True)
    for item, what in zip(bad, ("nan", "inf", "'1.0'"), strict=True):
        assert (item["reward"], item["valid"]) == (0.0, False)
        assert f"run gave the reward {what}, not a finite number" in item["metadata"]["agent_error"]
    (tmp_path / "more").mkdir()
    done = run(agent_spec(tmp_path / "more", fake, ["ab!nan", "ab!0.5"], f"{file}:Odd"))
    assert done.code == 1 and "rollout.max_error_share=0.1" in done.stderr.splitlines()[-1]


def test_an_episode_ends_alone_and_with_all_that_it_started(tmp_path: Path, fake: Fake, file: Path) -> None:
    limits = {"rollout.task_timeout_s": 6.0, "rollout.max_error_share": 0.9}
    prompts = ["ab!wait", "ab!thread", "ab!block", "ab!crash", "ab!exit", "ab=", "dc="]
    spec = agent_spec(tmp_path, fake, prompts, f"{file}:Worst", **limits)
    done = run(spec)
    assert (done.code, done.result["agent_errors"]) == (0, 5 * SAMPLES)
    groups = rolled_out(tmp_path)
    assert all(item["valid"] for task in (5, 6) for item in groups[task])
    said = {
        0: "not finished within 6 s (rollout.task_timeout_s)",
        1: "not finished within 6 s (rollout.task_timeout_s)",
        2: "not finished within 6 s (rollout.task_timeout_s); its process did not answer any more and was killed",
        3: "the agent's process was ended by signal 11 (SIGSEGV)",
        4: "the agent's process ended with exit code 3",
    }
    for task, why in said.items():
        assert {item["metadata"]["agent_error"] for item in groups[task]} == {why}
        assert all(sum(item["loss_mask"]) for item in groups[task])
    assert "task train-3: the agent's process was ended by signal 11 (SIGSEGV)" in done.stderr
    assert (file.parent / "released").exists()
    started = (file.parent / "started").read_text().split()
    assert len(started) == 2 * len(prompts) * SAMPLES
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_nothing_of_an_episode_outlives_a_killed_rollout(tmp_path: Path, fake: Fake, file: Path) -> None:
    process = start(agent_spec(tmp_path, fake, ["ab!block", "ab!thread"], f"{file}:Worst"))
    started = file.parent / "started"
    until(
        lambda: started.exists() and len(started.read_text().split()) == 4 * SAMPLES,
        lives=lambda: process.poll() is None,
    )
    below_it = below(process.pid)
    assert len(below_it) > 2 * SAMPLES
    process.kill()
    process.communicate()
    until(lambda: not [pid for pid in (*below_it, *started.read_text().split()) if alive(int(pid))])


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return not Stat(pid).ended
    return False


@pytest.mark.parametrize("name", ["Twice", "Missing"])
def test_a_rollout_that_has_ended_before_its_agent_is_loaded_leaves_no_traceback(
    file: Path, name: str
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        argv = [sys.executable, "-m", "fsbarrier.workers.episodes", f"{file}:{name}", str(theirs.fileno())]
        done = subprocess.run(argv, pass_fds=(theirs.fileno(),), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agents_class_begins_and_ends_with_the_rollout(tmp_path: Path, fake: Fake, file: Path) -> None:
    done = run(agent_spec(tmp_path, fake, ["ab=", "dc="], f"{file}:Life"))
    assert (done.code, done.stderr, done.result["agent_errors"]) == (0, "", 0)
    assert (file.parent / "closed").read_text() == "once"


def test_an_episode_whose_environment_is_lost_is_begun_again(tmp_path: Path, fake: Fake, file: Path) -> None:
    spec = agent_spec(
        tmp_path, fake, ["a=!once", "b=!lost", "c="], f"{file}:Loses", **{"rollout.max_error_share": 0.4}
    )
    done = run(spec)
    assert (done.code, done.result["agent_errors"], done.result["environment_errors"]) == (0, 0, SAMPLES)
    groups = rolled_out(tmp_path)
    assert all(item["valid"] and item["turns"] == 1 for task in (0, 2) for item in groups[task])
    assert [item["metadata"]["environment_error"].partition(" (")[0] for item in groups[1]] == [
        "EnvironmentLost: it is gone"
    ] * SAMPLES
    tries = [len((file.parent / name).read_text()) for name in ("a=!once", "b=!lost", "c=")]
    assert tries[0] > SAMPLES and tries[1:] == [3 * SAMPLES, SAMPLES]


def test_an_engine_that_is_gone_is_no_agents_error(tmp_path: Path, fake: Fake, file: Path) -> None:
    hasty = {"engine.start_timeout_s": 0.1}
    spec = agent_spec(tmp_path, fake, ["ab!gate"], f"{file}:Stubborn", **hasty)
    process = start(spec)
    until((fake.folder / "at-gate").exists, lives=lambda: process.poll() is None)
    fake.process.kill()
    done = finish(process, spec)
    assert done.code == 1
    assert_one_line(done.stderr, f"the engine at {fake.url} does not answer")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Plain", "its method run is not async"),
        ("Few", r"an agent must accept a call run\(task, client\): too many positional arguments"),
        ("Needs", "an agent must be constructible without arguments: missing a required argument: 'x'"),
        ("Nothing", "has no method run"),
        ("Absent", "does not define Absent"),
        ("Half", "its method open must be an async class method"),
        ("function", "function is a function, not a class"),
    ],
)
def test_what_is_no_agent_is_refused(file: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=rf"rollout\.agent=.*mine\.py:{name}: .*{said}"):
        load_agent(f"{file}:{name}")


# --- the address that agents' own clients use -------------------------------------------------------------------------------


def raw_request(client: Recorder, body: bytes, *, headers: str, key: str | None = None) -> bytes:
    key = client.api_key if key is None else key
    path = httpx.URL(client.base_url).path
    lines = (f"POST {path}/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def connect(client: Recorder) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(client.base_url).port)


def test_a_client_that_goes_away_in_the_middle_disturbs_nobody(
    fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    async def goes_away(client: Recorder) -> None:
        body = json.dumps({"messages": [user("!say ab!!")]}).encode()
        # In the middle of its request: there is no turn.
        _, writer = await connect(client)
        writer.write(raw_request(client, body[:9], headers=f"Content-Length: {len(body)}"))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        # In the middle of its answer: the turn was begun, and is recorded.
        gated = json.dumps({"messages": [user("!gate !say cd!!")]}).encode()
        _, writer = await connect(client)
        writer.write(raw_request(client, gated, headers=f"Content-Length: {len(gated)}"))
        await writer.drain()
        while not (fake.folder / "at-gate").exists():
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        (fake.folder / "gate").touch()
        while client.turns == 0:
            await asyncio.sleep(0.01)
        assert (await client.chat([user("!say ef!!")])).text == "ef"

    client = talk(fake, goes_away)
    assert [sum(segment.loss_mask) for segment in client.segments] == [3, 3]
    assert capfd.readouterr().err == ""


def nested(depth: int) -> object:
    inner: object = "a"
    for _ in range(depth):
        inner = [inner]
    return inner


NOT_OPENAIS: list[tuple[dict[str, object], str]] = [
    ({"messages": nested(90)}, "messages: must be a list of objects"),
    ({"messages": "abc"}, "messages: must be a list of objects"),
    ({"messages": [{"role": "user", "content": nested(900)}]}, "the request is nested more than 100 deep"),
    ({"messages": [user("\ud800")]}, "the request is not JSON: half of a surrogate pair"),
    ({"tools": "x"}, "tools: must be a list of objects"),
    ({"tools": [{"function": nested(900)}]}, "the request is nested more than 100 deep"),
    ({"stop": [5]}, "stop: must be a string or a list of strings"),
    ({"max_tokens": "x"}, "max_tokens: must be a positive whole number"),
]


def test_what_is_asked_wrongly_is_answered_as_json(fake: Fake) -> None:
    async def wrongly(client: Recorder) -> None:
        key = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=client.base_url, headers=key, trust_env=False) as http:
            turn = {"messages": [user("!say ab!!")]}
            other_episode = str(http.base_url).replace(http.base_url.path.split("/")[2], "0000")
            for response, status, message in (
                (await http.post("/chat/completions", json=turn, headers={"Authorization": ""}), 401, "key"),
                (await http.post(f"{other_episode}chat/completions", json=turn), 404, "no such episode"),
                (await http.post("/embeddings", json=turn), 404, "POST .*/embeddings is not served"),
                (await http.put("/models"), 404, "PUT .*/models is not served"),
                (await http.post("/chat/completions", content=b"{"), 400, "the request is not JSON"),
                (
                    await http.post("/chat/completions", content=b"[]"),
                    400,
                    "the request is not a JSON object",
                ),
                *[
                    (
                        await http.post("/chat/completions", content=json.dumps({**turn, **field})),
                        400,
                        message,
                    )
                    for field, message in NOT_OPENAIS
                ],
                (await http.post("/completions", json={"prompt": ["a"]}), 400, "prompt: must be one string"),
            ):
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (status, status)
                assert re.search(message, error["message"])
            body = json.dumps(turn).encode()
            for wrong_key in ("", "x", client.api_key[:-1], "\N{BULLET}"):
                reader, writer = await connect(client)
                # The body never comes: nothing of it is read, and the connection serves nobody any more.
                length = f"Content-Length: {len(body)}"
                writer.write(raw_request(client, b"", headers=length, key=wrong_key))
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()
                writer.close()

    assert talk(fake, wrongly).turns == 0


def test_a_reward_is_given_the_images_of_all_segments_as_files(tmp_path: Path) -> None:
    """Those that a later segment shows again too; and the messages that it gets name files that it can read."""

    class Noting(Reward):
        async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
            noted.extend(answers)
            return [Score(1.0)] * len(answers)

    noted: list[Answer] = []
    segments = []
    for names in (["a.png", "b.png"], ["b.png", "c.png"]):
        content = [{"type": "image", "image": name} for name in names]
        segment = Segment(history=[{"role": "user", "content": content}], images=names)
        segment.add_turn([5], Sample("x", [6], [0.0], "stop", 0.0))
        segments.append(segment)
    episode = Episode("x", [], [], "stop", 0.0, segments=tuple(segments))
    group = SampledGroup(Task(0, "t", "look", None, {}), [], (episode,))
    origin = Origin("run", "train", 1, 1, 0, 0, "policy")
    (made,) = asyncio.run(judged_group(origin, group, Noting(), tmp_path))
    (answer,) = noted
    assert list(answer.images) == [str(tmp_path / f"{name}.png") for name in "abbc"]
    assert answer.messages is not None
    assert [*sources(answer.messages)] == [str(tmp_path / f"{name}.png") for name in "bc"]
    # What is kept names them as ever.
    assert [*sources(made["messages"])] == ["b.png", "c.png"]
