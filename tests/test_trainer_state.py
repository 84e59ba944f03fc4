"""The trainer's state and a node's copy of the weights: whole, what was published, or not used."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trainer_bench import bench

from fsbarrier.errors import ProgramFailed
from fsbarrier.node import Publication
from fsbarrier.processes.kept_program import JOBS
from fsbarrier.run.job import RowJob, Workplace
from fsbarrier.run.weights import checked_weights
from fsbarrier.run.working_node import WorkingNode
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import reading
from fsbarrier.training import weights_copy
from fsbarrier.training.weights_copy import WeightsCopy


class Run:
    """Updates of one run, all on the same rollouts. `stays`: by one process that stays; otherwise each by one that loads the policy."""

    def __init__(self, folder: Path, *, stays: bool, every: int) -> None:
        from fsbarrier.workers.update import Updates

        folder.mkdir(exist_ok=True)
        self.work = bench(folder, checkpoint__trainer_every=every, algorithm__max_logprob_gap=1e9)
        self.work.prepare()
        self.stays, self.updates = stays, Updates()

    def update(self, version: int, generation: int = 1, **fields: Any) -> dict[str, Any]:
        before = POLICY_FOLDER.build(version - 1, 1) if version > 1 else ""
        out = POLICY_FOLDER.build(version, generation)
        if not self.stays:
            return self.work.update(out, version=version, before=before, **fields)
        return self.work.update_by(self.updates, out, version=version, before=before, **fields)

    def end_processes(self) -> None:
        from fsbarrier.workers.update import Updates

        self.updates = Updates()

    def manifest(self, version: int) -> checkpoints.Manifest:
        return checkpoints.check_sizes(self.work.folder / POLICY_FOLDER.build(version, 1))

    def weights(self, version: int) -> dict[str, Any]:
        return self.work.weights(POLICY_FOLDER.build(version, 1) if version else "")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool((one[name] == other[name]).all()) for name in one)


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool(one[name].isclose(other[name], atol=1e-5).all()) for name in one)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Every second version is saved with its state; the process stays in between."""
    monkeypatch.setenv(JOBS, "a socket")
    return Run(tmp_path / "held", stays=True, every=2)


@pytest.mark.torch
def test_processes_that_stay_hold_the_state_and_save_every_nth(held: Run, tmp_path: Path) -> None:
    told = [held.update(version) for version in (1, 2, 3)]
    assert [one["trainer_state"] for one in told] == ["in memory", "saved", "in memory"]
    assert [held.manifest(version).state_in for version in (1, 2, 3)] == [None, "", "policy-000002.g0001"]
    assert not any(name.startswith("trainer/") for name in held.manifest(3).files)
    anew = Run(tmp_path / "anew", stays=False, every=1)
    for version in (1, 2, 3):
        anew.update(version)
        assert same(held.weights(version), anew.weights(version))


@pytest.mark.torch
def test_processes_that_end_save_it_each_time(
    held: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.work.nested["iterations"] = 1
    assert held.update(1)["trainer_state"] == "saved", "the last update of a run"
    monkeypatch.delenv(JOBS)
    for stays in (True, False):
        run = Run(tmp_path / str(stays), stays=stays, every=9)
        assert [run.update(version)["trainer_state"] for version in (1, 2)] == ["saved", "saved"]


@pytest.mark.torch
def test_by_default_every_version_has_its_state_and_new_processes_lose_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", stays=False, every=1)
    for version in (1, 2):
        assert run.update(version)["note"] == "" and run.manifest(version).state_in == ""
    # The next generation does it again in its own folder.
    run.update(2, generation=2)
    assert same(run.work.weights("policy-000002.g0002"), run.weights(2))


@pytest.mark.torch
def test_without_the_processes_the_batches_since_the_saved_state_are_trained_again(
    held: Run, tmp_path: Path
) -> None:
    """Nothing is lost: the update goes on from what the processes had made, and saves its state, whoever ends next."""
    anew = Run(tmp_path / "anew", stays=False, every=1)
    for version in (1, 2, 3, 4):
        anew.update(version)
    for version in (1, 2, 3):
        held.update(version)
    assert held.manifest(3).trained_since == ("batch",)
    held.end_processes()
    told = held.update(4)
    assert "policy version 3 was saved without its trainer state" in told["note"]
    assert "trained again from version 2 on: 1 batch" in told["note"]
    assert told["optimizer_steps"] > 0 and told["trainer_state"] == "saved"
    assert close(held.weights(4), anew.weights(4)) and not close(held.weights(4), anew.weights(3))


@pytest.mark.torch
def test_before_the_first_save_all_batches_are_trained_again_from_the_first_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOBS, "a socket")
    run, anew = (Run(tmp_path / name, stays=name == "run", every=9) for name in ("run", "anew"))
    for version in (1, 2, 3):
        run.update(version)
    assert run.manifest(3).trained_since == ("batch",) * 3 and run.manifest(3).state_in is None
    run.end_processes()
    assert "trained again from version 0 on: 3 batches" in run.update(4)["note"]
    for version in (1, 2, 3, 4):
        anew.update(version)
    assert close(run.weights(4), anew.weights(4))


@pytest.mark.torch
def test_without_the_batches_the_policy_goes_back_to_the_newest_saved_state(held: Run) -> None:
    for version in (1, 2, 3):
        held.update(version)
    assert not same(held.weights(2), held.weights(3))
    held.end_processes()
    batch = held.work.folder / "batch"
    told = held.update(4, batch=str(batch.rename(batch.with_name("another"))))
    assert told["optimizer_steps"] == 0 and told["trainer_state"] == "saved"
    assert "policy version 3 was saved without its trainer state" in told["note"]
    assert "falling back to version 2" in told["note"]
    assert same(held.weights(4), held.weights(2))
    # From there it goes on as if versions 3 and 4 had not been.
    held.update(5, batch=str(batch.with_name("another")))
    assert same(held.weights(5), held.weights(3))


@pytest.mark.torch
def test_a_damaged_state_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", stays=False, every=1)
    run.update(1)
    part = run.work.folder / POLICY_FOLDER.build(1, 1) / "trainer" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(ProgramFailed, match=r"part-00000\.safetensors"):
        run.update(2)


@pytest.mark.torch
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


@pytest.mark.torch
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


@pytest.mark.torch
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


# --- the node's copy ------------------------------------------------------------------------------------------------------------

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
        context = cast(Any, SimpleNamespace(newest=lambda: 1, generation=1))
        node = WorkingNode(context, RowJob(), place)
        assert node.publish_weights(Publication(model.parent, 6, keep=0, trained_on=1)).policy_version == 6
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
