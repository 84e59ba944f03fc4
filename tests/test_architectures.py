"""The architectures that people train, from rollouts through update, reload and log-probability check to the export, with real vLLM.

And exports of what several processes trained, each with a part of it: vLLM serves them as the trainer computes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from engine_bench import NEVER, largest_gap, make_model, roll_out
from trainer_bench import Bench, rollouts, settings, write_groups

from fsbarrier.engine.client import EngineClient
from fsbarrier.engine.command import Adapter
from fsbarrier.engine.engine import Engine, EngineInfo
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.resolve import resolve
from fsbarrier.training.materialise import materialise

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPTS = ["ba=", "dcba=", "a"]


def rolled_out(work: Bench, info: EngineInfo, version: int) -> list[dict[str, Any]]:
    """Rollouts of what is served, as the merged file that the next update learns from; every other sample was right."""
    _, made = roll_out(work.folder / f"rollouts{version}", info, version, list(PROMPTS))
    groups: dict[int, list[dict[str, Any]]] = {}
    for one in made:
        group = groups.setdefault(one["task_index"], [])
        group.append({**one, "reward": float(len(group) % 2), "valid": True})
    (work.folder / "merged").unlink(missing_ok=True)
    write_groups(work.folder / "merged", list(groups.values()))
    work.prepare(policy_version=version, iteration=version + 1)
    return made


def real_engine(folder: Path) -> Engine:
    chosen = resolve([], {"rollout.max_tokens": 8}).engine
    return Engine(chosen, log_file=folder / "vllm.log", work_dir=folder / "work")


@pytest.mark.parametrize(
    ("architecture", "tied", "lora"),
    [
        ("Llama", False, 0),
        ("Llama", True, 4),
        ("Qwen2", True, 0),
        ("Qwen3", False, 0),
        ("Qwen3", True, 0),
        ("Gemma", True, 0),
    ],
)
def test_from_rollouts_to_the_export(tmp_path: Path, architecture: str, tied: bool, lora: int) -> None:
    from transformers import AutoModelForCausalLM

    first = make_model(tmp_path / "model", 1, tied=tied, architecture=architecture)
    work = Bench(
        tmp_path,
        settings(rollout__temperature=0.7, optimizer__lr=1e-2, trainer__minibatch=40, lora__rank=lora),
    )
    engine = real_engine(tmp_path)
    try:
        started = engine.ensure(first, 0, cancel=NEVER)
        rolled_out(work, started, 0)
        assert work.update("v1")["logprob_gap_max"] < 1e-4
        published = tmp_path / "v1" / "model"
        info = engine.ensure(published, 1, cancel=NEVER)
        assert (info.action, info.pid) == ("reloaded", started.pid)
        made = rolled_out(work, info, 1)
        assert largest_gap(published, made, 0.7) < 1e-4 < 1e-2 < largest_gap(first, made, 0.7)
        assert work.update("v2", version=2, before="v1")["logprob_gap_max"] < 1e-4
    finally:
        engine.stop()
    materialise(tmp_path / "v2", tmp_path / "out", first)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (first, tmp_path / "out"))
    assert {**before, "transformers_version": ""} == {**after, "transformers_version": ""}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert (tmp_path / "out" / "adapter").is_dir() == (lora > 0)


@pytest.mark.parametrize(
    ("architecture", "tied", "way"),
    [
        ("Llama", False, "zero3"),
        ("Qwen3", True, "zero3"),
        ("Qwen2", False, "lora"),
        ("Gemma", True, "all"),
    ],
)
def test_an_export_of_what_two_processes_trained_in_parts(
    tmp_path: Path, architecture: str, tied: bool, way: str
) -> None:
    """`fsbarrier export`; vLLM serves that folder alone; and the same processes go on, from the state that belongs to it,
    with what it sampled: what they compute themselves is what it says."""
    from transformers import AutoModelForCausalLM

    first = make_model(tmp_path / "model", 1, tied=tied, architecture=architecture)
    work = Bench(tmp_path, settings(rollout__temperature=0.7, optimizer__lr=1e-2, trainer__minibatch=40))
    if way == "zero3":
        work.nested["trainer"] |= {"backend": "deepspeed"}
    else:
        work.nested["trainer"]["shard"] = "all"
        work.nested["lora"]["rank"] = 4 if way == "lora" else 0
    rollouts(tmp_path / "merged", AutoModelForCausalLM.from_pretrained(first), temperature=0.7, vocabulary=20)
    work.prepare()
    ((process, said),) = work.torchrun(work.update_spec("v1"), processes=2)
    assert process.returncode == 0, said
    distributed = json.loads((tmp_path / "v1.result").read_text())["distributed"]
    how = "DeepSpeed ZeRO-3 on" if way == "zero3" else "sharded over"
    assert distributed == f"{how} 2 processes (float32)"

    run = tmp_path / "run"
    runrecord.publish(runrecord.new(run, work.settings, tasks={}, model=str(first)))
    published = RunPaths(run).checkpoint(1, 1)
    published.parent.mkdir(parents=True, exist_ok=True)
    os.rename(tmp_path / "v1", published)
    checkpoints.publish_link(run, published)
    out = tmp_path / "out"
    typed("export", out, "--log-path", run)

    engine = real_engine(tmp_path)
    try:
        made = rolled_out(work, engine.ensure(out, 1, cancel=NEVER), 1)
    finally:
        engine.stop()
    os.rename(published, tmp_path / "v1")
    ((process, said),) = work.torchrun(work.update_spec("v2", version=2, before="v1"), processes=2)
    assert process.returncode == 0, said
    gap = json.loads((tmp_path / "v2.result").read_text())["logprob_gap_max"]
    assert gap < 1e-4 and largest_gap(out, made, 0.7) < 1e-4, gap
    # Neither is what it began with.
    assert largest_gap(first, made, 0.7) > 1e-2
    exact = AutoModelForCausalLM.from_pretrained(out)
    assert (exact.get_input_embeddings().weight is exact.get_output_embeddings().weight) == tied


def test_adapters_beside_the_first_model_sample_as_the_trainer_computes(tmp_path: Path) -> None:
    """`lora.serve=adapter`: the server stays as it is, each version has its own name, and those before the last two are gone."""
    first = make_model(tmp_path / "model", 1, tied=True, architecture="Llama")
    nested = settings(rollout__temperature=0.7, optimizer__lr=1e-2, trainer__minibatch=40, lora__rank=4)
    nested["lora"]["serve"] = "adapter"
    work = Bench(tmp_path, nested)
    chosen = resolve([], {"rollout.max_tokens": 8}).engine
    engine = Engine(chosen, log_file=tmp_path / "vllm.log", work_dir=tmp_path / "work", adapter_rank=4)
    try:
        started = engine.ensure(first, 0, cancel=NEVER)
        rolled_out(work, started, 0)
        for number in (1, 2, 3):
            version, before = f"v{number}", f"v{number - 1}" if number > 1 else ""
            assert work.update(version, version=number, before=before)["logprob_gap_max"] < 1e-3
            assert not list((tmp_path / version / "model").glob("*.safetensors"))
            adapter = Adapter(version, tmp_path / version / "model" / "adapter")
            info = engine.ensure(first, number, cancel=NEVER, adapter=adapter)
            assert (info.action, info.pid, info.model) == ("reloaded", started.pid, version)
            assert engine.ensure(first, number, cancel=NEVER, adapter=adapter).action == "kept"
            made = rolled_out(work, info, number)
            materialise(tmp_path / version, tmp_path / f"whole{number}", first)
            assert largest_gap(tmp_path / f"whole{number}", made, 0.7) < 1e-3 < largest_gap(first, made, 0.7)
        client = EngineClient(info.url, info.api_key)
        listed: Any = client.call("GET", "/v1/models", timeout_s=10)
        assert [one["id"] for one in listed["data"]] == ["policy", "v2", "v3"]
    finally:
        engine.stop()
