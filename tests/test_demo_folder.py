"""The built-in task: an honest split, made as scripts/demo_model.py says, and whole in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsbarrier.cli.start import demo_folder
from fsbarrier.data.demo_tasks import FOLDER
from fsbarrier.data.tasks import read_tasks


def test_train_and_test_share_no_prompt() -> None:
    prompts = []
    for name in ("train", "test"):
        tasks = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        assert all(task["answer"] == "".join(sorted(task["prompt"][:4])) for task in tasks)
        assert read_tasks(FOLDER / f"{name}.jsonl").count == len(tasks)
        prompts.append({task["prompt"] for task in tasks})
    assert [len(each) for each in prompts] == [4096, 512] and not prompts[0] & prompts[1]


def test_a_run_gets_a_copy(tmp_path: Path) -> None:
    target = tmp_path / "run" / "demo"
    for _ in range(2):
        demo_folder.make(target)
        files = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
        assert files == {path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file()}
        assert all((target / name).read_bytes() == (FOLDER / name).read_bytes() for name in files)
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "train.jsonl").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["demo"]


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
