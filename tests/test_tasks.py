"""Task files: what is read from them, and the one line that each kind of mistake gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsbarrier.data.tasks import in_set, read_tasks
from fsbarrier.errors import UsageError
from fsbarrier.loader import load_program
from fsbarrier.settings.sections import Settings


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_text_and_chat_prompts_are_read_with_answer_and_metadata(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = write(
        tmp_path / "train.jsonl",
        {"prompt": "ba=", "answer": "ab", "level": 2, "tags": ["x", {"y": None}]},
        {"prompt": chat, "answer": 2, "task_id": 17},
        {"prompt": "any", "answer": None, "reward_model": {"ground_truth": "g", "style": "rule"}},
    )
    found = read_tasks(path)
    first, second, third = (found.tasks[index] for index in range(3))
    assert (found.count, first.index, first.task_id, first.prompt, first.answer) == (
        3,
        0,
        "train-0",
        "ba=",
        "ab",
    )
    assert first.metadata == {"level": 2, "tags": ["x", {"y": None}]}
    assert first.messages == [{"role": "user", "content": "ba="}]
    assert (second.task_id, second.prompt, second.messages, second.answer) == ("17", tuple(chat), chat, 2)
    assert third.answer == "g"
    assert read_tasks(path).count == 3


@pytest.mark.parametrize(
    ("where", "fitting"),
    [
        ("level=1:2", [1, 2]),
        ("level=1.5:", [2, 3]),
        ("level=:1", [0, 1]),
        ("level=2", [2]),
        ("kind=a", [0, 2]),
        ("kind=a:b", []),
        (None, [0, 1, 2, 3, 4]),
    ],
)
def test_a_set_has_the_tasks_whose_field_fits_with_both_ends(
    tmp_path: Path, where: str | None, fitting: list[int]
) -> None:
    rows = [{"prompt": "p", "answer": "a", "level": n, "kind": "ab"[n % 2]} for n in range(4)]
    found = read_tasks(write(tmp_path / "train.jsonl", *rows, {"prompt": "p", "answer": "a"}))
    fits = in_set(where)
    assert [n for n in range(5) if fits(found.tasks[n])] == fitting


def test_parquet_with_verls_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n, "split": "train", "raw": b"\xff"},
        }
        for n in range(3000)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    assert read_tasks(path).count == 3000
    task = read_tasks(path, [2048]).tasks[2048]
    assert (task.task_id, task.answer, task.prompt) == (
        "train-2048",
        "2049",
        ({"role": "user", "content": "2048+1?"},),
    )
    assert task.metadata["extra_info"] == {"index": 2048, "split": "train", "raw": "\ufffd"}
    del rows[1]["prompt"]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(UsageError, match=r"train\.parquet, row 1: prompt is null"):
        read_tasks(path)
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(UsageError, match=r"train\.parquet: not a valid Parquet file"):
        read_tasks(path)


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{"], "line 2: is not JSON: "),
        ([GOOD, "", GOOD], "line 2: is empty"),
        (["[1]"], "line 1: must be a JSON object, got [1]"),
        ([{"answer": "b", "question": "a"}], "line 1: has no field prompt (its fields: answer, question)"),
        ([{"prompt": "", "answer": "b"}], "line 1: prompt is empty"),
        ([{"prompt": 5, "answer": "b"}], "line 1: prompt must be text or a list of chat messages, got 5"),
        ([{"prompt": [], "answer": "b"}], "line 1: prompt is an empty list"),
        ([{"prompt": ["x"], "answer": "b"}], 'line 1: prompt: message 1 must be an object, got "x"'),
        ([{"prompt": [{"content": "x"}], "answer": "b"}], "line 1: prompt: message 1 needs a role"),
        (
            [{"prompt": [{"role": "user", "content": [1]}], "answer": "b"}],
            'message 1, part 1 must be {"type": "text"',
        ),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image", "image": 7}]}], "answer": "b"}],
            "message 1, part 1 has an image that is neither a path nor a data: URL: 7",
        ),
        (
            [{"prompt": [{"role": "user", "content": "<image> and?"}], "images": ["a", "b"], "answer": "b"}],
            "line 1: has 2 images, and its prompt has 1 times <image>",
        ),
        (
            [{"prompt": [{"role": "user", "content": "<image>?"}], "images": "a.png", "answer": "b"}],
            "line 1: images must be a list, got a.png",
        ),
        (
            [{"prompt": "<image>?", "images": ["a.png"], "answer": "b"}],
            "line 1: has images, and its prompt is text; give chat messages",
        ),
        ([GOOD | {"task_id": 1.5}], "line 1: task_id must be text or a whole number, got 1.5"),
        ([GOOD | {"task_id": "x"}, GOOD, GOOD | {"task_id": "x"}], 'line 3: task_id "x" is already used by '),
        (["[" * 100_000], "line 1: is not JSON: "),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_line(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    path = write(tmp_path / "train.jsonl", *lines)
    with pytest.raises(UsageError) as caught:
        read_tasks(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line ") and message in text and "\n" not in text and len(text) < 400


def test_images_are_read_from_parts_and_from_verls_column(tmp_path: Path) -> None:
    """Beside the text that they belong to; paths are relative to the file, and Parquet may hold the image itself."""
    from pyarrow import Table, parquet

    there = str(tmp_path / "pictures" / "a.png")
    parts = [{"type": "image", "image": "pictures/a.png"}, {"type": "text", "text": "how many?"}]
    path = write(tmp_path / "train.jsonl", {"prompt": [{"role": "user", "content": parts}], "answer": "2"})
    (first,) = read_tasks(path).tasks.values()
    assert first.messages == [
        {
            "role": "user",
            "content": [{"type": "image", "image": there}, {"type": "text", "text": "how many?"}],
        }
    ]
    row = {
        "prompt": [{"role": "user", "content": "<image>or <image>?"}],
        "images": [{"bytes": b"\x89PNG", "path": None}, {"bytes": None, "path": "pictures/a.png"}],
        "reward_model": {"ground_truth": "1"},
    }
    parquet.write_table(Table.from_pylist([row]), tmp_path / "train.parquet")
    (task,) = read_tasks(tmp_path / "train.parquet").tasks.values()
    (message,) = task.messages
    assert [part.get("image", part.get("text")) for part in message["content"]] == [
        "data:application/octet-stream;base64,iVBORw==",
        "or ",
        there,
        "?",
    ]
    assert task.has_images and first.has_images and "images" not in task.metadata


def test_whether_an_iteration_evaluates() -> None:
    decide: Any = load_program("rl").rows[5].leader
    evaluates = decide.__globals__["evaluates"]
    contexts = [SimpleNamespace(settings=Settings(eval_interval=n), iteration=1) for n in (0, 1, 2)]
    assert [evaluates(ctx) for ctx in contexts] == [False, True, True]


def test_a_task_file_that_is_a_hole_is_one_line_of_error(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="longer than 64 MiB"):
        read_tasks(path)
