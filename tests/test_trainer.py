"""The built-in trainer on a tiny model: losses, batches, and updates that do not depend on how many processes share them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from fsbarrier import checkpoints
from fsbarrier.settings import Settings
from fsbarrier.trajectories import ShardWriter

pytestmark = pytest.mark.torch
REPO = Path(__file__).resolve().parent.parent
GROUPS, SAMPLES, PROMPT = 6, 4, 5


def settings(**overrides: Any) -> dict[str, Any]:
    nested = Settings().model_dump(mode="json")
    nested["optimizer"]["lr"] = 1e-3
    nested["trainer"] |= {"minibatch": 10, "micro_batch": 3, "timeout_s": 120}
    for dotted, value in overrides.items():
        section, name = dotted.split("__")
        nested[section][name] = value
    return nested


def tiny_model(folder: Path, *, tied: bool = False) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def rollouts(path: Path, model: Any, *, rewards: tuple[float, ...] = (0, 1, 0, 1)) -> None:
    """A merged file of trajectories with the model's own log-probabilities."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with ShardWriter(path, prefix="test", header={}) as writer, torch.no_grad():
        for task in range(GROUPS):
            group = []
            for sample in range(SAMPLES):
                length = PROMPT + 1 + (task + sample) % 4
                tokens = torch.randint(2, 32, (1, length), generator=generator)
                chosen = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[
                    :, 0
                ]
                group.append(
                    {
                        "task_id": f"t{task}",
                        "task_index": task,
                        "sample": sample,
                        "reward": float(rewards[sample]),
                        "valid": True,
                        "policy_version": 0,
                        "node_rank": 0,
                        "token_ids": array("i", tokens[0].tolist()),
                        "loss_mask": array("B", [0] * PROMPT + [1] * (length - PROMPT)),
                        "logprobs": array("f", [0.0] * PROMPT + chosen[PROMPT - 1 :].tolist()),
                    }
                )
            writer.append_group(task, group)
        writer.finish({})


class Bench:
    """One folder with a model, rollouts and the programs' specs."""

    def __init__(self, folder: Path, nested: dict[str, Any]) -> None:
        self.folder, self.nested = folder, nested

    def run(
        self, module: str, name: str, *, processes: int = 0, **fields: Any
    ) -> subprocess.CompletedProcess[str]:
        spec = {
            "run_id": "test",
            "iteration": 1,
            "generation": 1,
            "policy_version": 0,
            "settings": self.nested,
            "result": str(self.folder / f"{name}.result"),
            "progress": str(self.folder / f"{name}.progress"),
            **fields,
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(spec))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        torchrun = ["torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1"]
        torchrun += ["--master-port", str(port), "--max-restarts", "0"]
        argv = [
            sys.executable,
            "-m",
            *(torchrun if processes else ()),
            *(("-m", module) if processes else (module,)),
        ]
        env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run([*argv, "--spec", str(path)], env=env, capture_output=True, text=True)

    def prepare(self) -> dict[str, Any]:
        done = self.run(
            "fsbarrier.workers.prepare",
            "prepare",
            merged=[str(self.folder / "merged")],
            batch=str(self.folder / "batch"),
        )
        assert done.returncode == 0, done.stderr
        return self.result("prepare")

    def update(self, name: str, *, processes: int = 0, model: str = "model", state: str | None = None) -> Any:
        return self.run(
            "fsbarrier.workers.update",
            name,
            processes=processes,
            batch=str(self.folder / "batch"),
            model=str(self.folder / model),
            trainer_state=str(self.folder / state) if state else None,
            out=str(self.folder / name),
            new_policy_version=1,
        )

    def result(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{name}.result").read_text())
        return found

    def weights(self, name: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        loaded: dict[str, Any] = load_file(self.folder / name / "model" / "model.safetensors")
        return loaded


def bench(folder: Path, *, tied: bool = False, **overrides: Any) -> Bench:
    model = tiny_model(folder / "model", tied=tied)
    rollouts(folder / "merged", model)
    return Bench(folder, settings(**overrides))


def test_the_update_is_the_same_however_many_processes_share_it(tmp_path: Path) -> None:
    work = bench(tmp_path)
    prepared = work.prepare()
    assert (prepared["groups"], prepared["dropped_groups"], prepared["trajectories"]) == (6, 0, 24)
    for processes in (0, 2, 3):
        done = work.update(f"out{processes}", processes=processes)
        assert done.returncode == 0, done.stderr
    one = work.weights("out0")
    for processes in (2, 3):
        other = work.weights(f"out{processes}")
        assert max(float((one[k] - other[k]).abs().max()) for k in one) < 1e-4
    result = work.result("out3")
    assert result["logprob_gap_max"] < 1e-4 and result["optimizer_steps"] == 4
    assert checkpoints.verify(tmp_path / "out3").policy_version == 1


def test_a_resumed_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    import torch

    work = bench(tmp_path)
    work.prepare()
    assert work.update("first").returncode == 0
    state = torch.load(tmp_path / "first" / "trainer" / "state.pt", weights_only=True)
    assert state["optimizer_steps"] == 4
    # the same rollouts under the new weights: their own log-probabilities, so that the gap check holds
    from transformers import AutoModelForCausalLM

    (tmp_path / "merged").unlink()
    rollouts(tmp_path / "merged", AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "model"))
    work.prepare()
    assert work.update("second", model="first/model", state="first/trainer").returncode == 0
    again = torch.load(tmp_path / "second" / "trainer" / "state.pt", weights_only=True)
    assert again["optimizer_steps"] == 8
    assert {int(s["step"]) for s in again["optimizer"]["state"].values()} == {8}


def test_weights_that_were_not_served_are_noticed(tmp_path: Path) -> None:
    work = bench(tmp_path)
    work.prepare()
    assert work.update("first").returncode == 0
    done = work.update("second", model="first/model", state="first/trainer")
    assert done.returncode != 0 and "the engine does not serve the weights" in done.stderr
    assert not (tmp_path / "second" / "MANIFEST.json").exists()


def test_a_tied_model_comes_out_untied_and_equal(tmp_path: Path) -> None:
    work = bench(tmp_path, tied=True, optimizer__lr=1e-12)
    work.prepare()
    assert work.update("out").returncode == 0
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    weights = work.weights("out")
    assert float((weights["lm_head.weight"] - weights["model.embed_tokens.weight"]).abs().max()) < 1e-6


def test_nothing_to_learn_from_is_no_failure(tmp_path: Path) -> None:
    work = Bench(tmp_path, settings())
    model = tiny_model(tmp_path / "model")
    rollouts(tmp_path / "merged", model, rewards=(1, 1, 1, 1))
    assert work.prepare()["dropped_groups"] == GROUPS
    done = work.update("out")
    assert done.returncode == 0, done.stderr
    assert work.result("out")["optimizer_steps"] == 0
    assert all(bool((v == model.state_dict()[k]).all()) for k, v in work.weights("out").items())


def test_grpo_loss_by_hand() -> None:
    import torch

    from fsbarrier.workers.losses import group_advantages, grpo_loss

    advantages = group_advantages(torch.tensor([0.0, 1.0]), normalize_std=True)
    assert advantages.tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    old = torch.zeros(2, 2)
    new = torch.log(torch.tensor([[0.5, 1.0], [2.0, 1.1]]))
    mask = torch.tensor([[True, False], [True, True]])
    sums = grpo_loss(new, old, torch.tensor([-1.0, 1.0]), mask, clip_low=0.2, clip_high=0.28)
    # worse sample, ratio 0.5 -> bounded at 0.8; better sample, ratio 2 -> bounded at 1.28, ratio 1.1 within bounds
    assert float(sums.loss) == pytest.approx(0.8 - 1.28 - 1.1)
    assert int(sums.clipped) == 2


def test_token_log_probs_are_those_of_the_tempered_distribution() -> None:
    import torch

    from fsbarrier.workers.losses import token_log_probs

    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    found = token_log_probs(logits, tokens, 0.5)
    expected = torch.log_softmax(logits / 0.5, -1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    assert torch.allclose(found[:, 1:], expected, atol=1e-5) and bool((found[:, 0] == 0).all())


def test_minibatches_cover_each_epoch_once() -> None:
    from fsbarrier.workers.prepare import minibatches

    steps = minibatches(25, 10, 2, seed="s")
    assert [len(step) for step in steps] == [13, 12] * 2
    assert sorted(i for step in steps[:2] for i in step.tolist()) == list(range(25))
    again = minibatches(25, 10, 2, seed="s")
    assert all(bool((a == b).all()) for a, b in zip(steps, again, strict=True))
    assert minibatches(0, 10, 2, seed="s") == []
