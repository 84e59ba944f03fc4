"""Thoughts: split from answers, limited, and told to rewards; against a stand-in server (fake_vllm.py) whose tokens are letters."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from test_agents import talk, user
from test_rollout import SAMPLES, Fake, make_spec, rolled_out, run

from fsbarrier.data.group_stats import GroupStats, metrics
from fsbarrier.engine.answer_format import BY_NAME, recognised, switches_in
from fsbarrier.rollouts.agent_client import Recorder, finished
from fsbarrier.rollouts.answers import without_thoughts
from fsbarrier.rollouts.episode import Trajectory

SAID = "<think>abcdefgh</think>xy"
CLOSED = "\n</think>\n\n"
REWARD = """
def {name}({parameters}):
    return {{"{result}": len(reasoning) / 10, "shown": {response}}}
"""


def rows(
    fake: Fake, folder: Path, prompt: Any, **changes: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The trajectories of one task, and the report."""
    folder.mkdir(exist_ok=True)
    done = run(make_spec(folder, fake.url, [prompt], **changes))
    assert (done.code, done.stderr) == (0, "")
    return rolled_out(folder)[0], done.result


def sampled(row: dict[str, Any]) -> str:
    """The tokens after the prompt, those in brackets not sampled."""
    ids, mask = row["token_ids"][row["prompt_tokens"] :], row["loss_mask"][row["prompt_tokens"] :]
    return "".join(chr(t) if m else f"[{chr(t)}]" for t, m in zip(ids, mask, strict=True))


def inserted(text: str) -> str:
    return "".join(f"[{letter}]" for letter in text)


def test_an_answer_is_scored_without_its_thoughts(tmp_path: Path, fake: Fake) -> None:
    chat = [user(f"q !say {SAID}!!")]
    for number, prompt in enumerate((f"q !say {SAID}!!", chat, "q !say abcdefgh</think>xy!! <think>")):
        (row, *_), _ = rows(fake, tmp_path / str(number), prompt)
        assert (row["text"], row["reasoning"], row["reasoning_tokens"]) == (
            "xy",
            "abcdefgh",
            23 - 7 * (number == 2),
        )
        assert row["messages"][-1] == {"role": "assistant", "content": "xy", "reasoning_content": "abcdefgh"}
        assert "[" not in sampled(row)
    (row, *_), _ = rows(fake, tmp_path / "none", "q !say a <think>b</think>!!")
    assert row["text"] == "a <think>b</think>" and not {"reasoning", "reasoning_tokens"} & row.keys()


@pytest.mark.parametrize(
    ("name", "parameters", "result", "response"),
    [
        ("reward", "prompt, response, answer, metadata, reasoning", "reward", "response"),
        (
            "compute_score",
            "data_source, solution_str, ground_truth, extra_info, reasoning",
            "score",
            "solution_str",
        ),
    ],
)
def test_a_reward_gets_the_thoughts_beside_the_response(
    tmp_path: Path, fake: Fake, name: str, parameters: str, result: str, response: str
) -> None:
    source = REWARD.format(name=name, parameters=parameters, result=result, response=response)
    (tmp_path / "mine.py").write_text(source)
    kind = {"reward.kind": f"{tmp_path / 'mine.py'}:{name}"}
    (row, *_), _ = rows(fake, tmp_path / "run", f"!say {SAID}!!", **kind)
    assert row["reward"] == 0.8 and row["metadata"]["reward_info"] == {"shown": "xy"}


def test_a_reward_of_whole_groups_gets_a_list_of_thoughts(tmp_path: Path, fake: Fake) -> None:
    source = "def reward(prompt, responses, answer, metadata, reasoning):\n    return [len(one) for one in reasoning]\n"
    (tmp_path / "mine.py").write_text(source)
    found, _ = rows(
        fake, tmp_path / "run", f"!say {SAID}!!", **{"reward.kind": f"{tmp_path / 'mine.py'}:reward"}
    )
    assert [row["reward"] for row in found] == [8.0] * SAMPLES


@pytest.mark.parametrize("chat", [False, True])
def test_thoughts_end_at_their_limit_and_the_answer_goes_on(tmp_path: Path, fake: Fake, chat: bool) -> None:
    limit = {"rollout.max_thinking_tokens": 8, "rollout.max_tokens": 32}
    # The stand-in server has room for 64 tokens.
    said = "<think>abcd</think>xy"
    text = f"q!cap !say {said}!!"
    found, report = rows(fake, tmp_path / "run", [user(text)] if chat else text, **limit)
    (row, *_) = found
    assert sampled(row) == f"<think>a{inserted(CLOSED)}xy\x01"
    given = row["loss_mask"][row["prompt_tokens"] :].index(0) + row["prompt_tokens"]
    assert row["logprobs"][given : given + len(CLOSED)] == array("f", [0.0] * len(CLOSED))
    assert (row["text"], row["reasoning"], row["finish_reason"]) == ("xy", "a", "stop")
    assert (row["reasoning_tokens"], row["thoughts_closed"]) == (8, 1)
    shares = metrics([GroupStats.of(found)])
    assert shares["reasoning_share"] == 8 / 11 and shares["response_share"] == pytest.approx(3 / 11)
    assert shares["thoughts_closed_share"] == 1
    assert report["completion_tokens"] == SAMPLES * 11
    # What the policy went on from is exactly what was recorded.
    *_, last = fake.requests()
    assert last["prompt"][0] == list(row["token_ids"][:-3])
    assert last["max_tokens"] == min(32, 64 - row["prompt_tokens"]) - 8 - len(CLOSED)


@pytest.mark.parametrize(
    ("said", "limit", "most", "answer", "text", "reason"),
    [
        # The thought was over in time, or there was none; the answer goes on as it was.
        ("<think>a</think>vwxyz", 18, 40, "<think>a</think>vwxyz\x01", "vwxyz", "stop"),
        ("abcdefgh", 3, 40, "abcdefgh\x01", "abcdefgh", "stop"),
        # Half a thought, without room for an answer.
        (SAID, 10, 18, "<think>abc", "", "length"),
        # The answer is cut off.
        (SAID, 10, 22, f"<think>abc{inserted(CLOSED)}x", "x", "length"),
    ],
)
def test_an_answer_that_reaches_the_limit_of_thoughts(
    tmp_path: Path, fake: Fake, said: str, limit: int, most: int, answer: str, text: str, reason: str
) -> None:
    changes: dict[str, Any] = {"rollout.max_thinking_tokens": limit, "sampling": {"max_tokens": most}}
    (row, *_), report = rows(fake, tmp_path / "run", f"q!cap !say {said}!!", **changes)
    assert (sampled(row), row["text"], row["finish_reason"]) == (answer, text, reason)
    assert report["truncated"] == (SAMPLES if reason == "length" else 0)


def test_the_thoughts_of_an_agents_turns_have_the_limit_too(fake: Fake) -> None:
    async def two_turns(client: Recorder) -> None:
        first = await client.chat([user(f"!cap !say {SAID}!!")])
        assert (first.message["content"], first.message["reasoning_content"]) == ("xy", "abcdefgh<")
        again = {"role": "assistant", "content": "xy"}
        await client.chat([user(f"!cap !say {SAID}!!"), again, user("!say <think>h</think>w!!")])

    client = talk(fake, two_turns, limit=16)
    (segment,) = client.segments
    text = "".join(map(chr, segment.token_ids))
    first = f"<think>abcdefgh<{CLOSED}xy\x01"
    assert text.endswith(f"a:{first}\nu:!say <think>h</think>w!!\na:<think>h</think>w\x01")
    assert sum(segment.loss_mask) == 16 + 3 + 18
    episode = finished(client, Trajectory(), error=None, seconds=1.0)
    assert (episode.response, episode.reasoning, episode.closings, episode.thought_tokens) == (
        "w",
        "h",
        1,
        32,
    )
    own = finished(client, Trajectory(text="mine"), error=None, seconds=1.0)
    assert (own.response, own.reasoning) == ("mine", "h")


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "answer"),
    [
        ("qwen3", "<think>\na\n</think>\n\nb", "a", "b"),
        (
            "openai_gptoss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "a",
            "b",
        ),
        ("openai_gptoss", "<|channel|>final<|message|>b", None, "b"),
        ("gemma4", "<|channel>thought\na<channel|>b", "a", "b"),
        ("mistral", "[THINK]a[/THINK]b", "a", "b"),
        ("seed_oss", "<seed:think>a</seed:think>b", "a", "b"),
        (
            "cohere_command3",
            "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
            "a",
            "b",
        ),
        ("granite", "Here is my thought process: a\n\nHere is my response: b", "a", "b"),
        ("ernie45", "<think>\na\n</think>\n\n<response>\nb\n</response>\n", "a", "b"),
        ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n</answer>", "a", "b"),
    ],
)
def test_the_marks_of_each_family(
    tmp_path: Path, name: str, text: str, reasoning: str | None, answer: str
) -> None:
    marks = BY_NAME[name]
    parts = without_thoughts(text, opened=False, marks=marks)
    assert (parts.reasoning, parts.text, parts.closed) == (reasoning, answer, True)
    closed = without_thoughts(f"{marks.opening}a{marks.closed_with}b", opened=False, marks=marks)
    assert (closed.reasoning, closed.text) == ("a", "b")
    half = without_thoughts(f"{marks.opening}a", opened=False, marks=marks)
    assert (half.reasoning, half.text, half.closed) == ("a", "", False)
    (tmp_path / "chat_template.jinja").write_text(f"{{# {text} {marks.opening} {marks.closing} #}}")
    found = recognised(tmp_path)
    assert found is not None and found.opening == marks.opening and (name == "qwen3" or found.name == name)


def test_the_switch_of_a_template_is_an_argument_and_no_field(tmp_path: Path) -> None:
    for source, switches in (
        ("{% if enable_thinking %}{% endif %}", ["enable_thinking"]),
        ("{% if thinking is defined %}{% endif %}{% generation %}x{% endgeneration %}", ["thinking"]),
        ("{{ messages[0].thinking }}", []),
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        assert switches_in(tmp_path) == switches
