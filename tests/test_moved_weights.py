"""What a version that is not whole has: adapters and their base, or a delta and its anchor. It is made whole in one way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from commands import typed
from test_failure_reason import plant_vllm
from trainer_bench import Bench, bench, first_weights, largest_difference, policy_of
from waiting import DEADLINE_S

from fsbarrier.engine.client import EngineClient
from fsbarrier.errors import ProgramFailed
from fsbarrier.node import Publication
from fsbarrier.run.job import RowJob, Workplace
from fsbarrier.run.weights import checked_weights
from fsbarrier.run.working_node import WorkingNode
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files
from fsbarrier.training.materialise import materialise
from fsbarrier.training.weights_copy import WeightsCopy

pytestmark = pytest.mark.torch


class Run:
    """Updates of a run in `folder`/run by one node, whose copies of weights are in `folder`/node. Each process loads the policy."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.folder, self.log_path = folder, folder / "run"
        (folder / "node").mkdir(parents=True)
        self.work: Bench = bench(folder, algorithm__max_logprob_gap=1e9, **overrides)
        self.work.prepare()
        record = runrecord.new(self.log_path, self.work.settings, tasks={}, model=str(folder / "model"))
        runrecord.publish(record)
        self.paths = RunPaths(self.log_path)
        #: what each update has reported
        self.told: list[dict[str, Any]] = []
        self.place = Workplace(
            engines=cast(Any, None),
            work_dir=folder / "work",
            log_dir=folder / "logs",
            log_path=self.log_path,
            stall_timeout_s=60.0,
            weights=WeightsCopy(folder / "node"),
        )

    @property
    def first(self) -> Path:
        return self.folder / "model"

    def version(self, number: int) -> Path:
        return self.paths.checkpoint(number, 1)

    def update(self, number: int, *, copies: bool = True, **fields: Any) -> Path:
        """Make the next version and publish it; gives its folder."""
        before = f"run/checkpoints/{POLICY_FOLDER.build(number - 1, 1)}" if number > 1 else ""
        places = {"weights_dir": str(self.folder / "node") if copies else None, **fields}
        out = self.version(number)
        out.parent.mkdir(parents=True, exist_ok=True)
        told = self.work.update(f"run/checkpoints/{out.name}", version=number, before=before, **places)
        self.told.append(told)
        context = cast(Any, SimpleNamespace(newest=lambda: 1, generation=1))
        WorkingNode(context, RowJob(), self.place).publish_weights(Publication(out, number, keep=0))
        return out

    def served(self, number: int) -> Path:
        """The folder that the node's engines load."""
        model = self.version(number) / "model"
        return checked_weights(model, RowJob(), self.place, first_model=self.first)[0]


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()
    }


def weights_there(version: Path) -> list[str]:
    return [name for name in checkpoints.read_manifest(version).files if checkpoints.is_weights(name)]


# --- adapters -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(tmp_path: Path) -> Run:
    """Two versions of adapters, and the node's own merge of the second."""
    run = Run(tmp_path, lora__rank=4, optimizer__lr=1e-2)
    run.update(1)
    run.update(2)
    return run


def test_a_version_of_adapters_is_these_and_its_base_and_is_merged_by_each_node(
    adapted: Run, tmp_path: Path
) -> None:
    import peft

    one, two = adapted.version(1), adapted.version(2)
    assert weights_there(two) == [] and not adapted.paths.served_model.exists()
    manifest = checkpoints.verify(two)
    assert manifest.state_in == "" and manifest.base == checkpoints.read_manifest(one).base
    assert f"--policy-version 2 --log-path {adapted.log_path}" in (two / "README").read_text()
    moved = sum(file.size for name, file in manifest.files.items() if name.startswith("model/"))
    assert moved < (adapted.first / "model.safetensors").stat().st_size

    served = adapted.served(2)
    assert (
        served.is_relative_to(tmp_path / "node")
        and checked_weights(two / "model", RowJob(), adapted.place)[1] == []
    )
    exact = peft.PeftModel.from_pretrained(
        policy_of(adapted.first), two / "model" / "adapter"
    ).merge_and_unload()
    expected = {name: exact.state_dict()[name] for name in tensors(served)}
    assert largest_difference(tensors(served), expected) < 1e-6
    assert largest_difference(tensors(served), first_weights(tmp_path)) > 1e-3
    # The same weights as a trainer that publishes whole versions merges.
    whole = Run(tmp_path / "whole", lora__rank=4, optimizer__lr=1e-2)
    for number in (1, 2):
        whole.update(number, copies=False)
    assert largest_difference(tensors(served), tensors(whole.version(2) / "model")) < 1e-6


def test_a_session_s_last_version_of_adapters_is_whole_and_has_them_too(tmp_path: Path) -> None:
    run = Run(tmp_path, lora__rank=4, optimizer__lr=1e-2)
    run.work.nested["iterations"] = 1
    one = run.update(1)
    assert weights_there(one) == ["model/model.safetensors"]
    assert run.paths.served_model.resolve() == one / "model" and not (one / "README").exists()
    run.work.nested["iterations"] = 5
    two = run.update(2)
    assert weights_there(two) == [] and run.paths.served_model.resolve() == one / "model"
    for number in (1, 2):
        typed(
            "export", tmp_path / f"out{number}", "--log-path", run.log_path, "--policy-version", str(number)
        )
        typed(
            "export",
            tmp_path / f"alone{number}",
            "--log-path",
            run.log_path,
            "--policy-version",
            str(number),
            "--adapter",
        )
        assert {path.name for path in (tmp_path / f"alone{number}").iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    assert largest_difference(tensors(tmp_path / "out1"), tensors(one / "model")) == 0
    assert largest_difference(tensors(tmp_path / "out2"), tensors(run.served(2))) == 0
    policy_of(tmp_path / "out2")
    assert (
        "contradicts --adapter"
        in typed("export", tmp_path / "x", "--log-path", run.log_path, "--adapter", "--critic", code=2).err
    )
    said = typed(
        "export", tmp_path / "x", "--log-path", run.log_path, "--adapter", "--policy-version", "0", code=2
    ).err
    assert "the initial policy has no adapters" in said


def test_in_bfloat16_a_node_s_merge_differs_from_another_s_by_less_than_the_rounding(tmp_path: Path) -> None:
    import torch

    how: dict[str, Any] = {"lora__rank": 4, "optimizer__lr": 1e-2, "trainer__dtype": "bfloat16"}
    run, whole = Run(tmp_path, **how), Run(tmp_path / "whole", **how)
    run.update(1)
    whole.update(1, copies=False)
    merged, theirs = tensors(run.served(1)), tensors(whole.version(1) / "model")
    matrices = {name for name, one in merged.items() if one.dim() > 1}
    assert {merged[name].dtype for name in matrices} == {torch.bfloat16}
    assert all(
        torch.equal(merged[name].to(theirs[name].dtype), theirs[name]) for name in merged.keys() - matrices
    )
    differing = sum(int((merged[name] != theirs[name]).sum()) for name in matrices)
    assert differing <= sum(merged[name].numel() for name in matrices) // 1000


def test_adapters_on_another_model_are_refused_wherever_they_are_merged(adapted: Run, tmp_path: Path) -> None:
    path = adapted.first / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    said = r"model is not the model to which the adapters of policy-000002\.g0001 belong: its weights have been changed"
    with pytest.raises(ProgramFailed, match=said):
        adapted.served(2)
    with pytest.raises(ProgramFailed, match=said):
        adapted.update(3)
    refused = typed(
        "export", tmp_path / "out", "--log-path", adapted.log_path, "--policy-version", "2", code=4
    )
    assert "is not the model to which the adapters" in refused.err and not (tmp_path / "out").exists()
    (adapted.first / "model.safetensors").unlink()
    (adapted.first / "config.json").unlink()
    (adapted.first / "tokenizer.json").unlink()
    adapted.first.joinpath("generation_config.json").unlink(missing_ok=True)
    adapted.first.rmdir()
    with pytest.raises(ProgramFailed, match="the model to which they belong is not there"):
        materialise(adapted.version(2), tmp_path / "again", adapted.first)


def test_damaged_adapters_are_named_and_a_node_without_room_says_what_to_do(
    adapted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsbarrier.training import weights_copy

    with monkeypatch.context() as small:
        small.setattr(weights_copy, "free_bytes", lambda folder: 10)
        with pytest.raises(
            ProgramFailed, match=r"is not whole, and there is no room .* checkpoint\.weights_dir=DIR"
        ):
            adapted.served(2)
    file = adapted.version(2) / "model" / "adapter" / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ProgramFailed, match=r"adapter_model\.safetensors differs from what"):
        adapted.served(2)
    assert [path.name for path in (adapted.folder / "node").iterdir()] == ["first_model.json"]


def test_the_first_model_is_read_once_for_its_digest_by_updates_that_load_the_policy_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sha256_open = list[str](), files.sha256_open

    def noted(fd: int, *more: Any) -> str:
        read.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sha256_open(fd, *more)

    monkeypatch.setattr(files, "sha256_open", noted)
    run = Run(tmp_path, lora__rank=4, optimizer__lr=1e-2)
    weights = run.first / "model.safetensors"
    for number in (1, 2, 3):
        run.update(number)
    assert read.count(str(weights)) == 1
    os.utime(weights)
    run.update(4)
    assert read.count(str(weights)) == 2


def test_a_version_that_is_not_whole_is_made_whole_before_it_is_served(adapted: Run, tmp_path: Path) -> None:
    planted = {**os.environ, **plant_vllm(tmp_path)}
    words = [sys.executable, "-P", "-m", "fsbarrier", "serve", "--json", "--version", "2"]
    process = subprocess.Popen(
        [*words, "--log-path", adapted.log_path], env=planted, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        loaded = Path(str(EngineClient(told["url"], told["api_key"]).model()["root"]))
        assert largest_difference(tensors(loaded), tensors(adapted.served(2))) == 0
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert not loaded.exists()


def test_another_run_begins_with_merged_adapters(adapted: Run, tmp_path: Path) -> None:
    from fsbarrier.cli.start.policy_export import copy_other_runs, find_other_runs

    named = f"{adapted.log_path}@2"
    model = copy_other_runs(named, find_other_runs(named), tmp_path / "first_policy")
    assert largest_difference(tensors(model), tensors(adapted.served(2))) == 0
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"


def test_without_a_place_on_a_node_versions_are_whole_and_engines_still_get_what_is_not(adapted: Run) -> None:
    three = adapted.update(3, copies=False)
    assert weights_there(three) == ["model/model.safetensors"]
    adapted.place.weights = None
    served = adapted.served(2)
    assert served.is_relative_to(adapted.folder / "work")
    assert largest_difference(tensors(served), tensors(three / "model")) > 1e-5


# --- deltas ---------------------------------------------------------------------------------------------------------------------


def served_in_bfloat16(folder: Path, **overrides: Any) -> Run:
    return Run(folder, trainer__dtype="bfloat16", optimizer__lr=2e-5, **overrides)


def test_a_version_is_whole_or_what_changed_since_the_last_whole_one_bit_by_bit(tmp_path: Path) -> None:
    """As a run that publishes whole versions makes them. The third delta is made of a copy from which the second one was undone."""
    run, whole = (
        served_in_bfloat16(tmp_path, checkpoint__whole_every=4),
        served_in_bfloat16(tmp_path / "whole"),
    )
    kinds, bytes_of = [], dict[int, int]()
    for number in range(1, 6):
        version = run.update(number)
        whole.update(number, copies=False)
        manifest, theirs = checkpoints.verify(version), checkpoints.read_manifest(whole.version(number))
        kinds.append(manifest.base.folder if manifest.base else "")
        assert manifest.model_files == {k: v for k, v in theirs.files.items() if k.startswith("model/")}
        bytes_of[number] = sum(
            one.size for name, one in manifest.files.items() if "model/" in name or "delta/" in name
        )
        # The node's engines get it: the trainer's copy, which is what the manifest says.
        copied = run.served(number) / "model.safetensors"
        assert copied.read_bytes() == (whole.version(number) / "model" / "model.safetensors").read_bytes()
        assert run.paths.served_model.resolve().parent == run.version(1 if number < 5 else 5)
        # A joiner reads the anchor and the delta.
        materialise(version, tmp_path / f"joiner{number}", run.first)
        assert (tmp_path / f"joiner{number}" / "model.safetensors").read_bytes() == copied.read_bytes()
    assert kinds == ["", *["policy-000001.g0001"] * 3, ""]
    assert max(bytes_of[n] for n in (2, 3, 4)) < bytes_of[1] / 2
    assert "(delta/) in the weights of policy-000001.g0001" in (run.version(3) / "README").read_text()
    typed("export", tmp_path / "out", "--log-path", run.log_path, "--policy-version", "4")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "joiner4" / "model.safetensors"
    ).read_bytes()


def test_a_node_makes_a_version_of_its_copy_of_another_one_and_reads_no_anchor(tmp_path: Path) -> None:
    run = served_in_bfloat16(tmp_path)
    for number in (1, 2, 3):
        run.update(number)
    sampler = run.place.weights = WeightsCopy(tmp_path / "sampler")
    sampler.folder.mkdir()
    run.served(2)
    anchor = run.version(1) / "model" / "model.safetensors"
    data = anchor.read_bytes()
    anchor.write_bytes(bytes(len(data)))
    third = run.served(3)
    assert [path.name for path in sampler.folder.iterdir()] == ["policy-000003.g0001"]
    # A copy that is not what it says is no reason to fail: the anchor is read.
    anchor.write_bytes(data)
    expected = (third / "model.safetensors").read_bytes()
    run.served(2)
    held = sampler.checked("policy-000002.g0001") / "model.safetensors"
    held.write_bytes(held.read_bytes()[:-2] + b"??")
    assert (run.served(3) / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("damaged", ["delta/model.safetensors.delta", "the anchor", "the anchor's manifest"])
def test_what_is_damaged_is_named_and_nothing_of_it_is_served(tmp_path: Path, damaged: str) -> None:
    run = served_in_bfloat16(tmp_path)
    for number in (1, 2):
        run.update(number)
    run.served(2)
    run.place.weights = WeightsCopy(tmp_path / "sampler")
    run.place.weights.folder.mkdir()
    file = run.version(2) / damaged
    if damaged == "the anchor":
        file = run.version(1) / "model" / "model.safetensors"
    elif damaged == "the anchor's manifest":
        file = run.version(1) / checkpoints.MANIFEST
    data = bytearray(file.read_bytes())
    if damaged == "the anchor's manifest":
        data = bytearray(
            bytes(data).replace(b'"trained_since"', b'"since"').replace(b"config.json", b"another.json")
        )
    else:
        data[-3] ^= 1
    file.write_bytes(data)
    said = {"the anchor's manifest": "is not the version to which the delta in policy-000002"}
    with pytest.raises(ProgramFailed, match=said.get(damaged, f"{file}.*damaged")):
        run.served(2)
    assert not list((tmp_path / "sampler").iterdir())
    # A trainer with a right copy goes on. The next version is whole if what is damaged is needed to make a delta.
    three = run.update(3)
    assert bool(weights_there(three)) == (damaged != "the anchor")
    # The node that has found it has ended, so that another generation makes the next one: that is whole.
    four = run.update(4, generation=2)
    assert weights_there(four) and run.served(4) == four / "model"


def test_a_copy_that_is_not_what_was_published_is_never_the_start_of_a_delta(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an apply that was half done, or a snapshot that went ahead of what was published."""
    run = served_in_bfloat16(tmp_path)
    for number in (1, 2):
        run.update(number)
    copy = run.served(2) / "model.safetensors"
    copy.write_bytes(copy.read_bytes()[:-2] + b"??")
    three = run.update(3)
    assert weights_there(three) == ["model/model.safetensors"] and not (three / "delta").exists()
    assert "is not what policy-000002.g0001 was published with" in capsys.readouterr().err
    # From there on it is what the next ones are made of.
    assert checkpoints.verify(run.update(4)).base == checkpoints.Base(
        "policy-000003.g0001",
        checkpoints.read_manifest(three).digest,
        {
            "model/model.safetensors": checkpoints.read_manifest(run.version(4)).model_files[
                "model/model.safetensors"
            ]
        },
    )


def test_a_delta_that_does_not_pay_is_published_whole(tmp_path: Path) -> None:
    run = served_in_bfloat16(tmp_path)
    run.update(1)
    run.work.nested["optimizer"]["lr"] = 1.0
    two = run.update(2)
    assert weights_there(two) == ["model/model.safetensors"] and not (two / "delta").exists()
    assert checkpoints.verify(two).whole and run.paths.served_model.resolve().parent == two


def test_what_a_kept_version_is_made_of_stays(tmp_path: Path) -> None:
    from fsbarrier.rundir import retention

    run = served_in_bfloat16(tmp_path)
    for number in (1, 2, 3, 4):
        run.update(number)
    retention.remove_old_versions(run.log_path, 1, run.version(4))
    left = sorted(path.name for path in run.paths.checkpoints.iterdir() if path.name.startswith("policy"))
    assert left == [run.version(number).name for number in (1, 3, 4)]
    checkpoints.verify(run.version(1))


# --- the trainer's state -----------------------------------------------------------------------------------------------------------


def test_between_whole_versions_the_state_is_on_the_node_and_where_it_is_lost_batches_are_trained_again(
    tmp_path: Path,
) -> None:
    """With the state in the run directory each time and on the node, every version is the same."""
    said = dict[str, list[str]]()
    made = dict[str, list[dict[str, checkpoints.FileDigest]]]()
    for name in ("saved", "on the nodes", "lost"):
        every = 1 if name == "saved" else None
        run = served_in_bfloat16(tmp_path / name, checkpoint__whole_every=3, checkpoint__trainer_every=every)
        said[name], made[name] = [], []
        for number in range(1, 6):
            if name == "lost" and number == 4:
                (state,) = (run.folder / "node").glob("*.state")
                files.discard(state)
            run.update(number)
            said[name].append(run.told[-1]["trainer_state"])
            made[name].append(checkpoints.verify(run.version(number)).model_files)
        notes = [one["note"] for one in run.told]
        assert notes[:3] == ["", "", ""] and ("trained again from version 1 on: 2 batches" in notes[3]) == (
            name == "lost"
        )
    assert made["saved"] == made["on the nodes"] and made["saved"][:3] == made["lost"][:3]
    for number in (4, 5):
        versions = [
            tmp_path / name / "run" / "checkpoints" / f"policy-{number:06d}.g0001"
            for name in ("saved", "lost")
        ]
        for name, version in zip(("saved", "lost"), versions, strict=True):
            materialise(version, tmp_path / f"{name}{number}", None)
        again = largest_difference(tensors(tmp_path / f"saved{number}"), tensors(tmp_path / f"lost{number}"))
        # A batch is no sample of a policy that was trained again, so its ratios refer to the engine's log-probabilities.
        assert again < 1e-3
    assert said["saved"] == ["saved"] * 5
    assert said["on the nodes"] == ["saved", "on the nodes", "on the nodes", "saved", "on the nodes"]
    assert said["lost"] == ["saved", "on the nodes", "on the nodes", "saved", "on the nodes"]
