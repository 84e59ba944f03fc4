"""Phase 10: one policy update on all nodes, started by torchrun. Batch in; Hugging Face folder and trainer state out.

`torchrun ... -m fsbarrier.workers.update --spec SPEC.json`. Every process takes its share of each minibatch
(fsbarrier/training/optimizer_step.py), and saves its part (fsbarrier/training/checkpoint_write.py).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from fsbarrier import files
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.rundir.weights_copy import WeightsCopy
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.worker_contract import Progress, run_worker
from fsbarrier.training import save_plan
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.failures import explained, tell_torchrun
from fsbarrier.training.log_prob_pass import with_old, with_reference
from fsbarrier.training.logprob_gap import EnginesDiffer
from fsbarrier.training.node_copy import NodeCopy
from fsbarrier.training.node_state import NodeState
from fsbarrier.training.optimizer_step import Sums, train
from fsbarrier.training.processes import Processes
from fsbarrier.training.resume import Held, begin, go_on
from fsbarrier.training.slices import gather
from fsbarrier.training.trainer import Trainer, update_load

NO_SIGNAL = "no group had a signal to learn from: the weights are unchanged"

# A process whose memory has grown to so many times what it was, and by so much, is ended after its update, and another formed.
GROWN, SLACK_BYTES = 1.25, 1 << 30


class UpdateSpec(TypedDict):
    """What this program reads of its spec."""

    run_id: str
    node_rank: int
    iteration: int
    #: how often this iteration failed already, the same on all nodes
    attempt: int
    batch: str
    #: the folder of the policy to be trained, and the trainer state that belongs to it; None: the optimizer begins anew
    model: str
    trainer_state: str | None
    #: the folder of policy version 0, into which adapters are put (lora.rank), and to which a run may have to go back
    first_model: str
    policy_version: int
    #: the folder of the policy that the new one is held against (algorithm.kl_coef); None: none
    reference: str | None
    #: what tells that policy from any other
    policy: str
    #: where the new policy is saved
    out: str
    new_policy_version: int
    #: the folder on this node for a copy of the new weights; None: there is none
    weights_dir: str | None
    #: where the node's result goes
    result: str


class Updates:
    """The updates of one process, one after the other. Between two of them it holds the policy and the optimizer, and the next one goes
    on with these if all processes hold exactly the policy that it is to train.
    """

    def __init__(self) -> None:
        self._held: Held | None = None
        # Of the host's memory after the first update that went on with what was held; 0: there was none yet.
        self._steady_bytes = 0
        self._grows = False

    def main(self, spec: UpdateSpec, settings: Settings, progress: Progress) -> dict[str, object] | None:
        """One update."""
        # A handler in Python would wait for the collective under way. Whatever is half written has no manifest.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return self._update(spec, settings, progress)
        except EnginesDiffer as error:
            # Each node learns which of its engines is meant, before any process ends and takes the others along.
            differing = {"differing_engines": error.engines}
            files.write_atomic(Path(spec["result"]), json.dumps(differing).encode())
            gather(None)
            tell_torchrun(error)
            raise
        except FsbarrierError as error:
            tell_torchrun(error)
            raise
        except RuntimeError as error:
            known = explained(error)
            tell_torchrun(known)
            raise known from None

    def stay(self) -> bool:
        """Whether all processes are fit for another update."""
        return not self._grows

    def _update(self, spec: UpdateSpec, settings: Settings, progress: Progress) -> dict[str, object] | None:
        """This process's part of the update; the result from one process of each node."""
        settings = smaller(settings, spec["attempt"])
        processes = Processes(settings.trainer)
        batch = TrainingBatch.load(Path(spec["batch"]))
        started = time.monotonic()
        torch.manual_seed(spec["new_policy_version"])
        node = NodeState.of(settings.checkpoint, spec["run_id"], spec["node_rank"], processes)
        place = spec["weights_dir"]
        copy = None if place is None else NodeCopy(WeightsCopy(Path(place)), node.ranks)
        model = Path(spec["model"])
        trainer_state = None if spec["trainer_state"] is None else Path(spec["trainer_state"])
        start = go_on(self._held, spec["policy"], model, trainer_state)
        went_on = start is not None
        # From here on it is another policy. If it is not the one to be trained, its memory is free for that.
        self._held = None
        start = start or begin(
            processes,
            settings,
            node,
            copy,
            model=model,
            trainer_state=trainer_state,
            policy=spec["policy"],
            policy_version=spec["policy_version"],
            first_model=Path(spec["first_model"]),
        )
        loaded = time.monotonic()
        trainer, out, version = start.trainer, Path(spec["out"]), spec["new_policy_version"]
        last = spec["iteration"] == settings.iterations
        together = settings.rl_phase == "both"
        on_node = save_plan.choose(
            *(trainer, settings.checkpoint, node, out, version), last=last, rollouts_follow=together
        )
        steps = len(batch.steps)

        def show(step: int) -> None:
            if processes.speaks_for_its_node:
                progress.show(step, steps, "steps", last=step == steps)

        # The rollouts were not made by a policy that was gone back to.
        totals = Sums()
        if not start.went_back:
            if spec["reference"]:
                reference = Path(spec["reference"])
                batch = with_reference(reference, trainer.layout, processes, batch, settings)
            batch = with_old(trainer, batch, settings)
            totals = train(trainer, batch, settings, start.model, show)
        if processes.is_main:
            progress.show(steps, steps, "steps", last=True, note="saving")
        trained = time.monotonic()
        worked_s = trainer.pace.worked_s + trained - started
        trainer.pace = replace(trainer.pace, worked_s=0.0 if on_node and on_node.follows else worked_s)
        new = trainer.save(
            out,
            model_folder=start.model,
            policy_version=version,
            on_node=on_node,
            state_in=start.state_in,
            copy=copy,
        )
        saved = time.monotonic()
        self._held = Held(trainer, new)
        self._watch_memory(went_on=went_on)
        peak = processes.peak_memory_bytes()
        if not processes.speaks_for_its_node:
            return None
        node.forget_before(version - 1)
        return {
            "out": spec["out"],
            "policy_version": spec["new_policy_version"],
            **metrics(totals, batch),
            **({"optimizer_steps": 0} if start.went_back else {}),
            "trainer_state": "shared" if on_node is None else "follows" if on_node.follows else "nodes",
            "seconds": round(time.monotonic() - started, 3),
            # With what was in memory since the update before.
            "went_on": went_on,
            "load_s": round(loaded - started, 3),
            "work_s": round(trained - loaded, 3),
            "save_s": round(saved - trained, 3),
            "max_tokens_per_micro_batch": settings.trainer.max_tokens_per_micro_batch,
            "device": str(processes.device),
            # Of one process, as fsbarrier/planning/ has it and as it was: the host's memory on a CPU.
            "memory_estimate_gb": estimated_memory_gb(start.model, settings, trainer),
            "memory_peak_gb": round(peak / 1e9, 3),
            "distributed": trainer.layout.words(processes),
            "note": start.went_back or ("" if batch.steps else NO_SIGNAL),
        }

    def _watch_memory(self, *, went_on: bool) -> None:
        gc.collect()
        here = resident_bytes()
        if went_on and not self._steady_bytes:
            self._steady_bytes = here
        grows = self._steady_bytes and here > GROWN * self._steady_bytes + SLACK_BYTES
        self._grows = any(gather(bool(grows)))


def main(spec: UpdateSpec, settings: Settings, progress: Progress) -> dict[str, object] | None:
    """One update, by a process that does no other."""
    result = Updates().main(spec, settings, progress)
    leave()
    return result


def leave() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def resident_bytes() -> int:
    """What this process takes of the host's memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def smaller(settings: Settings, attempt: int) -> Settings:
    """Each try after a failure takes half as much through the model at a time: what ran out of memory would do so again.

    The sums are the same in another order, so any other failure loses nothing but some speed.
    """
    own = settings.trainer
    halved = {
        name: max(1, value >> attempt)
        for name in ("max_tokens_per_micro_batch", "micro_batch", "max_logits_mb")
        if (value := getattr(own, name)) is not None
    }
    return replace(settings, trainer=replace(own, **halved)) if attempt else settings


def estimated_memory_gb(model_folder: Path, settings: Settings, trainer: Trainer) -> float | None:
    """What the plan has for one process; None for a model whose sizes it does not know."""
    try:
        load = update_load(model_folder, settings, trainer.processes)
    except UsageError:
        return None
    return round(replace(load, shards=trainer.layout.shards).total / 1e9, 3)


def metrics(totals: Sums, batch: TrainingBatch) -> dict[str, object]:
    """What people see of the update: means over its tokens, and over its steps."""
    tokens, steps = max(1, totals.tokens), max(1, len(batch.steps))
    return {
        "optimizer_steps": len(batch.steps),
        "loss": totals.loss / steps,
        "clip_fraction": (totals.of_tokens["clipped_low"] + totals.of_tokens["clipped_high"]) / tokens,
        **{name: value / tokens for name, value in totals.of_tokens.items()},
        "grad_norm": totals.grad_norm / steps,
        "tokens": totals.tokens,
        "trajectories": len(batch.weights),
        "replayed": int((batch.current == 0).sum()),
        "logprob_gap_mean": totals.gap.mean,
        "logprob_gap_max": totals.gap.maximum,
        "lr": totals.learning_rate,
    }


if __name__ == "__main__":
    updates = Updates()
    code = run_worker(updates.main, updates.stay)
    leave()
    sys.exit(code)
