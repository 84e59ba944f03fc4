"""The trainer's state is saved with each version, or held by the processes in between; what is lost if they end."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import bench

from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.kept_program import JOBS
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.training.weights_copy import WeightsCopy

pytestmark = pytest.mark.torch


class Run:
    """Updates of one run, all on the same rollouts. `stays`: by one process that stays; otherwise each by one that loads the policy."""

    def __init__(self, folder: Path, *, stays: bool, every: int) -> None:
        from fsbarrier.workers.update import Updates

        folder.mkdir(exist_ok=True)
        self.work = bench(folder, checkpoint__trainer_every=every, algorithm__max_logprob_gap=1e9)
        self.work.prepare()
        self.stays, self.updates = stays, Updates()

    def update(self, version: int, generation: int = 1, **fields: Any) -> dict[str, Any]:
        from fsbarrier.processes.worker_contract import ProgressWriter

        before = POLICY_FOLDER.build(version - 1, 1) if version > 1 else ""
        out = POLICY_FOLDER.build(version, generation)
        if not self.stays:
            return self.work.update(out, version=version, before=before, **fields)
        spec: Any = self.work.update_spec(out, version=version, before=before, **fields)
        result = self.updates.main(spec, self.work.settings, ProgressWriter(None))
        assert result is not None
        return result

    def end_processes(self) -> None:
        from fsbarrier.workers.update import Updates

        self.updates = Updates()

    def manifest(self, version: int) -> checkpoints.Manifest:
        return checkpoints.check_sizes(self.work.folder / POLICY_FOLDER.build(version, 1))

    def weights(self, version: int) -> dict[str, Any]:
        return self.work.weights(POLICY_FOLDER.build(version, 1) if version else "")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool((one[name] == other[name]).all()) for name in one)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Every second version is saved with its state; the process stays in between."""
    monkeypatch.setenv(JOBS, "a socket")
    return Run(tmp_path / "held", stays=True, every=2)


def test_processes_that_stay_hold_the_state_and_save_every_nth(held: Run, tmp_path: Path) -> None:
    told = [held.update(version) for version in (1, 2, 3)]
    assert [one["trainer_state"] for one in told] == ["in memory", "saved", "in memory"]
    assert [held.manifest(version).state_in for version in (1, 2, 3)] == [None, "", "policy-000002.g0001"]
    assert not any(name.startswith("trainer/") for name in held.manifest(3).files)
    anew = Run(tmp_path / "anew", stays=False, every=1)
    for version in (1, 2, 3):
        anew.update(version)
        assert same(held.weights(version), anew.weights(version))


def test_processes_that_end_save_it_each_time(
    held: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.work.nested["iterations"] = 1
    assert held.update(1)["trainer_state"] == "saved", "the last update of a run"
    monkeypatch.delenv(JOBS)
    for stays in (True, False):
        run = Run(tmp_path / str(stays), stays=stays, every=9)
        assert [run.update(version)["trainer_state"] for version in (1, 2)] == ["saved", "saved"]


def test_by_default_every_version_has_its_state_and_new_processes_lose_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", stays=False, every=1)
    for version in (1, 2):
        assert run.update(version)["note"] == "" and run.manifest(version).state_in == ""
    # The next generation does it again in its own folder.
    run.update(2, generation=2)
    assert same(run.work.weights("policy-000002.g0002"), run.weights(2))


def test_without_the_processes_the_policy_goes_back_to_the_newest_saved_state(held: Run) -> None:
    for version in (1, 2, 3):
        held.update(version)
    assert not same(held.weights(2), held.weights(3))
    held.end_processes()
    told = held.update(4)
    assert told["optimizer_steps"] == 0
    assert "policy version 3 was saved without its trainer state" in told["note"]
    assert "falling back to version 2" in told["note"]
    assert same(held.weights(4), held.weights(2))
    # From there it goes on as if versions 3 and 4 had not been.
    held.update(5)
    assert same(held.weights(5), held.weights(3))


def test_before_the_first_save_it_begins_with_the_first_model(held: Run) -> None:
    held.update(1)
    held.end_processes()
    assert "falling back to version 0" in held.update(2)["note"]
    assert same(held.weights(2), held.weights(0)) and held.manifest(2).state_in == ""


def test_a_damaged_state_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", stays=False, every=1)
    run.update(1)
    part = run.work.folder / POLICY_FOLDER.build(1, 1) / "trainer" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(ProgramFailed, match=r"part-00000\.safetensors"):
        run.update(2)


def test_a_state_that_is_still_needed_is_not_removed(tmp_path: Path) -> None:
    for version in range(1, 8):
        folder = RunPaths(tmp_path).checkpoint(version, 1)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        state_in = "" if version in (1, 3) else POLICY_FOLDER.build(3 if version > 3 else 1, 1)
        whole = checkpoints.write_manifest(folder, version)
        checkpoints.commit(folder, checkpoints.Manifest(version, whole.files, state_in))
    current = RunPaths(tmp_path).checkpoint(7, 1)
    retention.remove_old_versions(tmp_path, 2, current, best=POLICY_FOLDER.build(2, 1))
    assert [version for version, _ in checkpoints.versions(tmp_path)] == [2, 3, 6, 7]


def test_the_next_update_reads_the_copy_of_the_weights_on_its_node(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", stays=False, every=1)
    copies = WeightsCopy(tmp_path / "copies")
    copies.folder.mkdir()
    run.update(1, weights_dir=str(copies.folder))
    model = run.work.folder / POLICY_FOLDER.build(1, 1) / "model"
    assert copies.confirm(model, lambda: None) == ""
    # What is in the shared directory is not even there.
    (model / "model.safetensors").unlink()
    assert run.update(2, weights_dir=str(copies.folder))["optimizer_steps"] > 0
    assert [path.name for path in copies.folder.iterdir()] == [POLICY_FOLDER.build(2, 1) + ".unchecked"]


def test_a_copy_for_which_the_room_runs_out_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsbarrier.training import safetensors_file

    def full(path: Path, tensors: Any) -> None:
        path.write_bytes(b"as much as there was room for")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write_unhashed", full)
    (tmp_path / "copies").mkdir()
    run = Run(tmp_path / "run", stays=False, every=1)
    run.update(1, weights_dir=str(tmp_path / "copies"))
    assert capsys.readouterr().err.count("no copy of the weights on this node") == 1
    assert not list((tmp_path / "copies").iterdir()) and run.manifest(1).state_in == ""
