"""Vendor-independent description of an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The current state of a device. `index`: assigned by the driver (NVIDIA: in PCI order), separately for each kind."""

    index: int
    kind: Kind
    name: str
    #: 0 if unknown, for devices that share the machine's memory
    memory_total_bytes: int
    #: by all processes
    memory_used_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its memory use by process: pid -> bytes (None: amount unknown); None if the driver does not report it with our pids."""

    now: Accelerator
    by_pid: Mapping[int, int | None] | None
