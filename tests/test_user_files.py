"""The catalogue of files that people bring (`tests/files/`), each with what must come of it. Whoever adds a file adds a line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import typed

from fsbarrier.data import demo_tasks
from fsbarrier.data.tasks import Task
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rewards.score import Answer, Score
from fsbarrier.wording import counted

MODEL = demo_tasks.FOLDER / "model"
FILES = Path(__file__).parent / "files"


def scored(kind: str, responses: Sequence[str], answer: object = "7") -> list[Score]:
    """The Scores of these answers to a task, as one group."""
    kind = ",".join(f"{FILES}/rewards/{one}" if ".py" in one else one for one in kind.split(","))

    async def run() -> list[Score]:
        reward = open_reward(kind, timeout_s=120.0)
        try:
            await reward.open()
            task = Task(0, "t-0", "How many?", answer, {"home": os.getcwd()})
            return await reward.score_group(task, [Answer(one) for one in responses])
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "of_answers"),
    [
        ("annotated_dataclass.py:score", {"7": 1.0, "it is 7": 0.0}),
        # Two files of one name, both of which pickle their functions.
        ("parallel.py:forked,again/parallel.py:forked", {"7": 2.0, "8": 0.0}),
        ("parallel.py:spawned", {"7": 1.0, "8": 0.0}),
        ("models.py:score", {"7": 1.0, "8": 0.0}),
        ("habits.py:alarm", {"7": 1.0, "endless": -0.5}),
        ("habits.py:own_loop", {"7": 1.0, "8": 0.0}),
        # More answers than processes.
        ("habits.py:elsewhere", dict.fromkeys(map(str, range(10)), 1.0)),
        ("habits.py:crashes", {"7": 1.0, "crash": "crashes: its process was ended by signal 11 (SIGSEGV)"}),
        ("habits.py:leaves", {"leave": "leaves: its process ended with exit code 3", "7": 1.0}),
        ("groups.py:array", {"7": 1.0, "8": 0.0}),
        ("groups.py:column", {"7": 1.0, "8": 0.0}),
        pytest.param("groups.py:tensor", {"7": 1.0, "8": 0.0}, marks=pytest.mark.slow),
        ("groups.py:pairs", {"7": 1.0, "8": 0.0}),
        (
            "groups.py:by_answer",
            dict.fromkeys(("7", "8"), "by_answer: gave {'7': 1.0, '8': 0.0}, not a list of 2 rewards"),
        ),
        (
            "groups.py:one_number",
            dict.fromkeys(("7", "8"), "one_number: gave 1.0, not a list of 2 rewards"),
        ),
    ],
)
def test_a_reward_file_does_what_it_does_elsewhere(kind: str, of_answers: dict[str, float | str]) -> None:
    """For each answer its reward, or how the function's failure is told."""
    found = scored(kind, list(of_answers))
    for score, expected in zip(found, of_answers.values(), strict=True):
        if isinstance(expected, str):
            assert (score.reward, score.error) == (0.0, expected)
        else:
            assert (score.reward, score.error) == (expected, None)


GOOD = {"prompt": "dcba=", "answer": "abcd"}
#: a conversation in which a tool was called, with its arguments as text, as OpenAI's API has them
CALLED = [
    {"role": "user", "content": "dc="},
    {"role": "assistant", "tool_calls": [{"function": {"name": "sort", "arguments": '{"letters": "dc"}'}}]},
    {"role": "tool", "content": "cd", "tool_call_id": "call_1"},
]


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        (
            [GOOD, {"prompt": "ab=" * 20, "answer": "ab"}, GOOD],
            "reward.kind=exact",
            [
                "train: 3 tasks",
                "5 tokens in the middle, 60 at most (task train-1)",
                "after 1 prompt, engine.max_model_len=64 leaves fewer than rollout.max_tokens=8",
                "1 prompt equal to an earlier one",
                "    | dcba=",
                "reward.kind=exact: 1 for the reference answer, 0 for nonsense",
            ],
        ),
        (
            [{"prompt": [{"role": "user", "content": "dc="}], "answer": ["cd", "c d"]}],
            "reward.kind=exact",
            ["    | <user>dc=", "exact: 1 for the reference answer, 0 for nonsense"],
        ),
        (
            [{"prompt": CALLED, "answer": "cd"}],
            "reward.kind=exact",
            ["    | <user>dc=<assistant>lettersdc<tool>cd\n", "prompts: 37 tokens in the middle"],
        ),
        (
            [GOOD],
            "reward.kind=FILES/habits.py:alarm",
            ["1 for nonsense (mean of 1): it does not tell them apart"],
        ),
        ([GOOD], "reward.kind=FILES/groups.py:by_answer", ["fails: by_answer: gave {'abcd': 1.0,"]),
        (
            [{"prompt": "dc="}],
            "reward.kind=FILES/models.py:score",
            ["not tried, as the first tasks have no answer"],
        ),
    ],
)
def test_check_says_what_a_run_would_meet(
    tmp_path: Path, rows: list[dict[str, object]], words: str, says: list[str]
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}{{ value }}{% endfor %}{% endfor %}{% endfor %}"
    )
    kind = words.replace("FILES", f"{FILES}/rewards")
    limits = ("engine.max_model_len=64", "rollout.max_tokens=8")
    said = typed("check", tmp_path, "--model", model, kind, *limits).out
    for one in says:
        assert one in said, said


# --- task files -------------------------------------------------------------------------------------------------------------------

#: how many tasks a file has, or how it is refused
TASK_FILES: dict[str, int | str] = {
    "array": "line 1: is not JSON: Expecting value at column 1; write each task on a line of its own",
    "assistant_last": 1,
    "blank_lines": "line 1: is empty",
    "bom": 1,
    "control_characters": 1,
    "crlf": 2,
    "csv": "line 1: is not JSON: Expecting value",
    "cut_off": "line 2: is not JSON: ",
    "empty": "contains no tasks",
    "empty_prompt": "line 1: prompt is empty",
    "gsm8k": "line 1: has no field prompt (its fields: question, answer)",
    "latin1": "line 1: is not UTF-8",
    "messages": "line 1: has no field prompt (its fields: messages, answer)",
    "metadata": 1,
    "nan": "line 1: is not JSON: NaN is no JSON value",
    "no_final_newline": 1,
    "null_content": "line 1: prompt: message 1 needs a content (text), got null",
    "null_prompt": "line 1: prompt is null",
    "number_answer": 1,
    "number_id": 1,
    "pretty": "line 1: is not JSON: Expecting property name enclosed in double quotes at column 1; write each task",
    "same_id": 'line 2: task_id "a" is already used by ',
    "sharegpt": "line 1: has no field prompt (its fields: conversations)",
    "single_quotes": "line 1: is not JSON: ",
    "surrogate": "line 1: ",
    "text": "line 1: is not JSON: ",
    "trailing_comma": "line 1: is not JSON: ",
    "unknown_role": "task 0: the chat template of ",
    "utf16": "line 1: is not UTF-8",
    "verl": 1,
}


def test_each_task_file_of_the_catalogue_has_its_line() -> None:
    assert {path.stem for path in (FILES / "tasks").iterdir()} == {*TASK_FILES}


@pytest.mark.parametrize("name", TASK_FILES)
def test_a_task_file_as_people_write_it(tmp_path: Path, name: str) -> None:
    expected, model = TASK_FILES[name], tmp_path / "model"
    for split in ("train", "test"):
        shutil.copy(FILES / "tasks" / f"{name}.jsonl", tmp_path / f"{split}.jsonl")
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    words = ("check", tmp_path, "--model", model, "engine.max_model_len=64", "rollout.max_tokens=8")
    if isinstance(expected, int):
        assert f"train: {counted(expected, 'task')} in " in typed(*words).out
    else:
        said = typed(*words, code=2).err
        assert expected in said and len(said.splitlines()) == 1
        assert "\x1b" not in said


# --- agents -----------------------------------------------------------------------------------------------------------------------

#: how a start answers to an agent of tests/files/agents: "" if it is accepted
AGENTS = {
    "plain.py:Agent": "",
    "plain.py:agent": "rollout.agent=",
    "plain.py:Missing": "Missing",
    "no_method.py:Agent": "rollout.agent=",
    "needs_arguments.py:Agent": "rollout.agent=",
    "not_async.py:Agent": "rollout.agent=",
    "imports_missing.py:Agent": "no_such_package",
    "syntax_error.py:Agent": "SyntaxError",
    "exits.py:Agent": "rollout.agent=",
    "nowhere.py:Agent": "nowhere.py",
    "plain.py": "rollout.agent=",
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_as_people_write_it(tmp_path: Path, name: str) -> None:
    shutil.copytree(FILES / "agents", tmp_path, dirs_exist_ok=True)
    # Not in the catalogue's folder, because the linter reads that.
    (tmp_path / "syntax_error.py").write_text("class Agent:\n    async def run(self, task, client)\n")
    said = typed(
        *("check", demo_tasks.FOLDER, "--model", MODEL, f"rollout.agent={tmp_path}/{name}"),
        *("engine.max_model_len=64", "rollout.max_tokens=8"),
        code=2 if AGENTS[name] else 0,
    ).err
    assert AGENTS[name] in said and "Traceback" not in said
    assert not AGENTS[name] or len(said.splitlines()) == 1, said


# --- model folders ----------------------------------------------------------------------------------------------------------------


def damaged(name: str, folder: Path) -> None:
    """Change the demo's model in `folder` into what people bring."""
    config = json.loads((folder / "config.json").read_text())
    match name:
        case "no_tokenizer":
            for path in folder.glob("tokenizer*"):
                path.unlink()
        case "no_config":
            (folder / "config.json").unlink()
        case "no_weights":
            (folder / "model.safetensors").unlink()
        case "weights_cut_off":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])
        case "pointer_of_git_lfs":
            (folder / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
            )
        case "adapter_only":
            for path in (folder / "model.safetensors", folder / "config.json"):
                path.unlink()
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        case "gguf":
            for path in folder.iterdir():
                path.unlink()
            (folder / "model-q4.gguf").write_bytes(b"GGUF")
        case "no_model_type":
            (folder / "config.json").write_text(
                json.dumps({k: v for k, v in config.items() if k != "model_type"})
            )
        case "unknown_type":
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "my_model"}))
        case "index_names_a_missing_file":
            index = {"weight_map": {"w": "model-00002-of-00002.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "config_is_no_json":
            (folder / "config.json").write_text("{'model_type': 'qwen2'}")


#: what a start says to it
MODELS = {
    "no_tokenizer": "has no tokenizer; give a Hugging Face model folder",
    "no_config": "config.json",
    "no_weights": "no weights (*.safetensors); not a complete model folder",
    "weights_cut_off": "model.safetensors: damaged: ",
    "pointer_of_git_lfs": "model.safetensors: damaged: no header",
    "adapter_only": "config.json",
    "gguf": "config.json",
    "no_model_type": "has a config.json without a model_type",
    "unknown_type": "has no language model of the kind my_model",
    "index_names_a_missing_file": "model-00002-of-00002.safetensors is missing",
    "config_is_no_json": "config.json: is not JSON",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder_as_people_bring_it(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    damaged(name, model)
    words = ("--data-path", demo_tasks.FOLDER, "--model", model, "--log-path", tmp_path / "run", "--dry-run")
    said = typed("run", *words, "engine.max_model_len=64", "rollout.max_tokens=8", code=2).err
    assert MODELS[name] in said and len(said.splitlines()) == 1
