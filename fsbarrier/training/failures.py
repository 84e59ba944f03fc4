"""Turns torch's errors during an update into actionable messages, and passes the reason to torchrun."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from fsbarrier.errors import ProgramFailed
from fsbarrier.store import files

# Parts of error messages about a lost peer.
PEER_GONE = ("gloo", "connection closed", "connection reset", "connect()", "broken pipe", "timed out")


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
