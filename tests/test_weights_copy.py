"""A node's own copy of the newest weights: served only where it is what a committed version's manifest says, and gone with its daemon."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsbarrier.errors import ProgramFailed
from fsbarrier.program import PublishWeights
from fsbarrier.run import work_kinds
from fsbarrier.run.job import RowJob, Workplace
from fsbarrier.run.weights import checked_weights
from fsbarrier.rundir import checkpoints
from fsbarrier.store import reading
from fsbarrier.training import weights_copy
from fsbarrier.training.weights_copy import WeightsCopy

VERSION = "policy-000006.g0004"
WEIGHTS = {"model-00001-of-00002.safetensors": b"w" * 1000, "model-00002-of-00002.safetensors": b"v" * 500}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model's folder of a committed version in the run directory, with adapters and a trainer state."""
    folder = tmp_path / "run" / "checkpoints" / VERSION
    content = {**WEIGHTS, "config.json": b"{}", "adapter/adapter_model.safetensors": b"a"}
    for name, data in {
        **{f"model/{name}": data for name, data in content.items()},
        "trainer/part": b"t",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    checkpoints.write_manifest(folder, 6)
    return folder / "model"


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    (tmp_path / "node").mkdir()
    return Workplace(
        engines=cast(Any, None),
        work_dir=tmp_path / "work",
        log_dir=tmp_path / "logs",
        log_path=tmp_path / "run",
        stall_timeout_s=60.0,
        weights=WeightsCopy(tmp_path / "node"),
    )


def left_by_the_trainer(place: Workplace, content: dict[str, bytes] = WEIGHTS) -> WeightsCopy:
    assert place.weights is not None
    assert place.weights.begin(VERSION, 1500)
    for name, data in content.items():
        (place.weights.unchecked(VERSION) / name).write_bytes(data)
    return place.weights


def test_engines_load_the_node_s_copy_and_nothing_else_is_read_again(
    model: Path, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = left_by_the_trainer(place)
    folder, (line,) = checked_weights(model, RowJob(), place)
    assert folder == copies.checked(VERSION) and (line["weights_from"], line["note"]) == ("node", "")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {**WEIGHTS, "config.json": b"{}"}
    monkeypatch.setattr(checkpoints, "compare", None)
    assert checked_weights(model, RowJob(), place) == (folder, [])


def test_a_node_that_has_no_copy_reads_the_run_directory_and_says_so_once(
    model: Path, place: Workplace
) -> None:
    folder, (line,) = checked_weights(model, RowJob(), place)
    assert folder == model and line["weights_from"] == "run directory"
    assert line["note"].startswith(f"no copy of {VERSION} is here (0.0 GB of weights; ")
    assert checked_weights(model, RowJob(), place) == (model, [])


OTHERS = {
    "an older lineage's": {**WEIGHTS, "model-00002-of-00002.safetensors": b"o" * 500},
    "cut off": {**WEIGHTS, "model-00001-of-00002.safetensors": b"w" * 999},
    "one too many": {**WEIGHTS, "model.safetensors": b"o"},
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_what_differs_from_the_manifest_is_never_served(
    model: Path, place: Workplace, content: dict[str, bytes]
) -> None:
    """A copy of the same name whose trainer belonged to a run that was taken back, say."""
    copies = left_by_the_trainer(place, content)
    folder, (line,) = checked_weights(model, RowJob(), place)
    assert folder == model and line["note"].startswith(f"the copy of {VERSION} is not what was published")
    assert not list(copies.folder.iterdir())


def test_a_copy_of_what_was_never_committed_is_not_served(model: Path, place: Workplace) -> None:
    """Its node died between the copy and the commit, say: without a manifest there is nothing that vouches for it."""
    copies = left_by_the_trainer(place)
    (model.parent / checkpoints.MANIFEST).unlink()
    assert checked_weights(model, RowJob(), place) == (model, [])
    with pytest.raises(ProgramFailed, match="has no MANIFEST"):
        copies.confirm(model, lambda: None)
    assert copies.nearest(model) == model


def test_when_the_version_itself_is_damaged_no_copy_hides_it(model: Path, place: Workplace) -> None:
    left_by_the_trainer(place)
    (model / "config.json").write_bytes(b"{")
    with pytest.raises(ProgramFailed, match=r"config\.json has 1 bytes"):
        checked_weights(model, RowJob(), place)


def replaced_as_a_whole(model: Path) -> str:
    """The identity of the policy that was published there; another run's is in its place now, and its manifest agrees with it."""
    published = checkpoints.identity(VERSION, checkpoints.read_manifest(model.parent).digest)
    (model / next(iter(WEIGHTS))).write_bytes(b"o" * 1000)
    checkpoints.write_manifest(model.parent, 6)
    return published


def test_a_copy_does_not_hide_that_the_version_was_replaced_or_lost_its_manifest(
    model: Path, place: Workplace
) -> None:
    published = checkpoints.identity(VERSION, checkpoints.read_manifest(model.parent).digest)
    left_by_the_trainer(place)
    assert checked_weights(model, RowJob(), place, published)[1][0]["weights_from"] == "node"
    replaced_as_a_whole(model)
    with pytest.raises(ProgramFailed, match="holds another policy"):
        checked_weights(model, RowJob(), place, published)
    (model.parent / checkpoints.MANIFEST).unlink()
    with pytest.raises(ProgramFailed, match="has no MANIFEST"):
        checked_weights(model, RowJob(), place, published)


@pytest.mark.parametrize("fails", ["the manifest", "a file of weights", "what is published"])
def test_a_mount_that_fails_for_a_while_is_waited_for(
    model: Path, place: Workplace, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """For as long as everywhere else, and not only for the moment that each reader of a file waits."""
    place.weights = None
    published = checkpoints.identity(VERSION, checkpoints.read_manifest(model.parent).digest)
    name = next(iter(WEIGHTS)) if fails == "a file of weights" else checkpoints.MANIFEST
    real, failures = reading.open_below, iter(range(3))

    def open_below(root: Path, path: Path) -> int:
        if path.name == name and next(failures, None) is not None:
            raise OSError(errno.EIO, "not now")
        return real(root, path)

    monkeypatch.setattr(reading, "open_below", open_below)
    # Each reader tries once.
    monkeypatch.setattr(checkpoints, "patiently", lambda ask: ask())
    if fails == "what is published":
        work = PublishWeights(model.parent, 6, keep=0, trained_on=1)
        context = cast(Any, SimpleNamespace(newest=lambda: 1, generation=1))
        assert work_kinds.execute(work, context, RowJob(), place)["policy_version"] == 6
    else:
        assert checked_weights(model, RowJob(), place, published)[0] == model
    assert next(failures, None) is None
    failures, place.checked_model, place.outage_s = iter(range(10**6)), None, 0.1
    with pytest.raises(checkpoints.PolicyUnreadable, match="not now"):
        checked_weights(model, RowJob(), place, published)


def test_the_next_update_removes_the_copy_and_what_an_attempt_left(model: Path, place: Workplace) -> None:
    copies = left_by_the_trainer(place)
    checked_weights(model, RowJob(), place)
    assert copies.begin("policy-000007.g0004", 10) and copies.begin("policy-000007.g0005", 10)
    assert [path.name for path in copies.folder.iterdir()] == ["policy-000007.g0005.unchecked"]
    # That update failed, and version 6 is served again.
    assert checked_weights(model, RowJob(), place)[0] == model


def test_without_room_there_is_no_copy(
    model: Path, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.weights is not None
    monkeypatch.setattr(weights_copy, "free_bytes", lambda folder: 3_100_000_000)
    assert not place.weights.begin(VERSION, 15_200_000_000)
    _, (line,) = checked_weights(model, RowJob(), place)
    assert "3.1 GB may be written to" in line["note"] and not list(place.weights.folder.iterdir())
