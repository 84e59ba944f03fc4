"""Phase 10: one policy update on all nodes, started by torchrun. Batch in; Hugging Face folder and trainer state out.

`torchrun ... -m fsbarrier.workers.update --spec SPEC.json`. Every process takes its share of each minibatch; gradients are
averaged by DistributedDataParallel (through accelerate) over gloo on CPUs and NCCL on accelerators.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from safetensors import SafetensorError
from torch import Tensor

from fsbarrier import files
from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.machine.network_interface import name_interface
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.worker_contract import Progress, run_worker
from fsbarrier.training import policy
from fsbarrier.training.batch import MicroBatch, TrainingBatch, load_tensors, plan
from fsbarrier.training.losses import LossSums, grpo_loss, rft_loss, token_log_probs

#: largest mean difference of log-probabilities between engine and trainer that the precision explains
GAP_LIMIT = {torch.float32: 2e-3, torch.bfloat16: 0.05}
STATE = "state.pt"
NO_SIGNAL = "no group had a signal to learn from: the weights are unchanged"
LOGITS_BYTES_CPU = 512 << 20  # of one micro-batch, in float32; on an accelerator a fraction of its memory
LOGITS_SHARE = 40
# Sharding by accelerate's environment variables would be half in effect: parameters and state are not gathered here.
LOST = ("gloo", "connection closed", "connection reset", "connect()", "broken pipe", "timed out")
DATA_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU")


class Update:
    """One process's part of the update."""

    def __init__(self, spec: dict[str, Any], settings: Settings, progress: Progress) -> None:
        self.spec, self.settings, self.progress = spec, settings, progress
        trainer = settings.trainer
        on_cpu = not torch.cuda.is_available()
        self.dtype = _dtype(trainer.dtype, on_cpu)
        name_interface(os.environ)
        self.accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="bf16" if self.dtype is torch.bfloat16 else "no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=trainer.timeout_s))],
        )
        self.local_main = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world != expected:  # silently training alone would look like success
            raise ProgramFailed(f"accelerate sees {self.world} processes where torchrun started {expected}")
        kind = self.accelerator.distributed_type.value
        if kind not in DATA_PARALLEL:
            raise ProgramFailed(
                f"accelerate is told to use {kind} (its ACCELERATE_* environment variables), which this trainer does not "
                "support: unset them, or bring a trainer of your own (trainer.command)"
            )
        self.batch = TrainingBatch.load(Path(spec["batch"]))
        self.lengths = self.batch.lengths()
        self.temperature = settings.rollout.temperature
        self.steps_before = 0

    def run(self) -> dict[str, Any] | None:
        started = time.monotonic()
        torch.manual_seed(self.spec["new_policy_version"])
        model = self.load()
        optimizer = self.optimizer(model)
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
            "note": "" if self.batch.steps else NO_SIGNAL,
        }

    def load(self) -> Any:
        """The model, and what of it the micro-batches depend on."""
        model = policy.load(Path(self.spec["model"]))
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.most_tokens = max(1, self.logits_bytes() // (4 * model.get_output_embeddings().weight.shape[0]))
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        chosen = self.settings.optimizer
        return torch.optim.AdamW(
            model.parameters(), lr=chosen.lr, betas=chosen.betas, weight_decay=chosen.weight_decay
        )

    def logits_bytes(self) -> int:
        if self.accelerator.device.type != "cuda":
            return LOGITS_BYTES_CPU
        return int(torch.cuda.get_device_properties(self.accelerator.device).total_memory) // LOGITS_SHARE

    def restore(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Go on from the trainer state of the policy version before, whatever the world size was then."""
        folder = self.spec["trainer_state"]
        if folder is None:
            return
        path = Path(folder) / STATE
        state = load_tensors(path, "trainer state")
        try:
            if state["policy_version"] != self.spec["policy_version"]:
                raise ValueError(
                    f"it belongs to policy version {state['policy_version']}, the model is version {self.spec['policy_version']}"
                )
            if state["master"]:
                model.load_state_dict(state["master"])
            optimizer.load_state_dict(state["optimizer"])
            self.steps_before = int(state["optimizer_steps"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ProgramFailed(
                f"{path}: the trainer cannot go on from it: {str(error).splitlines()[0]}"
            ) from None

    def train(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """All optimizer steps; gives the metrics, the same on every process."""
        totals = dict.fromkeys(("loss", "clipped", "surprise", "tokens", "grad_norm"), 0.0)
        gap_mean: float | None = None
        gap_max: float | None = None
        steps = self.batch.steps
        for number, indices in enumerate(steps):
            self.set_lr(optimizer, self.steps_before + number + 1)
            sums, gaps = self.accumulate(model, indices, measure_gap=number == 0)
            if number == 0:
                gap_mean, gap_max = self.check_gap(gaps)
            norm = self.accelerator.clip_grad_norm_(model.parameters(), self.settings.optimizer.grad_clip)
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
            "replayed": int((self.batch.current == 0).sum()),
            "logprob_gap_mean": gap_mean,
            "logprob_gap_max": gap_max,
            "lr": self.settings.optimizer.lr,
        }

    def set_lr(self, optimizer: Any, step: int) -> None:
        warmup = self.settings.optimizer.warmup_steps
        factor = min(1.0, step / warmup) if warmup else 1.0
        for group in optimizer.param_groups:
            group["lr"] = self.settings.optimizer.lr * factor

    def accumulate(
        self, model: Any, indices: Tensor, *, measure_gap: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The gradient of one minibatch's token mean, and its sums over all processes.

        Every process runs the same number of micro-batches, as DistributedDataParallel wants; one without a trajectory left
        runs its first one with weight zero. Gap sums: [sum, count, maximum] over this process's tokens.
        """
        most = self.settings.trainer.micro_batch
        mine = plan(indices.tolist(), self.lengths, self.world, most=most, most_tokens=self.most_tokens)[
            self.rank
        ]
        tokens = self.batch.sampled_tokens(indices)
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        gaps = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for number, chosen in enumerate(mine):
            whole = self.batch.micro_batch(chosen or indices[:1].tolist(), self.accelerator.device)
            micro = whole.tail()
            mask = micro.mask if chosen else torch.zeros_like(micro.mask)
            with nullcontext() if number == len(mine) - 1 else self.accelerator.no_sync(model):
                logits = self.logits(model, whole, micro)
                new = token_log_probs(logits, micro.tokens, self.temperature)
                part = self.loss(new, micro.old, micro.weights, mask)
                self.accelerator.backward(part.loss * self.world / tokens)
            sums += torch.stack([part.loss.detach(), part.clipped, part.surprise]).double()
            own = (
                mask & micro.current[:, None]
            )  # what older policies sampled says nothing of this one's engine
            if measure_gap and bool(own.any()):
                gap = (new.detach() - micro.old).abs()[own].double()
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

    def logits(self, model: Any, whole: MicroBatch, tail: MicroBatch) -> Tensor:
        """[batch, columns of `tail`, vocabulary]; the logits of prompts are not even computed where the model can leave them out."""
        columns = tail.tokens.shape[1]
        fewer = {"logits_to_keep": columns} if self.keeps_logits else {}
        output = model(input_ids=whole.tokens, attention_mask=whole.attention, use_cache=False, **fewer)
        logits: Tensor = output.logits[:, -columns:]
        return logits

    def loss(self, new: Tensor, old: Tensor, weights: Tensor, mask: Tensor) -> LossSums:
        algorithm = self.settings.algorithm
        if algorithm.loss == "rft":
            return rft_loss(new, weights, mask)
        return grpo_loss(new, old, weights, mask, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)

    def check_gap(self, gaps: Tensor) -> tuple[float | None, float | None]:
        """Does the engine serve the weights that are trained? (mean, maximum) difference of log-probabilities; None where the first
        minibatch holds nothing that this policy has sampled."""
        everyone = self.accelerator.gather(gaps[None])
        count = float(everyone[:, 1].sum())
        if not count:
            return None, None
        mean, most = float(everyone[:, 0].sum()) / count, float(everyone[:, 2].max())
        rollout = self.settings.rollout
        limit = self.settings.algorithm.max_logprob_gap or self.gap_limit()
        comparable = rollout.top_p >= 1 and rollout.top_k in (-1, 0)
        if comparable and not mean <= limit:
            raise ProgramFailed(
                f"the sampled tokens' log-probabilities differ by {mean:.4f} on average (at most {most:.3f}) between "
                f"engine and trainer, more than {limit:g} (algorithm.max_logprob_gap): the engine does not serve the "
                f"weights in {self.spec['model']}, or computes them differently"
            )
        return mean, most

    def gap_limit(self) -> float:
        """What the lower of the two precisions explains. The engine's `auto` is float32 on a CPU, else bfloat16."""
        engine = self.settings.engine.dtype
        exact = engine == "float32" or (engine == "auto" and self.accelerator.device.type == "cpu")
        return GAP_LIMIT[self.dtype if exact else torch.bfloat16]

    def write(self, model: Any, optimizer: Any) -> None:
        """The main process leaves the new policy version; the manifest last. The others wait, so that all fail together."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            out = Path(self.spec["out"])
            self.progress.show(
                len(self.batch.steps), len(self.batch.steps), "steps", last=True, note="saving"
            )
            try:
                self.save(model, optimizer, out)
            except (
                OSError,
                RuntimeError,
                SafetensorError,
            ) as error:  # of a full disk each library says its own
                raise ProgramFailed(f"{out}: cannot be saved: {str(error).splitlines()[0]}") from None
        self.accelerator.wait_for_everyone()

    def save(self, model: Any, optimizer: Any, out: Path) -> None:
        if (out / checkpoints.MANIFEST).exists():
            raise ProgramFailed(f"{out} is a complete policy version already; nothing was written")
        for leftover in ("model", "trainer"):  # of an attempt that did not get as far as its manifest
            shutil.rmtree(out / leftover, ignore_errors=True)
        serving = torch.float32 if self.dtype is torch.float32 else torch.bfloat16
        policy.save(model, Path(self.spec["model"]), out / "model", serving)
        files.make_dirs(out / "trainer")
        master = {} if serving is torch.float32 else {k: v.cpu() for k, v in model.state_dict().items()}
        state = {
            "optimizer": optimizer.optimizer.state_dict(),
            "optimizer_steps": self.steps_before + len(self.batch.steps),
            "policy_version": self.spec["new_policy_version"],
            "master": master,
        }
        torch.save(state, out / "trainer" / STATE)
        checkpoints.write_manifest(out, self.spec["new_policy_version"])


def _dtype(wanted: str, on_cpu: bool) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if not on_cpu and torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32 if wanted == "float32" else torch.bfloat16


def main(spec: dict[str, Any], settings: Settings, progress: Progress) -> dict[str, Any] | None:
    # A handler in Python would wait for the collective under way. Whatever is half written has no manifest.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = Update(spec, settings, progress).run()
    except FsbarrierError as error:
        tell_torchrun(error)
        raise
    except RuntimeError as error:
        known = explained(error)
        tell_torchrun(known)
        raise known from None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def tell_torchrun(error: Exception) -> None:
    """torchrun ends its output with a table of what failed; this puts the reason into it instead of "enable traceback"."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        files.write_atomic(
            Path(file), json.dumps({"message": {"message": str(error), "extraInfo": extra}}).encode()
        )


def explained(error: RuntimeError) -> Exception:
    """torch's error as one line that says what to do; `error` itself where it is none of those to be expected."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first:
        hint = "lower trainer.micro_batch, or engine.gpu_memory_utilization if the engine stays"
        return ProgramFailed(f"out of memory: {first}; {hint}")
    if isinstance(error, torch.distributed.DistError) or any(word in first.lower() for word in LOST):
        return ProgramFailed(f"lost contact with the trainer on another node (its log says why): {first}")
    return error


if __name__ == "__main__":
    sys.exit(run_worker(main))
