"""Torch's profiler over the steps of one update, and on an accelerator the history of its memory (`trainer.profile`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fsbarrier.store import files


@contextmanager
def profiled(into: Path, name: str) -> Iterator[None]:
    """Write what happens meanwhile in this process to `name`.json.gz, and `name`.pickle on an accelerator."""
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
