"""The processes of one update, which torchrun has started: this one's place among them, its device and its precision.

Gradients are averaged by DistributedDataParallel (through accelerate), over gloo on CPUs and NCCL on accelerators. Every process holds
the whole model. Another way to distribute it begins here, and in what trainer.py gathers before it saves.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from fsbarrier.errors import ProgramFailed
from fsbarrier.host.network_interface import name_interface
from fsbarrier.settings.sections import TrainerSettings

# accelerate's names of what this trainer does. Its environment variables can ask for sharding too; that would be half in effect,
# for nothing here gathers parameters and optimizer state.
DATA_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU")


class Processes:
    """All processes of the update, as one of them sees them. Made once a process: it joins the process group."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Raises ProgramFailed where torchrun and accelerate do not mean the same processes."""
        on_cpu = not torch.cuda.is_available()
        self.dtype = _dtype(settings.dtype, on_cpu)
        name_interface(os.environ)
        self.accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="bf16" if self.dtype is torch.bfloat16 else "no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=settings.timeout_s))],
        )
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        # To train alone without saying so would look like success.
        if self.world != expected:
            raise ProgramFailed(f"accelerate sees {self.world} processes where torchrun started {expected}")
        if self.kind not in DATA_PARALLEL:
            raise ProgramFailed(
                f"accelerate is told to use {self.kind} (its ACCELERATE_* environment variables), which this trainer does not "
                "support: unset them, or bring a trainer of your own (trainer.command)"
            )

    @property
    def kind(self) -> str:
        """How they are distributed, in accelerate's words."""
        return str(self.accelerator.distributed_type.value)

    @property
    def speaks_for_its_node(self) -> bool:
        """Whether this is the one process of its node that shows progress and leaves a result."""
        return int(os.environ.get("LOCAL_RANK", "0")) == 0

    @property
    def serving_dtype(self) -> torch.dtype:
        """The precision in which weights are written for the engine."""
        return torch.float32 if self.dtype is torch.float32 else torch.bfloat16


def _dtype(wanted: str, on_cpu: bool) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if not on_cpu and torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32 if wanted == "float32" else torch.bfloat16
