"""The built-in task: an honest split, made as scripts/demo_model.py says, and whole in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fsbarrier
from fsbarrier.data.tasks import read_tasks

FOLDER = Path(fsbarrier.__file__).parent / "data" / "demo"


def test_train_and_test_share_no_prompt() -> None:
    prompts = []
    for name in ("train", "test"):
        tasks = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        assert all(task["answer"] == "".join(sorted(task["prompt"][:4])) for task in tasks)
        assert read_tasks(FOLDER / f"{name}.jsonl").count == len(tasks)
        prompts.append({task["prompt"] for task in tasks})
    assert [len(each) for each in prompts] == [4096, 512] and not prompts[0] & prompts[1]


@pytest.mark.torch
def test_the_packages_tasks_and_tokenizer_are_what_the_script_makes(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(checkout / "scripts"))
    import demo_model
    from transformers import AutoTokenizer

    demo_model.write_tasks(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    assert tokenizer.encode("dcba=") == demo_model.encode("dcba=")
    assert (
        tokenizer.decode([*demo_model.encode("abcd"), tokenizer.eos_token_id], skip_special_tokens=True)
        == "abcd"
    )
