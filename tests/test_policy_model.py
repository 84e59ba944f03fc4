"""The policy's model: log-probabilities without whole logits, for the architectures that people train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
