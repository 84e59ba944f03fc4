"""Low-rank adapters: they are trained, what is served has them merged, and an update goes on where the last one ended."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import Bench, bench, first_weights, largest_difference, policy_of, rollouts

from fsbarrier.errors import UsageError
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings

pytestmark = pytest.mark.torch


def lora_bench(folder: Path, **overrides: Any) -> Bench:
    work = bench(folder, tied=True, lora__rank=4, optimizer__lr=1e-2, **overrides)
    work.prepare()
    return work


def test_what_is_served_is_the_base_with_the_exported_adapter_merged(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    work = lora_bench(tmp_path)
    work.update("v1")
    weights, first = work.weights("v1"), first_weights(tmp_path)
    moved = {name for name in first if float((weights[name] - first[name]).abs().max()) > 1e-5}
    # All linear layers but the head, and nothing else.
    assert moved == {name for name in first if "_proj.weight" in name} and len(moved) == 7
    adapter = tmp_path / "v1" / "model" / "adapter"
    merged = peft.PeftModel.from_pretrained(policy_of(tmp_path / "model"), adapter).merge_and_unload()
    assert largest_difference(weights, {name: merged.state_dict()[name] for name in weights}) < 1e-6
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "model"
    )
    files = {"adapter_model.safetensors", "adapter_config.json"}
    assert {f"model/adapter/{name}" for name in files} <= set(checkpoints.verify(tmp_path / "v1").files)
    # transformers loads the folder as any other.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1" / "model").state_dict()
    assert largest_difference({name: loaded[name] for name in weights}, weights) == 0


def test_adapters_go_on_as_if_there_had_been_no_end_between_two_updates(tmp_path: Path) -> None:
    """The second update trains the same adapters on the first model, and not new ones on the merged one."""
    import torch

    from fsbarrier.training.batch import TrainingBatch
    from fsbarrier.training.optimizer_step import train

    work = lora_bench(tmp_path)
    torch.manual_seed(1)
    kept = work.trainer()
    train(kept, TrainingBatch.load(tmp_path / "batch"), work.settings, tmp_path / "model")
    work.update("v1")
    (tmp_path / "merged").unlink()
    rollouts(tmp_path / "merged", policy_of(tmp_path / "v1" / "model"))
    work.prepare()
    assert work.update("v2", version=2, before="v1")["logprob_gap_max"] < 1e-4
    train(kept, TrainingBatch.load(tmp_path / "batch"), work.settings, tmp_path / "model")
    assert kept.adapters is not None
    causal = kept.model.causal
    expected = {
        name: kept.adapters.merged(name, weight).detach()
        for name, weight in kept.adapters.weights(causal).items()
    }
    assert largest_difference(work.weights("v2"), expected) == 0
    assert largest_difference(work.weights("v2"), work.weights("v1")) > 1e-5


def test_only_the_named_layers_are_trained_and_unknown_ones_refused(tmp_path: Path) -> None:
    work = lora_bench(tmp_path, lora__targets=["q_proj"])
    work.update("v1")
    weights = work.weights("v1")
    moved = {name for name, value in first_weights(tmp_path).items() if bool((value != weights[name]).any())}
    assert moved == {"model.layers.0.self_attn.q_proj.weight"}
    for wrong in (["no_such_layer"], ["q_proj", "no_such_layer"]):
        work.nested["lora"]["targets"] = wrong
        with pytest.raises(UsageError, match=r"lora\.targets: .*no_such_layer"):
            work.update("other")


def test_an_output_head_that_is_the_embedding_gets_no_adapter(tmp_path: Path) -> None:
    work = lora_bench(tmp_path, lora__targets=["q_proj", "lm_head"])
    with pytest.raises(
        UsageError, match=r"lora\.targets=q_proj,lm_head: .* output head is tied to its embedding"
    ):
        work.update("v1")
    # One of its own is trained and served like any layer.
    (tmp_path / "own").mkdir()
    own = bench(tmp_path / "own", lora__rank=4, lora__targets=["lm_head"], optimizer__lr=1e-2)
    own.prepare()
    own.update("v1")
    first, weights = first_weights(tmp_path / "own"), own.weights("v1")
    assert {name for name in first if bool((first[name] != weights[name]).any())} == {"lm_head.weight"}


def mixture(kind: str) -> Any:
    from transformers import AutoConfig

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
    experts = {"num_experts_per_tok": 2, "num_local_experts": 4, "pad_token_id": 0}
    more = {"n_routed_experts": 4, "n_shared_experts": 1} if kind == "glm4_moe" else {"num_experts": 4}
    return AutoConfig.for_model(kind, **sizes, **heads, **experts, **more)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_mixture_of_experts_needs_the_names_of_its_layers(tmp_path: Path, kind: str) -> None:
    """Those that are proposed do, also where a layer that every token takes lies beside the experts."""
    from transformers import AutoModelForCausalLM

    from fsbarrier.settings.sections import LoraSettings
    from fsbarrier.training.lora import Adapters

    def put_into(*targets: str) -> Adapters:
        model = AutoModelForCausalLM.from_config(mixture(kind))
        return Adapters.put_into(model, LoraSettings(rank=4, targets=targets), tmp_path)

    with pytest.raises(UsageError) as refused, warnings.catch_warnings():
        # peft's, of what it put into the experts.
        warnings.simplefilter("ignore")
        put_into()
    said = str(refused.value)
    assert said.startswith("lora.rank=4: ") and ".mlp.experts is no linear layer" in said
    named = said.rpartition(" ")[2].split(",")
    assert named == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert len(put_into(*named).layers) == 2 * 4
    with pytest.raises(UsageError, match=r"Experts.*; name linear layers in lora\.targets, such as q_proj"):
        put_into("q_proj", "experts")


@pytest.mark.filterwarnings("ignore:The following")
@pytest.mark.usefixtures("warm_programs")
def test_what_cannot_have_adapters_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsbarrier.cli.start.model_folder import try_model
    from fsbarrier.settings.resolve import resolve
    from fsbarrier.training import architecture

    mixture("qwen3_moe").save_pretrained(tmp_path)

    def chosen(*targets: str) -> Settings:
        return resolve([], {"lora.rank": 4, "lora.targets": [*targets]}, cross_checks=False)

    said: list[str] = []
    with pytest.raises(UsageError, match="gate is not a linear layer"):
        try_model(tmp_path, chosen("q_proj", "gate"), said.append)
    # A start is not silent meanwhile.
    assert len(said) == 1 and said[0].startswith("trying adapters of rank 4 on the model")
    # A start does that in a process of its own. This one has loaded torch already.
    assert architecture.main([str(tmp_path), "4", "q_proj"]) == 0
    assert architecture.main([str(tmp_path), "4"]) == 2
    assert "without lora.targets" in capsys.readouterr().err


def test_in_bfloat16_the_adapters_are_still_exact(tmp_path: Path) -> None:
    """What is served is rounded, and neither the adapters nor what they are put into is read from it again."""
    import torch
    from safetensors.torch import load_file

    work = lora_bench(tmp_path, trainer__dtype="bfloat16", algorithm__max_logprob_gap=100.0)
    work.update("v1")
    work.update("v2", version=2, before="v1")
    assert {value.dtype for value in work.weights("v2").values()} == {torch.bfloat16}
    adapters = load_file(tmp_path / "v2" / "model" / "adapter" / "adapter_model.safetensors")
    exact = [value for value in adapters.values() if not torch.equal(value, value.bfloat16().float())]
    assert len(adapters) == 14 and len(exact) == 14
    first = first_weights(tmp_path)
    frozen = [name for name in first if "_proj.weight" not in name]
    weights = work.weights("v2")
    assert all(torch.equal(weights[name], first[name].bfloat16()) for name in frozen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", ["none", "all"])
def test_sharded_adapters_are_trained_as_one_process_trains_them(tmp_path: Path, shard: str) -> None:
    """Two updates of two processes, the second of which resumes on one."""
    work = lora_bench(tmp_path, trainer__shard=shard)
    work.nested["trainer"]["shard"] = "none"
    alone = work.update("alone")
    work.nested["trainer"]["shard"] = shard
    for process, said in work.torchrun(work.update_spec("two"), processes=2):
        assert process.returncode == 0, said
    two = json.loads((tmp_path / "two.result").read_text())
    assert ("sharded over 2" in two["distributed"]) == (shard == "all")
    assert two["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert largest_difference(work.weights("alone"), work.weights("two")) < 1e-5
    work.nested["algorithm"]["max_logprob_gap"] = 100.0
    work.nested["trainer"]["shard"] = "none"
    work.update("after-alone", version=2, before="alone")
    work.update("after-two", version=2, before="two")
    assert largest_difference(work.weights("after-alone"), work.weights("after-two")) < 1e-4
