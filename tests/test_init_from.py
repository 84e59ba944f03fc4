"""`init_from`: a new run begins with a policy of another one, of its own, and with exactly what that run published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forks import run_script
from test_export import checkpoint, weights

from fsbarrier.cli.start import begin as beginning
from fsbarrier.cli.start import model_folder
from fsbarrier.cli.start.begin import Request, Start
from fsbarrier.errors import UsageError
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.settings.sections import Settings, known_names
from fsbarrier.settings.sources import from_words


def start(log_path: Path, *words: str, **more: Any) -> Start:
    chosen = from_words([f"log_path={log_path}", *words], known_names())
    return beginning.begin(Request(**{"chosen": tuple(chosen), "environ": {}, "master": True, **more}))


@pytest.fixture(autouse=True)
def adapters_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs' models are made up. `test_lora` checks what is asked of a real one at the start, in a process of its own."""
    monkeypatch.setattr(model_folder, "examine", lambda *_: "")


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


# --- with the state of the trainer ---------------------------------------------------------------------------------------


def with_state(first: Path, version: int) -> None:
    """Give a version a trainer state, in two parts."""
    folder = first / "checkpoints" / f"policy-{version:06d}.g0001"
    counts = {"policy_version": version, "optimizer_steps": 7}
    (folder / "trainer").mkdir(exist_ok=True)
    layout = {"format": "fsbarrier-trainer/1", **counts, "scalars": {}, "tensors": {}}
    (folder / "trainer" / "layout.json").write_text(json.dumps(layout))
    for part in (0, 1):
        (folder / "trainer" / f"part-{part:05d}.safetensors").write_text(f"part {part} of {version}")
    checkpoints.write_manifest(folder, version)


STATE = ("init_optimizer=true", "rollout.tasks=1")


def test_a_run_begins_with_the_trainers_state_too(tmp_path: Path, first: Path, data: str) -> None:
    with_state(first, 1)
    words = (data, f"init_from={first}@1", *STATE)
    start(tmp_path / "run", *words)
    shutil.rmtree(first)
    own = tmp_path / "run" / "first_policy"
    manifest = checkpoints.verify(own)
    assert manifest.policy_version == 0 and checkpoints.newest_state(own) == "first_policy"
    assert {name for name in manifest.files if name.startswith("trainer/")} == {
        f"trainer/{name}" for name in ("layout.json", "part-00000.safetensors", "part-00001.safetensors")
    }
    layout = json.loads((own / "trainer" / "layout.json").read_text())
    assert (layout["policy_version"], layout["optimizer_steps"]) == (0, 7)
    assert (own / "trainer" / "part-00001.safetensors").read_text() == "part 1 of 1"
    # The same command goes on, without the other run.
    assert not start(tmp_path / "run", *words).created


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("fault", "words", "message"),
    [
        ("not saved", "@1", "version 1 has no trainer state in the shared directory"),
        ("not saved", "@1", "the nearest version that has one is 2"),
        ("", "@2", "the nearest version that has one is 1"),
        ("", "@0", "policy version 0 has no trainer state"),
        ("none at all", "", "policy version 2 has no trainer state"),
        ("none at all", "", "no version of that run has one"),
        ("another trainer's", "@1", "policy version 1 has no trainer state"),
        ("", "@1 lora.rank=4", "the whole policy, but this run trains adapters of rank 4"),
        ("", "@1 trainer.command=true", "not supported with trainer.command"),
    ],
)
def test_a_run_does_not_begin_without_the_state_that_it_asks_for(
    tmp_path: Path, first: Path, data: str, fault: str, words: str, message: str, dry_run: bool
) -> None:
    model = first / "checkpoints" / "policy-000001.g0001" / "model"
    run = runrecord.load(first)
    (first / "run.json").unlink()
    runrecord.publish(runrecord.new(first, run.settings, tasks={}, model=str(model)))
    if fault == "not saved":
        saved = checkpoints.read_manifest(model.parent)
        checkpoints.commit(model.parent, checkpoints.Manifest(1, saved.files, state_in=None))
        with_state(first, 2)
    elif fault != "none at all":
        with_state(first, 1)
    if fault == "another trainer's":
        (model.parent / "trainer" / "layout.json").unlink()
        checkpoints.write_manifest(model.parent, 1)
    named, *more = words.split() or [""]
    with pytest.raises(UsageError) as caught:
        start(tmp_path / "run", data, f"init_from={first}{named}", *STATE, *more, dry_run=dry_run)
    assert message in str(caught.value) and "init_optimizer" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_model_of_another_runs_adapters_comes_along(tmp_path: Path, data: str) -> None:
    """Also from a run that itself came from another one."""
    base, adapters = tmp_path / "base", Settings.from_json({**Settings().as_json(), "lora": {"rank": 4}})
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").write_bytes(weights("what the adapters were put into"))
    first = tmp_path / "first"
    runrecord.publish(runrecord.new(first, adapters, tasks={}, model=str(base)))
    for version in (1, 2):
        folder = checkpoint(first, version, 1, f"weights {version}", complete=False)
        (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
        (folder / "model" / "tokenizer.json").write_text("{}")
        with_state(first, version)
    second, third = tmp_path / "second", tmp_path / "third"
    start(second, data, f"init_from={first}@2", *STATE, "lora.rank=4")
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    shutil.rmtree(first)
    shutil.rmtree(base)
    start(third, data, f"init_from={second}@1", *STATE, "lora.rank=4")
    for run in (second, third):
        copied = run / "first_policy" / "base" / "model.safetensors"
        assert copied.read_bytes() == weights("what the adapters were put into")
    shutil.rmtree(second / "first_policy" / "base")
    with pytest.raises(UsageError, match="of its adapters is missing"):
        start(tmp_path / "fourth", data, f"init_from={second}@1", *STATE, "lora.rank=4")


# --- the update that it goes on with ----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_the_first_update_is_to_the_last_bit_the_other_runs_next_one(tmp_path: Path) -> None:
    run_script("init_optimizer_updates.py", tmp_path, "2x1:none:3")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    [
        "2x1:all:3:bf16>1x1:none:3:bf16",
        "1x2:node:3>2x1:none:3",
        "1x2:all:3:lora",
        "1x2:auto:5:zero3>1x2:all:5",
        "1x2:all:5>2x1:auto:5:zero2",
    ],
)
def test_the_first_update_is_the_same_however_the_state_was_made(tmp_path: Path, case: str) -> None:
    run_script("init_optimizer_updates.py", tmp_path, case)
