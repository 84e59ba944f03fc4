"""Phase 10: one policy update on all nodes, started by torchrun. Reads a batch; writes a Hugging Face folder and the trainer state.

`torchrun ... -m fsbarrier.workers.update --spec SPEC.json`. Every process trains on its share of each minibatch
(fsbarrier/training/optimizer_step.py) and saves its part (fsbarrier/training/checkpoint_write.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from fsbarrier.errors import FsbarrierError, ProgramFailed
from fsbarrier.processes.kept_program import JOBS
from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import UpdateReport, UpdateSpec
from fsbarrier.store import files
from fsbarrier.training.advantages import (
    adapted,
    teacher_log_ratio,
    with_distillation,
    with_self_certainty,
    with_token_weights,
)
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.checkpoint_write import NodeCopy
from fsbarrier.training.critic import train_critic, with_values
from fsbarrier.training.delta_write import Against
from fsbarrier.training.engine_check import known_logprobs
from fsbarrier.training.local_state import LocalState
from fsbarrier.training.log_prob_pass import held_out_loss, with_old, with_reference
from fsbarrier.training.optimizer_step import Sums, train
from fsbarrier.training.processes import Processes, gather_json
from fsbarrier.training.resume import Beginning, KeptTrainer, load_start, local_state, reuse_kept
from fsbarrier.training.trainer import Trainer
from fsbarrier.training.vision_inputs import VisionInputs
from fsbarrier.training.weights_copy import WeightsCopy

NO_SIGNAL = "no group had a training signal, so the weights are unchanged"
WARM_UP = "the critic alone was trained (critic.warmup)"
# Where the trainer's state is after an update (also "on the nodes").
SAVED, IN_MEMORY = "saved", "in memory"
# Parts of error messages about a lost peer.
PEER_GONE = ("gloo", "connection closed", "connection reset", "connect()", "broken pipe", "timed out")


class Updates:
    """Does the updates of one process, one after the other. Between two updates it keeps the policy and the optimizer, and the next update
    reuses them if every process holds exactly the policy to train, made with the same settings.
    """

    def __init__(self) -> None:
        self._held: KeptTrainer | None = None
        self._fit = True

    def main(self, spec: UpdateSpec, settings: Settings, progress: ProgressWriter) -> UpdateReport | None:
        """Do one update, and tell torchrun why if it fails."""
        # A Python handler would not run until the current collective returns. Partial output has no manifest, so it is ignored.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return self._update(spec, settings, progress)
        except FsbarrierError as error:
            tell_torchrun(error)
            raise
        except RuntimeError as error:
            known = explained(error)
            tell_torchrun(known)
            raise known from None

    def stay(self) -> bool:
        """Whether all processes can take another update."""
        return self._fit

    def _update(self, spec: UpdateSpec, settings: Settings, progress: ProgressWriter) -> UpdateReport | None:
        """Do this process's part of the update; one process per node returns the result."""
        update = Update.of(spec, shrink_micro_batch(settings, spec.identity.attempt))
        start = reuse_kept(self._held, spec, update.settings)
        went_on = start is not None
        # The held policy is about to change. If it is not the one to train, its memory can be reused.
        self._held = None
        start = start or load_start(update.processes, update.settings, update.copy, spec)
        loaded = time.monotonic()
        with update.profiled():
            totals = update.train(start, progress)
        known = known_logprobs(start.trainer, update.batch, update.settings)
        trained = time.monotonic()
        self._fit = all(gather_json(start.trainer.leaves_room(update.settings)))
        against, alone = update.anchor(), update.publishes_adapters(start)
        keeps = JOBS in os.environ and self._fit
        goes_to = update.state_goes_to(start, against, kept=keeps)
        new = update.save(start, known, against, alone=alone, with_state=goes_to is SAVED)
        if isinstance(goes_to, LocalState):
            goes_to.keep(spec.out.name, new, spec.new_policy_version, start.trainer.state())
        peak = update.processes.peak_memory_bytes()
        self._held = KeptTrainer(start.trainer, new, update.settings, start.base)
        if not update.processes.speaks_for_its_node:
            return None
        return replace(
            update.report(start, totals),
            trainer_state="on the nodes" if isinstance(goes_to, LocalState) else goes_to,
            seconds=round(time.monotonic() - update.started, 3),
            went_on=went_on,
            load_s=round(loaded - update.started, 3),
            work_s=round(trained - loaded, 3),
            save_s=round(time.monotonic() - trained, 3),
            memory_peak_gb=round(peak / 1e9, 3),
        )


@dataclass(frozen=True, slots=True)
class Update:
    """One update on this process: `train`, then `save`."""

    spec: UpdateSpec
    settings: Settings
    processes: Processes
    batch: TrainingBatch
    #: this node's copy of the new weights; None: no copy
    copy: NodeCopy | None
    started: float

    @classmethod
    def of(cls, spec: UpdateSpec, settings: Settings) -> Self:
        """Form the process group, and read the batch."""
        processes = Processes(settings.trainer)
        batch = read_batch(spec, settings, processes)
        started = time.monotonic()
        torch.manual_seed(spec.new_policy_version)
        copy = None
        if spec.weights_dir is not None:
            copy = NodeCopy(WeightsCopy(spec.weights_dir), processes.on_this_node)
        return cls(spec, settings, processes, batch, copy, started)

    @property
    def warms_up(self) -> bool:
        """Whether only the critic is trained."""
        with_critic = self.settings.algorithm.has_critic
        return with_critic and self.spec.new_policy_version <= self.settings.critic.warmup

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the policy and the critic together."""
        return len(self.batch.steps) * (1 + (self.settings.algorithm.has_critic and not self.warms_up))

    def train(self, start: Beginning, progress: ProgressWriter) -> Sums:
        """Do the optimizer steps of the batches to train again, then those of this batch. After a fallback to an older policy there are no
        steps, because it did not sample these rollouts."""
        first = self.spec.new_policy_version - len(start.again)
        for version, name in enumerate(start.again, first):
            self._repeated(version, name)._train(start, progress)
        totals = self._train(start, progress)
        if self.processes.is_main:
            progress.show(self.steps, self.steps, "steps", last=True, note="saving")
        return totals

    def _repeated(self, version: int, batch: str) -> Update:
        """The update that made this version from this batch, to be repeated because the processes that had done it are lost."""
        spec = replace(self.spec, batch=self.spec.batch.with_name(batch), new_policy_version=version)
        return replace(self, spec=spec, batch=read_batch(spec, self.settings, self.processes))

    def _train(self, start: Beginning, progress: ProgressWriter) -> Sums:
        processes, totals = self.processes, Sums()
        torch.manual_seed(self.spec.new_policy_version)

        def show(step: int) -> None:
            if processes.speaks_for_its_node:
                progress.show(step, self.steps, "steps", last=step == self.steps)

        if not start.went_back:
            batch, trainer = self.batch, start.trainer
            if start.again:
                # The policy trained again equals the one that sampled only if settings, processes and rounding are the same.
                batch = replace(batch, current=torch.zeros_like(batch.current))
            if self.spec.reference is not None:
                batch = with_reference(self.spec.reference, trainer.layout, processes, batch, self.settings)
            batch = with_self_certainty(with_old(trainer, batch, self.settings), self.settings.algorithm)
            totals = self._learn(trainer, batch, start.model, show)
            if batch.certainty is not None:
                totals.more["self_certainty"] = float(batch.certainty[batch.loss_mask.bool()].mean())
            if batch.teacher is not None:
                apart = teacher_log_ratio(batch, batch.teacher)[batch.loss_mask.bool()]
                totals.more["teacher_kl"] = -float(apart.mean())
            if (held_out := held_out_loss(trainer, batch, self.settings)) is not None:
                totals.more["held_out_loss"] = held_out
        return totals

    def _learn(
        self, trainer: Trainer, batch: TrainingBatch, model: Path, show: Callable[[int], None]
    ) -> Sums:
        """Train the policy, and the critic if there is one; during `critic.warmup` the critic alone."""
        algorithm, kl_coef, critic = self.settings.algorithm, trainer.kl_in_reward, trainer.critic
        if critic is not None:
            batch = with_values(critic, batch, self.settings)
        batch, kl = with_token_weights(batch, algorithm, kl_coef)
        batch = with_distillation(batch, algorithm)
        totals = Sums()
        if not self.warms_up:
            totals = train(trainer, batch, self.settings, model, show)
        if critic is not None:
            totals.more |= train_critic(critic, batch, self.settings, lambda done: show(totals.steps + done))
        if kl is not None:
            trajectories = int((batch.continues == 0).sum())
            trainer.kl_in_reward = adapted(kl_coef, kl, trajectories, algorithm)
            totals.more |= {"reward_kl": kl, "reward_kl_coef": kl_coef}
        return totals

    def profiled(self) -> AbstractContextManager[None]:
        """The profiler, if this process of this update is to be profiled."""
        trainer, iteration, rank = self.settings.trainer, self.spec.identity.iteration, self.processes.rank
        if (trainer.profile, trainer.profile_rank) != (iteration, rank):
            return nullcontext()
        identity = self.spec.identity
        folder = RunPaths(identity.log_path).node_logs(identity.incarnation, identity.node_rank)
        return profiled(folder, f"profile.iteration{iteration}.rank{rank}")

    @property
    def ends_a_session(self) -> bool:
        """Whether this is the last update of the session, as far as that is known."""
        return self.spec.identity.iteration == self.settings.iterations

    def publishes_adapters(self, start: Beginning) -> bool:
        """Whether the version consists of its adapters alone, since each node has a place where it merges them, or serves them as they are.
        Every process must call this."""
        can_use_it = self.settings.lora.serve == "adapter" or self.spec.weights_dir is not None
        everywhere = all(gather_json(can_use_it))
        return everywhere and start.base is not None and not self.ends_a_session

    def anchor(self) -> Against | None:
        """The version that this one may be a delta of; None if it is published whole. Weights in float32 change nearly everywhere. Every
        process must call this."""
        spec, identity, known = self.spec, self.spec.identity, None
        moves_little = self.processes.serving_dtype is not torch.float32 and not self.settings.lora.rank
        # After a failed attempt the anchor may be what is damaged.
        may_be_delta = moves_little and not self.ends_a_session and not identity.attempt
        if may_be_delta and self.copy is not None and spec.trainer_state is not None:
            every = self.settings.checkpoint.whole_every
            before = spec.trainer_state.parent
            known = Against.of(before, spec.new_policy_version, identity.generation, every)
        return known if all(gather_json(known is not None)) else None

    def state_goes_to(self, start: Beginning, against: Against | None, *, kept: bool) -> str | LocalState:
        """Where the trainer's state is after this update: SAVED with the version, IN_MEMORY of these processes (`kept`), or on the nodes.
        Every process must call this.

        If it is saved less often than with each version, what is lost with a node is trained again from the stored batches.
        """
        every, whole_every = self.settings.checkpoint.trainer_every, self.settings.checkpoint.whole_every
        # By default with each version that is planned to be whole, and with adapters, whose state is small. Later batches are not kept.
        planned = against is None or len(start.trained_since) + 1 >= whole_every
        due = planned if every is None else not self.spec.new_policy_version % every
        # If processes were lost before this update, losing them again shall repeat no more than this time.
        if due or self.ends_a_session or start.note:
            return SAVED
        if kept:
            return IN_MEMORY
        place = local_state(self.processes, self.settings, self.copy)
        return place if place is not None and place.has_room(start.trainer.state()) else SAVED

    def save(
        self,
        start: Beginning,
        known: KnownLogprobs | None,
        against: Against | None,
        *,
        alone: bool,
        with_state: bool,
    ) -> str:
        """Save this process's part of the new version; returns the new policy's identity. `alone`: adapters without merged weights."""
        return start.trainer.save(
            self.spec.out,
            model_folder=start.model,
            policy_version=self.spec.new_policy_version,
            state_in="" if with_state else start.state_in,
            trained_since=() if with_state else (*start.trained_since, self.spec.batch.name),
            # Engines that serve adapters need no copy of merged weights.
            copy=None if self.settings.lora.serve == "adapter" else self.copy,
            known=known,
            base=start.base,
            whole=not alone,
            against=against,
        )

    @property
    def note(self) -> str:
        """Why the weights are unchanged; "" if they changed."""
        return NO_SIGNAL if not self.batch.steps else WARM_UP if self.warms_up else ""

    def report(self, start: Beginning, totals: Sums) -> UpdateReport:
        """The node's metrics of the update, except timings."""
        trainer = start.trainer
        return UpdateReport(
            policy_version=self.spec.new_policy_version,
            metrics=metrics(totals, self.batch),
            max_tokens_per_micro_batch=self.settings.trainer.max_tokens_per_micro_batch,
            device=str(self.processes.device),
            distributed=trainer.layout.described(self.processes),
            note=start.note or self.note,
        )


def read_batch(spec: UpdateSpec, settings: Settings, processes: Processes) -> TrainingBatch:
    # A vision encoder that is trained and sharded must run on every process, even without images. (Unsharded, missing gradients become
    # zeros, so that the all-reduce does not hang.)
    vision = VisionInputs.of(spec.model, always=settings.trainer.freeze == "none" and processes.world > 1)
    return TrainingBatch.load(spec.batch).with_vision(vision)


@contextmanager
def profiled(into: Path, name: str) -> Iterator[None]:
    """Run torch's profiler, and on an accelerator record the history of its memory; write `name`.json.gz, and `name`.pickle."""
    memory = torch.cuda.is_available()
    if memory:
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profiler:
        yield
    files.make_dirs(into)
    profiler.export_chrome_trace(str(into / f"{name}.json.gz"))
    if memory:
        torch.cuda.memory._dump_snapshot(str(into / f"{name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


def explained(error: RuntimeError) -> Exception:
    """torch's error as a one-line message with advice; `error` itself if it is not a known kind."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first:
        hint = (
            "a retry quarters the micro-batch; otherwise lower trainer.max_tokens_per_micro_batch, or "
            "engine.gpu_memory_utilization if the engine keeps its memory"
        )
        return ProgramFailed(f"out of memory: {first}; {hint}")
    if isinstance(error, torch.distributed.DistError) or any(word in first.lower() for word in PEER_GONE):
        return ProgramFailed(f"lost contact with the trainer on another node (see its log): {first}")
    return error


def tell_torchrun(error: Exception) -> None:
    """Put the reason into the table of failures that torchrun prints at the end, instead of "enable traceback"."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        message = {"message": {"message": str(error), "extraInfo": extra}}
        files.write_atomic(Path(file), json.dumps(message).encode())


def leave() -> None:
    """Destroy the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shrink_micro_batch(settings: Settings, attempt: int) -> Settings:
    """Quarter the micro-batch size with each retry, in case the failure was an out-of-memory error.

    The results only differ in the order of additions, so after any other failure this only costs some speed.
    """
    less = max(1, settings.trainer.max_tokens_per_micro_batch >> (2 * attempt))
    return replace(settings, trainer=replace(settings.trainer, max_tokens_per_micro_batch=less))


def metrics(totals: Sums, batch: TrainingBatch) -> dict[str, float | int | None]:
    """The displayed metrics of the update: means over tokens and over steps."""
    tokens, steps = max(1, totals.tokens), max(1, totals.steps)
    return {
        "optimizer_steps": totals.steps,
        "loss": totals.loss / steps,
        "clip_fraction": (totals.of_tokens["clipped_low"] + totals.of_tokens["clipped_high"]) / tokens,
        **{name: value / tokens for name, value in totals.of_tokens.items()},
        "grad_norm": totals.grad_norm / steps,
        "tokens": totals.tokens,
        "trajectories": len(batch.weights) - len(batch.held_out()),
        **totals.more,
        "replayed": int((batch.current == 0).sum()),
        "logprob_gap_mean": totals.gap.mean,
        "logprob_gap_max": totals.gap.maximum,
        "lr": totals.learning_rate,
    }


if __name__ == "__main__":
    updates = Updates()
    code = run_worker(UpdateSpec.program(updates.main), updates.stay)
    leave()
    # A PyTorch thread may still release a tensor now, and needs the interpreter's lock for it. If it asks for the lock while Python
    # finalizes, the process is aborted (SIGABRT), and an update that had done all its work would count as failed.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
