"""The built-in task: an honest split, honest demonstrations, and a folder that is there whole or not at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fsbarrier.data import demo_tasks
from fsbarrier.data.tasks import read_tasks
from fsbarrier.errors import UsageError


def test_train_and_test_share_no_prompt_whatever_the_seed(tmp_path: Path) -> None:
    prompts: dict[str, set[str]] = {"train": set(), "test": set()}
    for seed in (0, 1):
        demo_tasks.write_tasks(tmp_path, seed)
        for name, count in (("train", demo_tasks.TRAIN_TASKS), ("test", demo_tasks.TEST_TASKS)):
            tasks = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
            assert len({task["prompt"] for task in tasks}) == count
            assert all(task["answer"] == "".join(sorted(task["prompt"][:4])) for task in tasks)
            prompts[name] |= {task["prompt"] for task in tasks}
    assert not prompts["train"] & prompts["test"]
    assert len(read_tasks(tmp_path / "test.jsonl").tasks) == demo_tasks.TEST_TASKS


def test_tasks_follow_from_the_seed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        demo_tasks.write_tasks(folder, 3)
    assert (first / "train.jsonl").read_bytes() == (second / "train.jsonl").read_bytes()
    demo_tasks.write_tasks(second, 4)
    assert (first / "train.jsonl").read_bytes() != (second / "train.jsonl").read_bytes()


@pytest.mark.torch
def test_the_tokenizer_gives_text_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from fsbarrier.training import warm_start

    warm_start.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("dcba=") == warm_start.encode("dcba=")
    assert (
        tokenizer.decode([*warm_start.encode("abcd"), tokenizer.eos_token_id], skip_special_tokens=True)
        == "abcd"
    )
    assert (
        tokenizer.encode("a 1")
        == [warm_start.VOCABULARY["a"]] + [warm_start.VOCABULARY[warm_start.UNKNOWN]] * 2
    )


@pytest.mark.torch
def test_the_folder_appears_once_and_whole(tmp_path: Path) -> None:
    """Two makers at once, with a warm start of a few steps: one of them wins, both end well, nothing else is left."""
    import torch
    from transformers import AutoModelForCausalLM

    from fsbarrier.workers import demo_model as maker

    quick = maker.WarmStart(batch=4, max_steps=2)
    out, failures = tmp_path / "demo", []

    def run() -> None:
        try:
            maker.make(out, 5, quick, lambda step, accuracy: None)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert demo_tasks.is_ready(out)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.torch
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    from fsbarrier.workers import demo_model as maker

    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a complete demo folder"):
        maker.make(out, 0, maker.WarmStart(batch=4, max_steps=1), lambda step, accuracy: None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (out / "notes.txt").read_text() == "mine"
