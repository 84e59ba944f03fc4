"""The trainer's state on the nodes between two saves to the shared directory, and what happens when a node takes its part with it."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_bench import Bench, bench

from fsbarrier.errors import ProgramFailed
from fsbarrier.host import memory
from fsbarrier.node.job import RowJob
from fsbarrier.node.state_upload import StateUpload
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.weights_copy import WeightsCopy
from fsbarrier.settings.sections import Settings

pytestmark = pytest.mark.torch


def update(work: Bench, version: int, **fields: Any) -> dict[str, Any]:
    before = POLICY_FOLDER.build(version - 1, 1) if version > 1 else ""
    return work.update(POLICY_FOLDER.build(version, 1), version=version, before=before, **fields)


def manifest(work: Bench, version: int) -> checkpoints.Manifest:
    return checkpoints.check_sizes(work.folder / POLICY_FOLDER.build(version, 1))


def weights(work: Bench, version: int) -> dict[str, Any]:
    return work.weights(POLICY_FOLDER.build(version, 1))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool((one[name] == other[name]).all()) for name in one)


def run_every(folder: Path, every: int) -> Bench:
    """A bench on the same rollouts for every update."""
    more = {"algorithm__max_logprob_gap": 1e9, "checkpoint__local_dir": str(folder / "node")}
    work = bench(folder, checkpoint__trainer_every=every, **more)
    work.prepare()
    return work


@pytest.fixture
def work(tmp_path: Path) -> Bench:
    return run_every(tmp_path, 2)


def kept_on_node(work: Bench) -> Path:
    return work.folder / "node" / f"test-{work.folder.name}" / "node_0"


def test_training_goes_on_from_what_the_node_kept(work: Bench, tmp_path: Path) -> None:
    told = [update(work, version) for version in (1, 2, 3)]
    assert [one["trainer_state"] for one in told] == ["nodes", "shared", "nodes"]
    assert [manifest(work, version).state_in for version in (1, 2, 3)] == [None, "", "policy-000002.g0001"]
    assert not any(name.startswith("trainer/") for name in manifest(work, 3).files)
    assert [path.name for path in kept_on_node(work).iterdir()] == ["policy-000003.g0001"]
    other = tmp_path / "always"
    other.mkdir()
    always = run_every(other, 1)
    for version in (1, 2, 3):
        update(always, version)
        assert same(weights(work, version), weights(always, version))


def test_an_update_can_be_done_again_by_the_next_generation(work: Bench) -> None:
    work.nested["checkpoint"]["trainer_every"] = 9
    update(work, 1)
    update(work, 2)
    again = work.update("policy-000002.g0002", version=2, before="policy-000001.g0001")
    assert again["note"] == "" and same(work.weights("policy-000002.g0002"), weights(work, 2))


@pytest.mark.parametrize("fault", ["gone", "torn"])
def test_without_the_node_s_part_the_policy_goes_back(work: Bench, fault: str) -> None:
    for version in (1, 2, 3):
        update(work, version)
    assert not same(weights(work, 2), weights(work, 3))
    part = kept_on_node(work) / "policy-000003.g0001" / "trainer" / "part-00000.safetensors"
    if fault == "gone":
        shutil.rmtree(kept_on_node(work))
    else:
        part.write_bytes(part.read_bytes()[:-9])
    told = update(work, 4)
    assert told["optimizer_steps"] == 0
    assert (
        "policy version 3 was lost with a node" in told["note"]
        and "falling back to version 2" in told["note"]
    )
    assert same(weights(work, 4), weights(work, 2))
    # From there it goes on as if versions 3 and 4 had not been.
    update(work, 5)
    assert same(weights(work, 5), weights(work, 3))


def test_before_the_first_save_it_begins_with_the_first_model(work: Bench) -> None:
    update(work, 1)
    shutil.rmtree(kept_on_node(work))
    assert "falling back to version 0" in update(work, 2)["note"]
    first = Bench(work.folder, work.nested).weights("")
    assert same(weights(work, 2), first) and manifest(work, 2).state_in == ""


def test_the_last_update_of_a_run_leaves_its_state(work: Bench) -> None:
    work.nested["iterations"] = 1
    assert update(work, 1)["trainer_state"] == "shared"


def test_a_node_without_room_writes_to_the_shared_directory(
    work: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsbarrier.training.node_state import NodeState

    monkeypatch.setattr(NodeState, "has_room", lambda self, size: False)
    assert update(work, 1)["trainer_state"] == "shared"


def test_a_temporary_folder_in_memory_is_filled_no_further_than_programs_can_bear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsbarrier.training.node_state import NodeState

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 100))
    monkeypatch.setattr(memory, "host_memory", lambda: (200, 80))
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "none")
    node = NodeState(tmp_path / "kept", range(1))
    for kind, room in (("tmpfs", 40), ("ext4", 100)):
        monkeypatch.setattr(memory, "mount_of", lambda path, kind=kind: SimpleNamespace(kind=kind))
        assert node.has_room(room) and not node.has_room(room + 1)


def test_room_is_checked_before_anything_is_trained(work: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(
        ProgramFailed, match=r"policy version 1 needs 0\.0 GB .*has only 0\.0 GB free; nothing was trained"
    ):
        update(work, 1)
    assert not (work.folder / POLICY_FOLDER.build(1, 1)).exists()


@pytest.fixture
def behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench each of whose saves counts as slow, so that it goes on behind the rollouts."""
    from fsbarrier.training import save_plan

    monkeypatch.setattr(save_plan, "CHEAP_S", 0.0)
    return run_every(tmp_path, 1)


def bring(work: Bench, version: int) -> None:
    """What the node does while the next rollouts go on."""
    name, upload = POLICY_FOLDER.build(version, 1), StateUpload()
    upload.begin(work.folder / name, kept_on_node(work) / name)
    (line,) = upload.wait(RowJob())
    assert line["error"] == ""


def test_a_slow_save_goes_on_behind_the_rollouts(behind: Bench, tmp_path: Path) -> None:
    assert update(behind, 1)["trainer_state"] == "follows"
    first = manifest(behind, 1)
    assert first.state_in is None and list(first.following) == ["trainer/part-00000.safetensors"]
    # Version 2 was trained before the state of version 1 had come.
    update(behind, 2)
    assert manifest(behind, 2).state_in is None
    bring(behind, 2)
    update(behind, 3)
    assert manifest(behind, 3).state_in == "policy-000002.g0001"
    bring(behind, 3)
    # With the node gone, the run goes on from what it brought, as if it had been written at once.
    shutil.rmtree(kept_on_node(behind))
    assert update(behind, 4)["note"] == ""
    other = tmp_path / "always"
    other.mkdir()
    always = run_every(other, 1)
    for version in (1, 2, 3, 4):
        always.nested["rl_phase"] = "update"
        assert update(always, version)["trainer_state"] == "shared"
    assert same(weights(behind, 4), weights(always, 4))


@pytest.mark.parametrize("fault", ["not brought", "damaged"])
def test_what_did_not_follow_is_gone_and_what_is_damaged_is_refused(behind: Bench, fault: str) -> None:
    update(behind, 1)
    bring(behind, 1)
    update(behind, 2)
    if fault == "damaged":
        bring(behind, 2)
        part = behind.folder / POLICY_FOLDER.build(2, 1) / "trainer" / "part-00000.safetensors"
        part.write_bytes(part.read_bytes()[:-9])
    shutil.rmtree(kept_on_node(behind))
    if fault == "damaged":
        with pytest.raises(ProgramFailed, match=r"part-00000\.safetensors"):
            update(behind, 3)
    else:
        assert "falling back to version 1" in update(behind, 3)["note"]
        assert same(weights(behind, 3), weights(behind, 1))


def test_how_often_by_default() -> None:
    from fsbarrier.training.node_state import is_due
    from fsbarrier.training.trainer_state import Pace

    assert is_due(0, 1, Pace(), last=False)  # the first is always saved, and so is known to cost something
    assert is_due(0, 7, Pace(saved_s=1.9, worked_s=0.1), last=False)
    assert not is_due(0, 7, Pace(saved_s=40.0, worked_s=399.0), last=False)
    assert is_due(0, 7, Pace(saved_s=40.0, worked_s=400.0), last=False)
    assert is_due(0, 7, Pace(saved_s=40.0, worked_s=1.0), last=True)
    assert [version for version in range(1, 8) if is_due(3, version, Pace(), last=False)] == [3, 6]
    assert Settings().checkpoint.trainer_every == 0


def test_a_state_that_is_still_needed_is_not_removed(tmp_path: Path) -> None:
    for version in range(1, 8):
        folder = RunPaths(tmp_path).checkpoint(version, 1)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        state_in = "" if version in (1, 3) else POLICY_FOLDER.build(3 if version > 3 else 1, 1)
        whole = checkpoints.write_manifest(folder, version)
        checkpoints.commit(folder, checkpoints.Manifest(version, whole.files, state_in))
    current = RunPaths(tmp_path).checkpoint(7, 1)
    retention.remove_old_versions(tmp_path, 2, current, named=[None, POLICY_FOLDER.build(2, 1)])
    assert [version for version, _ in checkpoints.versions(tmp_path)] == [2, 3, 6, 7]


def test_the_next_update_reads_the_copy_of_the_weights_on_its_node(work: Bench, tmp_path: Path) -> None:
    copies = WeightsCopy(tmp_path / "copies")
    copies.folder.mkdir()
    update(work, 1, weights_dir=str(copies.folder))
    model = tmp_path / POLICY_FOLDER.build(1, 1) / "model"
    assert copies.confirm(model, lambda: None) == ""
    # What is in the shared directory is not even there.
    (model / "model.safetensors").unlink()
    assert update(work, 2, weights_dir=str(copies.folder))["optimizer_steps"] > 0
    assert [path.name for path in copies.folder.iterdir()] == [POLICY_FOLDER.build(2, 1) + ".unchecked"]


def test_a_copy_for_which_the_room_runs_out_costs_one_line(
    work: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsbarrier.training import safetensors_file

    def full(path: Path, tensors: Any) -> None:
        path.write_bytes(b"as much as there was room for")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write_unhashed", full)
    (tmp_path / "copies").mkdir()
    update(work, 1, weights_dir=str(tmp_path / "copies"))
    assert capsys.readouterr().err.count("no copy of the weights on this node") == 1
    assert not list((tmp_path / "copies").iterdir()) and manifest(work, 1).state_in is None
