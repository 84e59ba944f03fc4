"""The architectures that people train, from rollouts through update, reload and log-probability check to the export, with real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_bench import NEVER, largest_gap, make_model, roll_out
from trainer_bench import Bench, settings, write_groups

from fsbarrier.engine.engine import Engine, EngineInfo
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.resolve import resolve
from fsbarrier.start.policy_export import Exported, export

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

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
    engine = Engine(
        resolve([], {"rollout.max_tokens": 8, "engine.kv_cache_mb": 64}).engine,
        log_file=tmp_path / "vllm.log",
        work_dir=tmp_path / "work",
    )
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
    manifest = checkpoints.verify(tmp_path / "v2")
    digests = {name.removeprefix("model/"): one for name, one in manifest.files.items() if "model/" in name}
    export(
        Exported(2, tmp_path / "v2" / "model", tmp_path / "v2" / "trainer", digests), tmp_path / "out", None
    )
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (first, tmp_path / "out"))
    assert {**before, "transformers_version": ""} == {**after, "transformers_version": ""}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert (tmp_path / "out" / "adapter").is_dir() == (lora > 0)
