"""`init_from`: a new run begins with a policy of another one, of its own, and with exactly what that run published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_export import checkpoint

from fsbarrier.cli.start import begin as beginning
from fsbarrier.cli.start.begin import Request, Start
from fsbarrier.errors import UsageError
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.settings.sections import Settings, known_names
from fsbarrier.settings.sources import from_words


def start(log_path: Path, *words: str, **more: Any) -> Start:
    chosen = from_words([f"log_path={log_path}", *words], known_names())
    return beginning.begin(Request(**{"chosen": tuple(chosen), "environ": {}, "master": True, **more}))


@pytest.fixture
def data(tmp_path: Path) -> str:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    return f"data_path={folder}"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run with the policy versions 1 and 2, of which it serves 2."""
    log_path = tmp_path / "first"
    runrecord.publish(runrecord.new(log_path, Settings(), tasks={}, model=None))
    for version in (1, 2):
        folder = checkpoint(log_path, version, 1, f"weights {version}", complete=False)
        (folder / "model" / "tokenizer.json").write_text("{}")
        (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
        checkpoints.write_manifest(folder, version)
    checkpoints.publish_link(log_path, folder)
    return log_path


@pytest.mark.parametrize(("named", "version"), [("@1", 1), ("@2", 2), ("", 2)])
def test_a_run_begins_with_its_own_copy_of_anothers_policy(
    tmp_path: Path, first: Path, data: str, named: str, version: int
) -> None:
    wanted = first / "checkpoints" / f"policy-{version:06d}.g0001" / "model"
    expected = {path.name: path.read_bytes() for path in wanted.iterdir()}
    words = (data, f"init_from={first}{named}")
    made = start(tmp_path / "run", *words)
    own = Path(str(made.record.model))
    assert own == tmp_path / "run" / "first_policy" / "model" == Path(str(made.settings.model))
    shutil.rmtree(first)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == expected
    # The same command goes on, without the other run.
    assert start(tmp_path / "run", *words).record == made.record


def test_nothing_begins_with_a_damaged_policy(tmp_path: Path, first: Path, data: str) -> None:
    weights = first / "checkpoints" / "policy-000001.g0001" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match="differs from what MANIFEST"):
        start(tmp_path / "run", data, f"init_from={first}@1")
    assert not runrecord.exists(tmp_path / "run")
    assert start(tmp_path / "run", data, f"init_from={first}@2").created


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init_from=FIRST@9"], "init_from=FIRST@9: policy version 9: not on disk; available: 0, 1, 2"),
        (["init_from=FIRST@two"], "'two' is not a policy version; write RUN_DIRECTORY@VERSION"),
        (["init_from=FIRST/nowhere@1"], "no run there (no run.json)"),
        (
            ["init_from=FIRST@1", "model=m"],
            "contradicts --model, which also sets the initial policy; drop one of the two",
        ),
        (["init_from=FIRST@1", "program=ping"], "program ping has no model; drop it"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, first: Path, data: str, words: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        start(tmp_path / "run", data, *(word.replace("FIRST", str(first)) for word in words))
    assert message.replace("FIRST", str(first)) in str(caught.value)
    assert not (tmp_path / "run").exists()
