"""A tiny model, rollouts of it, and the trainer's programs run on them, in this process or under real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

from waiting import free_port

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import Identity, UpdateSpec
from fsbarrier.trajectories import RankFileWriter

REPO = Path(__file__).resolve().parent.parent
GROUPS, SAMPLES, PROMPT = 6, 4, 5


def settings(**overrides: Any) -> dict[str, Any]:
    """Resolved settings; `section__name=value` changes one."""
    nested = Settings().as_json()
    nested["optimizer"]["lr"] = 1e-3
    nested["trainer"] |= {"minibatch": 10, "max_tokens_per_micro_batch": 48}
    for dotted, value in overrides.items():
        section, name = dotted.split("__")
        nested[section][name] = value
    return nested


def tiny_model(folder: Path, *, tied: bool = False, hidden_size: int = 32) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)  # at this size more of them only wait for each other
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def trajectory(
    task: int, sample: int, tokens: list[int], logprobs: list[float], reward: float
) -> dict[str, Any]:
    """The model sampled the last `len(logprobs)` of `tokens`."""
    prompt = len(tokens) - len(logprobs)
    return {
        "task_id": f"t{task}",
        "task_index": task,
        "sample": sample,
        "reward": reward,
        "valid": True,
        "policy_version": 0,
        "node_rank": 0,
        "token_ids": array("i", tokens),
        "loss_mask": array("B", [0] * prompt + [1] * len(logprobs)),
        "logprobs": array("f", [0.0] * prompt + logprobs),
    }


def write_groups(path: Path, groups: list[list[dict[str, Any]]]) -> None:
    with RankFileWriter(path, header={}) as writer:
        for group in groups:
            writer.append_group(group[0]["task_index"], group)
        writer.finish()


def rollouts(
    path: Path,
    model: Any,
    *,
    rewards: tuple[float, ...] = (0, 1, 0, 1),
    temperature: float = 1.0,
    policy_version: int = 0,
    vocabulary: int = 32,
) -> None:
    """A merged file of trajectories of different lengths with the model's own log-probabilities."""
    import torch

    generator = torch.Generator().manual_seed(1)
    groups = []
    with torch.no_grad():
        for task in range(GROUPS):
            group = []
            for sample in range(SAMPLES):
                length = PROMPT + 1 + (task + sample) % 4
                tokens = torch.randint(2, vocabulary, (1, length), generator=generator)
                log_probs = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, -1)
                chosen = log_probs.gather(1, tokens[0, 1:, None])[PROMPT - 1 :, 0]
                one = trajectory(task, sample, tokens[0].tolist(), chosen.tolist(), float(rewards[sample]))
                group.append({**one, "policy_version": policy_version})
            groups.append(group)
    write_groups(path, groups)


def flat(report: dict[str, Any]) -> dict[str, Any]:
    """The report of an update with its metrics beside the other values."""
    return {**report, **report["metrics"]}


def work_identity(folder: Path) -> dict[str, Any]:
    """Which work a spec is for: node 0's in iteration 1 of the run in this folder."""
    return Identity(f"test-{folder.name}", folder, node_rank=0, generation=1, iteration=1).as_json()


class Bench:
    """One folder with a model, rollouts and the programs' specs. Policy version N is in the folder `vN`, 0 in `model`."""

    def __init__(self, folder: Path, nested: dict[str, Any]) -> None:
        self.folder, self.nested = folder, nested

    @property
    def settings(self) -> Settings:
        return Settings.from_json(self.nested)

    def spec(self, name: str, **fields: Any) -> dict[str, Any]:
        return {
            **work_identity(self.folder),
            "policy_version": 0,
            "settings": self.nested,
            "result": str(self.folder / f"{name}.result"),
            "progress": str(self.folder / f"{name}.progress"),
            **fields,
        }

    def prepare(self, **fields: Any) -> dict[str, Any]:
        """The batch of the file `merged`, made in this process; gives the result."""
        from fsbarrier.processes.worker_contract import ProgressWriter
        from fsbarrier.workers import prepare

        model = self.folder / "model"
        if not model.exists():
            model.mkdir()
            (model / "config.json").write_text(json.dumps({"vocab_size": 64}))
        places = {"merged": [str(self.folder / "merged")], "batch": str(self.folder / "batch")}
        places |= {"model": str(model)}
        spec = self.spec("prepare", **{**places, **fields})
        return dict(prepare.work(spec, self.settings, ProgressWriter(None)) or {})

    def update_spec(self, out: str, *, version: int = 1, before: str = "", **fields: Any) -> dict[str, Any]:
        """The spec of the update from the policy in the folder `before` (none: the first model) to version `version`."""
        known = {
            "batch": str(self.folder / "batch"),
            "model": str(self.folder / before / "model"),
            "first_model": str(self.folder / "model"),
            "trainer_state": str(self.folder / before / "trainer") if before else None,
            "reference": None,
            "out": str(self.folder / out),
            "policy_version": version - 1,
            "new_policy_version": version,
            "policy": self.identity(before) if before else "start",
            "weights_dir": None,
        }
        return self.spec(out, **known | fields)

    def identity(self, name: str) -> str:
        """What tells the policy in the folder `name` from any other; nothing where that has no manifest that can be read."""
        try:
            folder = self.folder / name
            return checkpoints.identity(folder.name, checkpoints.read_manifest(folder).digest)
        except ProgramFailed:
            return ""

    def update(self, out: str, *, version: int = 1, before: str = "", **fields: Any) -> dict[str, Any]:
        """One update in this process; gives the result. Raises what it raises."""
        from fsbarrier.workers import update

        result = self.update_by(update.Updates(), out, version=version, before=before, **fields)
        update.leave()
        return result

    def update_by(self, updates: Any, out: str, **fields: Any) -> dict[str, Any]:
        """One update by processes that stay (workers.update.Updates); gives the result, {} in a process that has none."""
        from fsbarrier.processes.worker_contract import ProgressWriter

        spec = UpdateSpec.from_json(self.update_spec(out, **fields))
        report = updates.main(spec, self.settings, ProgressWriter(self.folder / "progress"))
        return flat(report.as_json()) if report is not None else {}

    def trainer(self) -> Any:
        """A trainer of the first model, in this process."""
        from fsbarrier.training.processes import Processes
        from fsbarrier.training.trainer import Trainer

        place: dict[str, Any] = {
            "model_folder": self.folder / "model",
            "state_folder": None,
            "policy_version": 0,
        }
        return Trainer.load(Processes(self.settings.trainer), self.settings, **place)

    def torchrun(
        self, *specs: dict[str, Any], processes: int = 1, program: str = "fsbarrier.workers.update"
    ) -> list[tuple[subprocess.Popen[str], str]]:
        """One update under real torchrun, one node a spec, `processes` each; gives the ended torchruns and what they said."""
        port, started = free_port(), []
        for node, spec in enumerate(specs):
            path = self.folder / f"node{node}.json"
            path.write_text(json.dumps(spec))
            argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(specs))]
            argv += ["--node-rank", str(node), "--nproc-per-node", str(processes)]
            argv += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "0"]
            argv += ["-m", program, "--spec", str(path)]
            env = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'tests'}", "OMP_NUM_THREADS": "1"}
            env.pop("MASTER_ADDR", None)
            started.append(
                subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        return [(one, one.communicate()[0]) for one in started]

    def weights(self, out: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        loaded: dict[str, Any] = load_file(self.folder / out / "model" / "model.safetensors")
        return loaded


def bench(folder: Path, *, tied: bool = False, **overrides: Any) -> Bench:
    """A bench with a model and its rollouts."""
    rollouts(folder / "merged", tiny_model(folder / "model", tied=tied))
    return Bench(folder, settings(**overrides))


def first_weights(folder: Path) -> dict[str, Any]:
    """Those of the first model."""
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(folder / "model" / "model.safetensors")
    return loaded


def policy_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
