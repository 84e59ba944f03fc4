"""What is known of one accelerator, whoever made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device as it is now. `index` is the driver's (NVIDIA: in PCI order), counted for each kind apart."""

    index: int
    kind: Kind
    name: str
    #: 0 where the driver does not say: devices that share the machine's memory
    memory_total_bytes: int
    #: by everybody
    memory_used_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device with the memory of its processes: pid -> bytes (None: the driver does not say how many); None where the driver does not
    tell by our pids. `unique_name`: by which ROCR_VISIBLE_DEVICES may name it."""

    now: Accelerator
    by_pid: Mapping[int, int | None] | None
    unique_name: str = ""
