"""The same batch trained on by 1 to 4 processes on 1 to 3 nodes, sharded in every way, in any micro-batches: always the same update.

`python parallel_updates.py FOLDER CASE...`, a case like `2x1:node:3`: 2 nodes of 1 process each, trainer.shard=node, 3 trajectories a
micro-batch (`20t`: 20 tokens); after it `bf16`: in bfloat16; `zero1` and so on: with DeepSpeed; `lora`: adapters alone; `clip`: its
gradients are clipped; `steps`: three optimizer steps, not one; `critic`: with a critic, whose weights count too. `tied` among the cases:
of a model whose output head is its embedding.
Each process is forked, so that torch is imported once. It fails where a case is not within 1e-6 of one process alone, where a second
run differs from the first in a single bit, or where the log-probabilities computed beforehand are not exactly those that are then
trained with.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_ranks import in_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_bench import Bench, rollouts, settings

from fsbarrier.planning.memory import UpdateLoad
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings.sections import Settings
from fsbarrier.training.advantages import with_token_weights
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.critic import train_critic, with_values
from fsbarrier.training.engine_check import known_logprobs
from fsbarrier.training.log_prob_pass import with_old, with_reference
from fsbarrier.training.micro_batch import MicroBatch, plan
from fsbarrier.training.optimizer_step import Sums, train
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.slices import whole_tensor
from fsbarrier.training.trainer import Trainer

# Of the norm of the gradient that reaches the optimizer; of the change that Adam makes of it where it is clear; and of the whole change.
# Adam divides by the gradient's own size: for a number of 1e-9, which sums in another order leave half rounding, it steps about as far as
# for one of 1e-2, so the whole change says less than the gradient. In bfloat16 the same numbers are added up with 8 bits each.
TOLERANCE = {"float32": (1e-6, 1e-6, 1e-5), "bfloat16": (0.05, 0.5, 0.5)}
# A number of a gradient is clear where it is at least this part of the largest.
CLEAR = 1e-3
ALONE = "1x1:none:24"
# The same process with other micro-batches: sums in another order, and nothing else.
ALONE_OTHERWISE = "1x1:none:3"
# What also changes what one process alone would make of the batch.
CHANGES = ("lora", "clip", "steps", "critic")
# Far below what these gradients have.
CLIP = 1e-3
# Every term that a loss can have, divided by what only the whole minibatch knows.
ALGORITHM = {
    "aggregation": "seq-mean-token-mean",
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "mismatch": "token_tis",
}


def small_model(folder: Path, *, tied: bool, vocabulary: int) -> Any:
    """Without biases: the true gradient of a key's bias is zero, and Adam makes a step out of whatever rounding leaves there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    return model


class Case:
    def __init__(self, text: str) -> None:
        self.text = text
        place, self.shard, micro_batch, *more = text.split(":")
        self.nodes, self.per_node = map(int, place.split("x"))
        # A trajectory of this batch has about eight tokens.
        in_tokens = micro_batch.endswith("t")
        self.tokens = int(micro_batch[:-1]) if in_tokens else 8 * int(micro_batch)
        self.dtype = "bfloat16" if "bf16" in more else "float32"
        self.offload = next((one for one in more if one in ("optimizer", "all")), "none")
        self.zero = next((int(one[-1]) for one in more if one.startswith("zero")), None)
        self.checkpointing = "checkpointing" in more
        self.lora, self.clip, self.steps, self.critic = (one in more for one in CHANGES)
        changes = [one for one in CHANGES if one in more]
        self.alone = ":".join([ALONE, *changes])
        self.alone_otherwise = ":".join([ALONE_OTHERWISE, *changes])

    def run(self, folder: Path) -> dict[str, Any]:
        """Train with it, twice and once more with log-probabilities of the trainer's own; gives what the first process found first."""
        first, second, recomputed = self.updates(folder, recompute=(False, False, True))
        for name, weight in first["weights"].items():
            same = torch.equal(weight, second["weights"][name])
            assert same and torch.equal(first["moments"][name], second["moments"][name]), (
                f"{self.text}: two runs differ in {name}"
            )
        assert recomputed["gap"] == 0, (
            f"{self.text}: recomputed log-probabilities differ by {recomputed['gap']}"
        )
        return first

    def updates(self, folder: Path, recompute: tuple[bool, ...] = (False,)) -> list[dict[str, Any]]:
        """What the first process found in updates from the same beginning."""
        out = folder / "found.pt"
        world = self.nodes * self.per_node

        def act(rank: int) -> None:
            node, local = divmod(rank, self.per_node)
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "GROUP_RANK": node}
            os.environ.update({k: str(v) for k, v in {**place, "LOCAL_WORLD_SIZE": self.per_node}.items()})
            found = [self.update(folder, recompute=one) for one in recompute]
            if rank == 0:
                torch.save(found, out)

        ended = in_ranks(world, folder / "store", act)
        assert not any(ended), f"{self.text}: {ended}"
        return list(torch.load(out, weights_only=True))

    def settings(self, folder: Path) -> Settings:
        trainer_settings = {
            "shard": self.shard,
            "offload": self.offload,
            "max_tokens_per_micro_batch": self.tokens,
            "dtype": self.dtype,
            "gradient_checkpointing": self.checkpointing,
        }
        if self.zero is not None:
            trainer_settings |= {"backend": "deepspeed", "zero_stage": self.zero}
        nested = settings(optimizer__lr=1e-2, optimizer__warmup_steps=0, optimizer__weight_decay=0.1)
        nested["algorithm"]["max_logprob_gap"] = 1.0
        nested["trainer"] |= trainer_settings
        nested["algorithm"] |= ALGORITHM
        nested["lora"]["rank"] = 4 if self.lora else 0
        if self.critic:
            nested["algorithm"] |= {"advantage": "gae", "gamma": 0.99, "lam": 0.95}
            nested["critic"] |= {"lr": 1e-2, "clip": 0.1}
        nested["optimizer"]["grad_clip"] = CLIP if self.clip else 1e3
        return Bench(folder, nested).settings

    def update(self, folder: Path, *, recompute: bool) -> dict[str, Any]:
        chosen = self.settings(folder)
        batch = TrainingBatch.load(folder / "batch")
        if self.steps:
            batch = dataclasses.replace(batch, steps=list(batch.steps[0].split(9)))
        # As an update's program does: adapters begin at random.
        torch.manual_seed(1)
        trainer = Trainer.load(
            Processes(chosen.trainer),
            chosen,
            model_folder=folder / "model",
            state_folder=None,
            policy_version=0,
        )
        for name, one in trainer.backend.trained.items():
            # An adapter's second half begins at zero, and so the first half would have no gradient.
            if "lora_B" in name:
                one.data.fill_(0.02)
        if recompute:
            batch = recomputed(trainer, batch, self.tokens)
        before = held(trainer, "weight")
        sums = step(trainer, batch, chosen, folder)
        if (self.dtype, self.offload, self.zero, self.lora) == ("float32", "none", None, False):
            check_memory(trainer)
        weights, moments = held(trainer, "weight"), held(trainer, "exp_avg")
        known = known_logprobs(trainer, batch, chosen)
        assert known is not None
        return {
            "before": before,
            "weights": weights,
            "moments": moments,
            "gap": sums.gap.maximum,
            "known": [one for row in known.sequences for one in row.logprobs if one is not None],
            "loss": sums.loss,
            "grad_norm": sums.grad_norm,
            "layout": trainer.layout.described(trainer.processes),
        }


def check_memory(trainer: Trainer) -> None:
    """All processes together hold the bytes that `fsbarrier plan` states for each of them."""
    trained, optimizer, size = trainer.backend.trained, trainer.backend.optimizer, 0
    own = {"weights": 0, "moments": 0}
    for parameter in trained.values():
        size += parameter.numel()
        own["weights"] += local_bytes(parameter)
        own["moments"] += sum(local_bytes(one) for one in optimizer.state[parameter].values() if one.dim())
    fields = {name: 1 for name in ModelShape.__slots__}
    shape = ModelShape(**{**fields, "parameters": size, "trained": size, "vision": 0})
    planned = UpdateLoad(shape, shards=trainer.layout.shards, element=4, tokens=1, logits=1).parts
    everybody, world = gather_json(own), trainer.processes.world
    for name in own:
        together = sum(one[name] for one in everybody)
        # A plan rounds the share of each process down to whole bytes.
        assert 0 <= together - world * planned[name] < world * trainer.layout.shards, (
            name,
            everybody,
            planned,
        )


def local_bytes(tensor: Any) -> int:
    """The bytes of this process's part of a tensor."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(own.numel() * own.element_size())


def held(trainer: Trainer, key: str) -> dict[str, Tensor]:
    """The whole weights of all that is trained, or the moments."""
    found = {}
    for of, trained in {"": trainer, "critic/": trainer.critic}.items():
        tensors = trained.backend.state(1, without_weights=False).tensors if trained else {}
        prefix = f"{key}/"
        named = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        found |= {of + name: whole(one) for name, one in named.items()}
    return found


def step(trainer: Trainer, batch: TrainingBatch, chosen: Settings, folder: Path) -> Sums:
    """What the update's program does with a batch."""
    batch = with_reference(folder / "reference", trainer.layout, trainer.processes, batch, chosen)
    batch = with_old(trainer, batch, chosen)
    if trainer.critic is not None:
        batch = with_values(trainer.critic, batch, chosen)
    batch, _ = with_token_weights(batch, chosen.algorithm, 0.0)
    sums = train(trainer, batch, chosen, folder / "model")
    if trainer.critic is not None:
        train_critic(trainer.critic, batch, chosen, lambda done: None)
    return sums


def whole(tensor: Any) -> Tensor:
    """The whole of what all processes hold parts of, cut in any way."""
    return whole_tensor(tensor, torch.float32).clone()


def recomputed(trainer: Trainer, batch: TrainingBatch, most_tokens: int) -> TrainingBatch:
    """The batch with the trainer's own log-probabilities, of this process's sequences, before anything is trained."""
    logprobs, processes = batch.logprobs.clone(), trainer.processes
    chosen = {"most_tokens": most_tokens, "packed": trainer.packs}
    for indices in plan(batch.steps[0].tolist(), batch.lengths(), processes.world, **chosen)[processes.rank]:
        micro = MicroBatch.of(
            batch, indices or batch.steps[0][:1].tolist(), processes.device, packed=trainer.packs
        )
        with torch.no_grad():
            found = micro.placed(trainer.backend.model(micro.inputs, micro.wanted, 1.0)[0])
        for row, index in enumerate(indices):
            begin, end = batch.offsets[index : index + 2].tolist()
            logprobs[begin:end] = found[row, : end - begin]
    return dataclasses.replace(batch, logprobs=logprobs)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in weights.values()]).double()


def make_batch(folder: Path, *, tied: bool, vocabulary: int = 33) -> None:
    """The batch in `folder`, and its model."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    model = small_model(folder / "model", tied=tied, vocabulary=vocabulary)
    rollouts(folder / "merged", model, vocabulary=vocabulary - 1)
    # A reference policy that is another one.
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    model.save_pretrained(folder / "reference")
    for parameter in model.parameters():
        parameter.data.div_(1.1)
    Bench(folder, settings(trainer__minibatch=24, trainer__epochs=1)).prepare()
    # One optimizer step, over so many that neither 3 nor 4 processes get as many each: some have an empty micro-batch.
    batch = torch.load(folder / "batch", weights_only=True)
    batch["steps"] = [batch["steps"][0][:22]]
    torch.save(batch, folder / "batch")


def import_before_forking(cases: list[str]) -> None:
    """What every process would import for itself when it first needs it, which takes longer than all its updates."""
    import torch.distributed.checkpoint  # noqa: F401

    if any("lora" in text for text in cases):
        import peft  # noqa: F401
    if any(Case(text).zero is not None for text in cases if text != "tied"):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


def differences(found: dict[str, Any], alone: dict[str, Any]) -> tuple[float, float, float]:
    """What `TOLERANCE` limits: how far an update is from the one of a process alone."""
    before, gradient = flat(alone["before"]), flat(alone["moments"])
    change = flat(alone["weights"]) - before
    clear = gradient.abs() > CLEAR * gradient.abs().max()
    off = flat(found["weights"]) - before - change
    return (
        float((flat(found["moments"]) - gradient).norm() / gradient.norm()),
        float(off[clear].norm() / change[clear].norm()),
        float(off.norm() / change.norm()),
    )


def main(folder: Path, cases: list[str]) -> None:
    import_before_forking(cases)
    make_batch(folder, tied="tied" in cases)

    @functools.cache
    def one_process(text: str) -> dict[str, Any]:
        return Case(text).updates(folder)[0]

    for text in (one for one in cases if one != "tied"):
        case = Case(text)
        alone = one_process(case.alone)
        found = case.run(folder)
        apart = differences(found, alone)
        print(
            f"{text}: {found['layout']}: {apart[0]:.1e} of the gradient, {apart[1]:.1e} of the change of those weights that have a "
            f"clear one, {apart[2]:.1e} of the change of all"
        )
        assert abs(found["grad_norm"] / alone["grad_norm"] - 1) < 10 * TOLERANCE[case.dtype][0], text
        assert not case.clip or found["grad_norm"] > 10 * CLIP
        # Advantages are centred, so that the sum over all tokens is nearly nothing.
        assert abs(found["loss"] - alone["loss"]) < 100 * TOLERANCE[case.dtype][0], f"{text}: {found['loss']}"
        # What an engine is compared with is computed by all processes together.
        told = max(abs(a - b) for a, b in zip(found["known"], alone["known"], strict=True))
        assert told < (0.02 if case.dtype == "float32" else 0.2), f"{text}: {told}"
        allowed = TOLERANCE[case.dtype]
        if case.steps:
            # Each step enlarges what the steps before it rounded differently: by how much, this model shows on one process.
            rounded = differences(one_process(case.alone_otherwise), alone)
            allowed = tuple(max(3 * most, much) for most, much in zip(allowed, rounded, strict=True))
        assert all(one < most for one, most in zip(apart, allowed, strict=True)), f"{text}: allowed {allowed}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
