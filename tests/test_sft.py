"""Supervised fine-tuning: what is trained on, that it is the cross-entropy that transformers computes, and complete runs of the program."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from complete_runs import Bench
from test_chat_templates import CHATML, INSTRUCT, LLAMA
from waiting import until

import fsbarrier
from fsbarrier.data.examples import read_examples
from fsbarrier.errors import UsageError

FOLDER = Path(fsbarrier.__file__).parent / "data" / "demo"
DEMO = FOLDER / "model"
#: what an iteration is made of in these runs
SMALL = (
    *("--program", "sft", "rollout.tasks=8", "trainer.minibatch=4", "eval.tasks=0", "optimizer.lr=2e-4"),
    *("optimizer.warmup_steps=0", "engine.max_model_len=32"),
)
LETTERS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>bb{% endif %}{% endfor %}"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sorting(count: int, first: int = 0) -> list[dict[str, Any]]:
    words = [
        f"{'dcba'[n % 4]}{'zyx'[n % 3]}{'ponm'[(n // 3) % 4]}{'klj'[n % 3]}"
        for n in range(first, first + count)
    ]
    return [{"prompt": f"{word}=", "completion": "".join(sorted(word))} for word in words]


def talk(*said: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(said)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples of each kind, and a model whose template they need."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(DEMO, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(LETTERS)
    talks = [
        {"messages": talk("ba=", "ab", "dc=", "cd")},
        {"prompt": talk("ba=", "ab", "dc="), "completion": "cd"},
    ]
    write(folder / "train.jsonl", [*sorting(14), *talks])
    write(folder / "test.jsonl", sorting(5, first=20))
    return folder


# --- files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "line 2: needs messages, or prompt and completion (its fields: none)"),
        ({"prompt": "a"}, "line 2: needs messages, or prompt and completion (its fields: prompt)"),
        (
            {"prompt": "a", "completion": 3},
            "line 2: completion must be text or a list of chat messages, got 3",
        ),
        ({"prompt": "a", "completion": ""}, "line 2: completion is empty"),
        ({"messages": "hello"}, 'line 2: messages must be a list of chat messages, got "hello"'),
        ({"messages": [{"role": "user"}]}, "line 2: messages: message 1 needs a content (text), got null"),
        ({"messages": talk("a", "b"), "images": ["a.png"]}, "line 2: has images, which supervised"),
        ({"messages": talk("a")}, "line 2: has no message of the role assistant, so nothing to train on"),
        ({"messages": talk("a", "\ud800")}, "line 2: contains an unpaired surrogate"),
    ],
)
def test_a_wrong_line_is_named_before_anything_starts(
    bench: Bench, data: Path, tmp_path: Path, row: Mapping[str, Any], said: str
) -> None:
    wrong = write(tmp_path / "data" / "train.jsonl", [*sorting(1), row])
    with pytest.raises(UsageError) as refused:
        read_examples(wrong)
    assert said in str(refused.value)
    if "completion" not in row:
        where = (f"model={DEMO}", f"data_path={wrong.parent}", "--eval-interval", "0")
        ended = bench.run(tmp_path / "run", *where, *SMALL)
        assert ended.codes == [2] and ended.said.startswith("fsbarrier: error: ") and said in ended.said
        assert ended.said.count("\n") == 1 and not (tmp_path / "run").exists()


def rendering(template: str) -> Any:
    jinja2 = pytest.importorskip("jinja2")
    return lambda **given: jinja2.Environment().from_string(template).render(**given)


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, ["1<|im_end|>\n", "2<|im_end|>\n"]),
        (LLAMA, ["1<|eot|>", "2<|eot|>"]),
        (INSTRUCT, [" 1</s>", " 2</s>"]),
    ],
)
def test_the_answers_of_a_conversation_are_marked(template: str, answers: list[str], tmp_path: Path) -> None:
    rows = [{"messages": talk("a", "1", "b", "2")}, {"prompt": talk("a", "1", "b"), "completion": "2"}]
    _, examples = read_examples(write(tmp_path / "train.jsonl", rows))
    both, last = (one.pieces(rendering(template)) for one in examples.values())
    assert [text for text, trained in both if trained] == answers
    assert [text for text, trained in last if trained] == answers[1:]
    whole = rendering(template)(messages=rows[0]["messages"], add_generation_prompt=False)
    assert "".join(text for text, _ in both) == "".join(text for text, _ in last) == whole


def test_a_template_that_forgets_earlier_answers_is_refused_with_the_line(
    bench: Bench, data: Path, tmp_path: Path
) -> None:
    """As templates of models do that drop what they thought."""
    shutil.copytree(data / "model", tmp_path / "model")
    forgets = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(forgets)
    where = (f"model={tmp_path / 'model'}", f"data_path={data}", "--eval-interval", "0")
    ended = bench.run(tmp_path / "run", *where, *SMALL)
    assert ended.codes == [2] and "train.jsonl, line 15: the chat template of" in ended.said
    assert "renders message 2 differently once others follow" in ended.said


THINKING = (
    "{% set last = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > last.at %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls %}<tool_call>"
    "{{ call.function.name }}{{ call.function.arguments.a }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_earlier_thoughts_that_a_template_leaves_out_make_an_example_of_each_answer(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 7}}]}
    said = talk("a", "1", "b", "2")
    said[1] |= {"reasoning_content": "hm"}
    rows = [{"messages": said}, {"messages": [*talk("a"), call]}]
    _, examples = read_examples(write(tmp_path / "train.jsonl", rows))
    with pytest.raises(ValueError, match=r"message 2 differently once others follow.*sft.split_turns=true"):
        examples[0].pieces(rendering(THINKING))
    answers = [[text for text, on in one.pieces(rendering(THINKING)) if on] for one in examples[0].split()]
    assert answers == [["<think>hm</think>1<|im_end|>\n"], ["2<|im_end|>\n"]]
    (made,) = [text for text, on in examples[1].pieces(rendering(THINKING)) if on]
    assert made == "<tool_call>add7</tool_call><|im_end|>\n"
    opened = THINKING.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    with pytest.raises(ValueError, match='begins an answer with "<think>", and renders message 4 with "2<'):
        examples[0].split()[1].pieces(rendering(opened))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("pieces", "trained"),
    [
        # A template that writes no end: it is the token with which the next message begins; then the tokenizer's.
        ([("<u>q<a>", 0), ("12", 1), ("<u>r<a>", 0), ("3", 1)], ["1", "2", "<u>", "3", "<eos>"]),
        # A special token inside of an answer is not its end.
        ([("<u>q<a>", 0), ("1<t>2", 1)], ["1", "<t>", "2", "<eos>"]),
        ([("<u>q<a>", 0), ("1<t>2<eos>\n", 1)], ["1", "<t>", "2", "<eos>"]),
        # An end of turn that is no end token of the model.
        ([("<u>q<a>", 0), ("1<t> \n", 1), ("<a>", 0)], ["1", "<t>"]),
    ],
)
def test_the_end_of_each_turn_is_trained_on(pieces: Sequence[Any], trained: Sequence[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from fsbarrier.workers.examples import tokens_of

    words = ["<eos>", "<u>", "<a>", "<t>", *"qr123 \n"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "q"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", additional_special_tokens=words[1:4]
    )
    tokens, marks = tokens_of(tokenizer, pieces, {0, 1}, plain=False)
    assert [words[token] for token, on in zip(tokens, marks, strict=True) if on] == trained


# --- the loss, and runs -----------------------------------------------------------------------------------------------------

Piece = tuple[str, bool]
#: what the template makes of the last two examples
TALKS: list[list[Piece]] = [
    [("ba=", False), ("ab<eos>", True), ("bbdc=", False), ("cd<eos>", True)],
    [("ba=ab<eos>bbdc=", False), ("cd<eos>", True)],
]


def in_pieces(rows: Sequence[Mapping[str, Any]]) -> list[list[Piece]]:
    return [[(row["prompt"], False), (f"{row['completion']}<eos>", True)] for row in rows]


def cross_entropy(model: Path, examples: Sequence[Sequence[Piece]]) -> float:
    """By transformers' own loss in float64, whose labels are the answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64),
        AutoTokenizer.from_pretrained(model),
    )
    total, count = 0.0, 0
    for pieces in examples:
        tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in pieces]
        labels = [
            own if trained else [-100] * len(own) for own, (_, trained) in zip(tokens, pieces, strict=True)
        ]
        ids, wanted = torch.tensor([[*chain(*tokens)]]), torch.tensor([[*chain(*labels)]])
        kept = int((wanted != -100).sum())
        with torch.no_grad():
            total += kept * float(policy(input_ids=ids, labels=wanted).loss)
        count += kept
    return total / count


@pytest.mark.torch
def test_the_loss_is_transformers_cross_entropy_and_falls_over_a_restart(
    bench: Bench, data: Path, tmp_path: Path
) -> None:
    """The training loss is that of the policy before the first step, the held-out loss that of the new policy."""
    where = (
        f"model={data / 'model'}",
        f"data_path={data}",
        *SMALL,
        "rollout.tasks=99",
        "trainer.minibatch=99",
    )
    run, held_out = tmp_path / "run", in_pieces(sorting(5, first=20))
    (first,) = bench.run(run, *where, "--iterations", "1").check().events("updated")
    expected = cross_entropy(DEMO, [*in_pieces(sorting(14)), *TALKS])
    assert first["loss"] == pytest.approx(expected, abs=1e-5)
    assert first["held_out_loss"] == pytest.approx(cross_entropy(run / "model.pt", held_out), abs=1e-5)
    assert (first["trajectories"], first["tokens"], first["replayed"], first["policy_kl"]) == (16, 79, 0, 0)
    # A file in the place of an iteration's rollouts would be of no use, and so is an engine.
    assert not (run / "train_trajectories").exists() and not list(run.rglob("vllm.log"))
    interrupted = bench.run(run, *where, "--iterations", "4", "--eval-interval", "3").check()
    updates = sorted(interrupted.events("updated"), key=lambda one: one["iteration"])
    losses = [update["loss"] for update in updates]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]
    assert [update["iteration"] for update in updates if "held_out_loss" in update] == [1, 4]
    bench.run(tmp_path / "whole", *where, "--iterations", "4").check()
    weights = [
        (folder / "model.pt" / "model.safetensors").read_bytes() for folder in (run, tmp_path / "whole")
    ]
    assert weights[0] == weights[1]


@pytest.mark.torch
def test_what_it_learned_is_where_reinforcement_learning_begins(
    bench: Bench, data: Path, tmp_path: Path
) -> None:
    """On two nodes, with adapters; examples that are too long are cut off."""
    tasks = [{"prompt": one["prompt"], "answer": one["completion"]} for one in sorting(9)]
    tasks.append({"prompt": "a=", "answer": "a" * 40})
    folder = write(tmp_path / "data" / "train.jsonl", tasks).parent
    where = (f"model={DEMO}", f"data_path={folder}", "--eval-interval", "0", "lora.rank=2", *SMALL)
    ended = bench.run(tmp_path / "sft", *where, "rollout.tasks=10", "--iterations", "2", nodes=2).check()
    prepared = ended.events("batch_prepared")
    assert [(one["trajectories"], one["cut_off"], one["left_out"]) for one in prepared] == [(10, 1, 0)] * 2
    shown = json.loads(bench.type(tmp_path / "sft", "status", "--json").said)
    assert shown["state"] == "finished" and shown["phase"]["name"] == "iteration_end" and "loss" in str(shown)
    assert bench.type(tmp_path / "sft", "report", "--csv", str(tmp_path / "report.csv")).codes == [0]
    assert "loss" in (tmp_path / "report.csv").read_text().splitlines()[0]
    begun = (f"init_from={tmp_path / 'sft'}", f"data_path={folder}", "--eval-interval", "0", "--dry-run")
    ended = bench.run(tmp_path / "rl", *begun, "rollout.max_tokens=8", "engine.max_model_len=32")
    assert ended.codes == [0] and "train: 10 tasks" in ended.said and "sft/model.pt" not in ended.said


def test_what_the_program_decides_itself_is_refused_in_one_line(
    bench: Bench, data: Path, tmp_path: Path
) -> None:
    for word, said in {
        "algorithm.preset=dapo": 'algorithm.loss="grpo": program sft needs algorithm.loss="rft"; drop it',
        "rollout.temperature=0.5": "rollout.temperature=0.5: program sft needs rollout.temperature=1.0; drop it",
        "rl_phase=update": "--rl-phase update: not supported by program sft; drop it",
        "rollout.agent=mine.py:Agent": "program sft does not read tasks; drop it",
    }.items():
        ended = bench.run(tmp_path / "run", f"model={DEMO}", f"data_path={data}", *SMALL, word)
        assert ended.codes == [2] and said in ended.said, ended.said
    shown = bench.run(tmp_path / "run", f"model={data / 'model'}", f"data_path={data}", *SMALL, "--dry-run")
    assert shown.codes == [0] and "fsbarrier.workers.examples" in shown.said and "engine:" not in shown.said
    assert not (tmp_path / "run").exists()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_goes_on_and_learns_the_same(tmp_path: Path) -> None:
    """Real processes: SIGKILL to the daemon while an update trains, and the same command again."""
    small = ("rollout.tasks=256", "trainer.minibatch=32", "optimizer.lr=5e-4", "engine.max_model_len=64")
    data = ("--program", "sft", "--data-path", str(FOLDER), "--model", str(DEMO), "--iterations", "3")

    def start(name: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "fsbarrier", "run", "--log-path", str(tmp_path / name)]
        return subprocess.Popen([*argv, *data, "--eval-interval", "0", *small])

    def updating() -> bool:
        journals = (tmp_path / "killed" / "events").glob("*")
        told = [json.loads(line) for one in journals for line in one.read_text().split("\n")[:-1]]
        return any((one["event"], one["iteration"]) == ("decision", 2) and one["phase"] == 9 for one in told)

    assert start("whole").wait() == 0
    killed = start("killed")
    until(updating)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL and start("killed").wait() == 0
    weights = [tmp_path / name / "model.pt" / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
