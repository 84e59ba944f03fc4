"""Phase 10: one policy update on all nodes, started by torchrun. Batch in; Hugging Face folder and trainer state out.

`torchrun ... -m fsbarrier.workers.update --spec SPEC.json`. Every process takes its share of each minibatch; gradients are
averaged by DistributedDataParallel (through accelerate) over gloo on CPUs and NCCL on accelerators.
"""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor

from fsbarrier import checkpoints, files
from fsbarrier.errors import ProgramFailed
from fsbarrier.workers import policy
from fsbarrier.workers.batch import TrainingBatch
from fsbarrier.workers.losses import LossSums, grpo_loss, rft_loss, token_log_probs
from fsbarrier.workers.spec import Progress, run_worker

#: largest mean difference of log-probabilities between engine and trainer that the precision explains
GAP_LIMIT = {torch.float32: 2e-3, torch.bfloat16: 0.05}
STATE = "state.pt"


class Update:
    """One process's part of the update."""

    def __init__(self, spec: dict[str, Any], progress: Progress) -> None:
        self.spec, self.progress = spec, progress
        self.settings = spec["settings"]
        trainer = self.settings["trainer"]
        on_cpu = not torch.cuda.is_available()
        self.dtype = _dtype(trainer["dtype"], on_cpu)
        self.accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="bf16" if self.dtype is torch.bfloat16 else "no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=trainer["timeout_s"]))],
        )
        self.local_main = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world != expected:  # silently training alone would look like success
            raise ProgramFailed(f"accelerate sees {self.world} processes where torchrun started {expected}")
        self.batch = TrainingBatch.load(Path(spec["batch"]))
        self.temperature = self.settings["rollout"]["temperature"]
        self.steps_before = 0

    def run(self) -> dict[str, Any] | None:
        started = time.monotonic()
        torch.manual_seed(self.spec["new_policy_version"])
        model = policy.load(Path(self.spec["model"]))
        optimizer_settings = self.settings["optimizer"]
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer_settings["lr"],
            betas=tuple(optimizer_settings["betas"]),
            weight_decay=optimizer_settings["weight_decay"],
        )
        self.restore(model, optimizer)
        model, optimizer = self.accelerator.prepare(model, optimizer)
        model.train()
        metrics = self.train(model, optimizer)
        self.write(self.accelerator.unwrap_model(model), optimizer)
        if not self.local_main:
            return None
        return {
            "out": self.spec["out"],
            "policy_version": self.spec["new_policy_version"],
            **metrics,
            "seconds": round(time.monotonic() - started, 3),
            "device": str(self.accelerator.device),
            "distributed": f"{self.accelerator.distributed_type.value} x {self.world} ({self.dtype})",
        }

    def restore(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Go on from the trainer state of the policy version before, whatever the world size was then."""
        folder = self.spec["trainer_state"]
        path = Path(folder) / STATE if folder else None
        if path is None or not path.is_file():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["master"]:
            model.load_state_dict(state["master"])
        optimizer.load_state_dict(state["optimizer"])
        self.steps_before = state["optimizer_steps"]

    def train(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """All optimizer steps; gives the metrics, the same on every process."""
        totals = dict.fromkeys(("loss", "clipped", "surprise", "tokens", "grad_norm"), 0.0)
        gap_mean, gap_max = 0.0, 0.0
        steps = self.batch.steps
        for number, indices in enumerate(steps):
            self.set_lr(optimizer, self.steps_before + number + 1)
            sums, gaps = self.accumulate(model, indices, measure_gap=number == 0)
            if number == 0:
                gap_mean, gap_max = self.check_gap(gaps)
            norm = self.accelerator.clip_grad_norm_(
                model.parameters(), self.settings["optimizer"]["grad_clip"]
            )
            if not torch.isfinite(sums["loss"]) or not torch.isfinite(norm):
                raise ProgramFailed(
                    f"optimizer step {number + 1}: loss {float(sums['loss'])}, gradient norm {float(norm)}; "
                    f"nothing was saved (a smaller optimizer.lr may help)"
                )
            optimizer.step()
            optimizer.zero_grad()
            for name, value in sums.items():
                totals[name] += float(value)
            totals["grad_norm"] += float(norm)
            if self.local_main:
                self.progress.show(number + 1, len(steps), "steps", last=number + 1 == len(steps))
        tokens, count = max(1.0, totals["tokens"]), max(1, len(steps))
        return {
            "optimizer_steps": len(steps),
            "loss": totals["loss"] / tokens,
            "clip_fraction": totals["clipped"] / tokens,
            "entropy": totals["surprise"] / tokens,
            "grad_norm": totals["grad_norm"] / count,
            "tokens": int(totals["tokens"]),
            "trajectories": len(self.batch.weights),
            "logprob_gap_mean": gap_mean,
            "logprob_gap_max": gap_max,
            "lr": self.settings["optimizer"]["lr"],
        }

    def set_lr(self, optimizer: Any, step: int) -> None:
        warmup = self.settings["optimizer"]["warmup_steps"]
        factor = min(1.0, step / warmup) if warmup else 1.0
        for group in optimizer.param_groups:
            group["lr"] = self.settings["optimizer"]["lr"] * factor

    def accumulate(
        self, model: Any, indices: Tensor, *, measure_gap: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The gradient of one minibatch's token mean, and its sums over all processes.

        Every process runs the same number of micro-batches, as DistributedDataParallel wants; one without a trajectory left
        runs its first one with weight zero. Gap sums: [sum, count, maximum] over this process's tokens.
        """
        mine = indices[self.rank :: self.world].tolist()
        size = self.settings["trainer"]["micro_batch"]
        rounds = math.ceil(math.ceil(len(indices) / self.world) / size)
        tokens = self.batch.sampled_tokens(indices)
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        gaps = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for number in range(rounds):
            chosen = mine[number * size : (number + 1) * size]
            micro = self.batch.micro_batch(chosen or indices[:1].tolist(), self.accelerator.device)
            mask = micro.mask if chosen else torch.zeros_like(micro.mask)
            with nullcontext() if number == rounds - 1 else self.accelerator.no_sync(model):
                output = model(input_ids=micro.tokens, attention_mask=micro.attention, use_cache=False)
                new = token_log_probs(output.logits, micro.tokens, self.temperature)
                part = self.loss(new, micro.old, micro.weights, mask)
                self.accelerator.backward(part.loss * self.world / tokens)
            sums += torch.stack([part.loss.detach(), part.clipped, part.surprise]).double()
            if measure_gap and bool(mask.any()):
                gap = (new.detach() - micro.old).abs()[mask].double()
                gaps[0] += gap.sum()
                gaps[1] += len(gap)
                gaps[2] = torch.maximum(gaps[2], gap.max())
        total = self.accelerator.reduce(sums, "sum")
        return {
            "loss": total[0],
            "clipped": total[1],
            "surprise": total[2],
            "tokens": torch.tensor(float(tokens)),
        }, gaps

    def loss(self, new: Tensor, old: Tensor, weights: Tensor, mask: Tensor) -> LossSums:
        algorithm = self.settings["algorithm"]
        if algorithm["loss"] == "rft":
            return rft_loss(new, weights, mask)
        return grpo_loss(
            new, old, weights, mask, clip_low=algorithm["clip_low"], clip_high=algorithm["clip_high"]
        )

    def check_gap(self, gaps: Tensor) -> tuple[float, float]:
        """Does the engine serve the weights that are trained? (mean, maximum) difference of log-probabilities."""
        everyone = self.accelerator.gather(gaps[None])
        count = max(1.0, float(everyone[:, 1].sum()))
        mean, most = float(everyone[:, 0].sum()) / count, float(everyone[:, 2].max())
        rollout = self.settings["rollout"]
        limit = self.settings["algorithm"]["max_logprob_gap"] or GAP_LIMIT[self.dtype]
        comparable = rollout["top_p"] >= 1 and rollout["top_k"] in (-1, 0)
        if comparable and not mean <= limit:
            raise ProgramFailed(
                f"the sampled tokens' log-probabilities differ by {mean:.4f} on average (at most {most:.3f}) between "
                f"engine and trainer, more than {limit:g} (algorithm.max_logprob_gap): the engine does not serve the "
                f"weights in {self.spec['model']}, or computes them differently"
            )
        return mean, most

    def write(self, model: Any, optimizer: Any) -> None:
        """The main process leaves the new policy version; the manifest last."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            out = Path(self.spec["out"])
            serving = torch.float32 if self.dtype is torch.float32 else torch.bfloat16
            policy.save(model, Path(self.spec["model"]), out / "model", serving)
            files.make_dirs(out / "trainer")
            master = {} if serving is torch.float32 else {k: v.cpu() for k, v in model.state_dict().items()}
            state = {
                "optimizer": optimizer.optimizer.state_dict(),
                "optimizer_steps": self.steps_before + len(self.batch.steps),
                "master": master,
            }
            torch.save(state, out / "trainer" / STATE)
            checkpoints.write_manifest(out, self.spec["new_policy_version"])
        self.accelerator.wait_for_everyone()


def _dtype(wanted: str, on_cpu: bool) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if not on_cpu and torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32 if wanted == "float32" else torch.bfloat16


def main(spec: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
    update = Update(spec, progress)
    try:
        return update.run()
    except torch.OutOfMemoryError as error:
        hint = "lower trainer.micro_batch, or engine.gpu_memory_utilization if the engine stays"
        raise ProgramFailed(
            f"out of memory on {update.accelerator.device}: {str(error).splitlines()[0]}; {hint}"
        ) from None
    finally:
        if torch.distributed.is_initialized() and sys.exc_info()[0] is None:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_worker(main))
