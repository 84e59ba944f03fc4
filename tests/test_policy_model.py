"""The policy's log-probabilities, and adapters."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import Bench, bench, first_weights, largest_difference, policy_of, rollouts

from fsbarrier.errors import UsageError
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings

pytestmark = pytest.mark.torch


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def model_of(architecture: str, **changes: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    # As large as those of a trained model, so that scaling and caps matter.
    model.get_output_embeddings().weight.data.mul_(40)
    return model


def inputs() -> tuple[dict[str, Any], Any]:
    """Two padded rows, and which of their tokens are wanted."""
    import torch

    torch.manual_seed(1)
    tokens = torch.randint(2, SIZES["vocab_size"], (2, 11))
    attention = torch.ones_like(tokens)
    attention[1, 8:] = 0
    wanted = torch.rand(2, 11) < 0.6
    wanted[:, 0] = False
    return {"input_ids": tokens, "attention_mask": attention}, wanted & attention.bool()


def reference(model: Any, inputs: dict[str, Any], wanted: Any, temperature: float) -> Any:
    return numbers(model, inputs, wanted, temperature)[0]


def numbers(model: Any, inputs: dict[str, Any], wanted: Any, temperature: float) -> Any:
    from fsbarrier.training.losses import token_log_probs

    logits = model(**inputs, use_cache=False).logits
    return [one[wanted] for one in token_log_probs(logits, inputs["input_ids"], temperature)]


def gradients(model: Any, log_probs: Any) -> dict[str, Any]:
    import torch

    model.zero_grad()
    (log_probs * torch.linspace(-1, 2, len(log_probs))).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": False},
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "attn_implementation": "eager"},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "Phi": {"num_key_value_heads": 2},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_and_gradients_are_those_of_whole_logits(architecture: str) -> None:
    """Phi's head has a bias; Gemma 2, Cohere and Granite do something to their logits; Gemma and this Qwen2 are tied."""
    import torch

    from fsbarrier.training.policy_model import PolicyModel

    model = model_of(architecture, **ARCHITECTURES[architecture])
    given, wanted = inputs()
    expected, expected_entropies, expected_certainties = numbers(model, given, wanted, 0.7)
    expected_gradients = gradients(model, expected + 0.3 * expected_entropies)
    # So little that the vocabulary is cut into slices of a few entries, the last one smaller.
    policy = PolicyModel(model, 8 * int(wanted.sum()) * 10)
    assert policy.head is not None
    found, entropies, certainties = policy(given, wanted, 0.7)
    torch.testing.assert_close(certainties, expected_certainties, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-6, atol=2e-6)
    for name, gradient in gradients(model, found + 0.3 * entropies).items():
        scale = float(expected_gradients[name].abs().max())
        assert float((gradient - expected_gradients[name]).abs().max()) <= 2e-6 * max(1.0, scale), name


def test_an_architecture_that_is_not_understood_uses_its_own_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    from fsbarrier.training.policy_model import PolicyModel

    class Louder(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().forward(*args, **kwargs)
            answer.logits = answer.logits * 1.5
            return answer

    model = Louder(model_of("Llama").config)
    given, wanted = inputs()
    policy = PolicyModel(model, 1 << 20)
    assert policy.head is None and "Louder" in capsys.readouterr().err
    torch.testing.assert_close(policy(given, wanted, 1.0)[0], reference(model, given, wanted, 1.0))


def three_sequences() -> Any:
    import torch

    from fsbarrier.training.batch import TrainingBatch

    torch.manual_seed(2)
    lengths = torch.tensor([0, 7, 12, 4])
    total = int(lengths.sum())
    mask = (torch.rand(total) < 0.5).to(torch.uint8)
    tokens, old = torch.randint(2, 97, (total,), dtype=torch.int32), -torch.rand(total)
    engines, ones = torch.full((3, 2), -1, dtype=torch.int32), torch.ones(3)
    return TrainingBatch(tokens, mask, old, lengths.cumsum(0), ones, ones, engines, 0 * ones, ones, ())


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
def test_packed_sequences_do_not_see_each_other(architecture: str) -> None:
    """Flash-attention needs a GPU; transformers reads the same positions for PyTorch's attention. Gemma 2 has a sliding window too."""
    import torch

    from fsbarrier.training.micro_batch import MicroBatch
    from fsbarrier.training.policy_model import PolicyModel

    policy = PolicyModel(model_of(architecture, **ARCHITECTURES[architecture]), 1 << 20)
    batch, device = three_sequences(), torch.device("cpu")
    placed = []
    for packed in (False, True):
        micro = MicroBatch.of(batch, [2, 0, 1], device, packed=packed)
        assert micro.inputs["input_ids"].shape == ((1, 23) if packed else (3, 12))
        placed.append(micro.placed(policy(micro.inputs, micro.wanted, 1.0)[0]))
    torch.testing.assert_close(placed[0], placed[1], rtol=1e-5, atol=1e-5)
    whole = MicroBatch.of(batch, [1], device, packed=False)
    alone = whole.placed(policy(whole.inputs, whole.wanted, 1.0)[0])
    torch.testing.assert_close(placed[1][2], alone[0], rtol=1e-5, atol=1e-5)
    assert bool((alone[0] != 0).any())


def test_a_policy_computes_the_same_bits_wherever_in_its_file_the_weights_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from fsbarrier.settings.sections import TrainerSettings
    from fsbarrier.training import policy
    from fsbarrier.training.policy_model import PolicyModel

    # An accelerator's memory has no such places.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model_of("Llama", hidden_size=36, intermediate_size=50, head_dim=18).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, found = load_file(file), []
    for longer in (0, 8, 16, 40):
        save_file(weights, file, {"format": "pt", "longer": "x" * longer})
        model = policy.load(tmp_path, TrainerSettings())
        assert all(one.data_ptr() % 64 == 0 for one in model.parameters())
        given, wanted = inputs()
        # Of a single token: the head's product is one of a matrix and a vector.
        wanted[1] = False
        wanted[0] = torch.arange(wanted.shape[1]) == 5
        log_probs, *_ = PolicyModel(model, 1 << 20)(given, wanted, 1.0)
        found.append(gradients(model, log_probs))
    assert all(torch.equal(found[0][name], one[name]) for one in found for name in one)


def test_a_family_without_pytorchs_attention_is_loaded_with_its_own(tmp_path: Path) -> None:
    from families import write_family

    from fsbarrier.settings.sections import TrainerSettings
    from fsbarrier.training import policy

    write_family("GptOss", tmp_path)
    models = policy.load(tmp_path, TrainerSettings()), policy.without_weights(tmp_path, TrainerSettings())
    assert [one.config._attn_implementation for one in models] == ["eager", "eager"]


def test_checkpointed_activations_give_the_same_gradients(tmp_path: Path) -> None:
    import torch

    from fsbarrier.settings.sections import TrainerSettings
    from fsbarrier.training import policy
    from fsbarrier.training.policy_model import PolicyModel

    model_of("Llama").save_pretrained(tmp_path)
    given, wanted = inputs()
    found, kept = [], []
    for checkpointing in (False, True):
        model = policy.load(tmp_path, TrainerSettings(gradient_checkpointing=checkpointing)).train()
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, saved=saved: saved.append(one) or one, lambda one: one
        ):
            log_probs, *_ = PolicyModel(model, 1 << 20)(given, wanted, 1.0)
        found.append(gradients(model, log_probs))
        kept.append(len(saved))
    assert kept[1] < kept[0] / 2
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_no_tensor_is_larger_than_the_logits_may_be() -> None:
    """A head of 40,000 entries over 300 tokens: 48 MB of logits, in slices of 1 MiB, forward and backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from fsbarrier.training.log_prob_head import LogitScaling, LogProbHead

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = func(*args, **(kwargs or {}))
            sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(given) if torch.is_tensor(leaf)]
            # The head's own gradient is as large as the head, and there once.
            self.largest = max([self.largest, *(size for size in sizes if size != weights)])
            return given

    head = LogProbHead(torch.nn.Linear(8, 40_000, bias=False), LogitScaling(), 1 << 20)
    weights = 40_000 * 8 * 4
    hidden, targets = torch.randn(300, 8, requires_grad=True), torch.randint(0, 40_000, (300,))
    with Watch() as watch:
        sum(one.sum() for one in head(hidden, targets, 1.0)).backward()
    assert 1 << 18 < watch.largest <= 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_answer_takes_no_more_memory_than_allowed(dtype: str) -> None:
    """8,192 tokens at a vocabulary of 152k: 4.6 GiB of logits, in at most 256 MiB of a real process's memory."""
    program = f"""
import resource, torch
torch.set_default_dtype(torch.{dtype})
from fsbarrier.training.log_prob_head import LogitScaling, LogProbHead
rows, vocabulary, width = 8192, 151936, 64
head = LogProbHead(torch.nn.Linear(width, vocabulary, bias=False), LogitScaling(cap=30.0), 256 << 20)
head.linear.weight.grad = torch.zeros_like(head.linear.weight)
hidden, targets = torch.randn(rows, width, requires_grad=True), torch.randint(0, vocabulary, (rows,))
sum(one.sum() for one in head(hidden[:8], targets[:8], 1.0)).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sum(one.sum() for one in head(hidden, targets, 1.0)).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert 64 << 20 < int(said.stdout) < 256 << 20


# --- adapters -------------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match="gate is no linear layer"):
        try_model(tmp_path, chosen("q_proj", "gate"), said.append)
    # A start is not silent meanwhile.
    assert len(said) == 1 and said[0].startswith("trying adapters of rank 4 on the model")
    # A start does that in a process of its own. This one has loaded torch already.
    assert architecture.main([str(tmp_path), "4", "q_proj"]) == 0
    assert architecture.main([str(tmp_path), "4"]) == 2
    assert "name linear layers in lora.targets" in capsys.readouterr().err


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
