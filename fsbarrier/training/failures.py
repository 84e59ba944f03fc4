"""Failures of an update that torch reports, in words that say what to do; and how torchrun learns the reason."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from fsbarrier import files
from fsbarrier.errors import ProgramFailed

# What the collectives' libraries say when a peer is gone.
PEER_GONE = ("gloo", "connection closed", "connection reset", "connect()", "broken pipe", "timed out")


def explained(error: RuntimeError) -> Exception:
    """torch's error as one line that says what to do; `error` itself where it is none of those to be expected."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first:
        hint = (
            "another try halves what a micro-batch takes; lower trainer.max_tokens_per_micro_batch, or "
            "engine.gpu_memory_utilization if the engine stays"
        )
        return ProgramFailed(f"out of memory: {first}; {hint}")
    if isinstance(error, torch.distributed.DistError) or any(word in first.lower() for word in PEER_GONE):
        return ProgramFailed(f"lost contact with the trainer on another node (its log says why): {first}")
    return error


def tell_torchrun(error: Exception) -> None:
    """torchrun ends its output with a table of what failed; this puts the reason into it instead of "enable traceback"."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        message = {"message": {"message": str(error), "extraInfo": extra}}
        files.write_atomic(Path(file), json.dumps(message).encode())
