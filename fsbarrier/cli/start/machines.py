"""The machines to plan for. Values that the user does not give are taken from this machine."""

from __future__ import annotations

import os

from fsbarrier.errors import UsageError
from fsbarrier.host import accelerators as devices
from fsbarrier.planning.cluster_plan import Cluster
from fsbarrier.settings.sections import Settings

GB = 10**9


def planned(
    settings: Settings, *, accelerators: int | None = None, memory_gb: float | None = None
) -> Cluster:
    """`settings.num_nodes` nodes with the given resources, or those of this machine. Raises UsageError."""
    if memory_gb is not None and not 0 < memory_gb < 1e9:
        raise UsageError(f"--accelerator-memory-gb {memory_gb:g}: must be greater than 0, in GB")
    here = devices.detect()
    count = len(here) if accelerators is None else accelerators
    if memory_gb is not None:
        memory = int(memory_gb * GB)
    elif not count:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        memory = min((device.memory_total_bytes for device in here), default=0)
    if memory <= 0:
        raise UsageError(
            "--accelerator-memory-gb is missing: this machine has no accelerator that reports its memory"
        )
    return Cluster(settings.num_nodes, count, memory)
