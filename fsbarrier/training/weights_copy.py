"""A node's own copy of the newest weights, which its trainer writes, so that its engines need not read the shared directory.

    FOLDER/policy-000006.g0004.unchecked/model/   what the node's processes of the update write: the files of weights
    FOLDER/policy-000006.g0004/model/             the same with the small files beside, compared with the committed version's manifest

The folder exists as long as the node's daemon, which makes it. Engines never read a copy whose name ends in `.unchecked`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.limits import free_bytes
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import copy_hashed
from fsbarrier.store import files

GB = 1e9


@dataclass(frozen=True, slots=True)
class WeightsCopy:
    """The copies in `folder`, by the name of the policy version's folder in the shared directory."""

    folder: Path

    def unchecked(self, version: str) -> Path:
        return self.folder / f"{version}.unchecked" / "model"

    def checked(self, version: str) -> Path:
        return self.folder / version / "model"

    def nearest(self, model: Path) -> Path:
        """The checked copy of the shared folder `model`; that folder if this node has none."""
        here = self.checked(model.parent.name)
        return here if here.is_dir() else model

    def begin(self, version: str, size: int) -> bool:
        """Remove all copies, and make a folder for the next one; False if there is no room for `size` bytes."""
        for old in self.folder.iterdir():
            files.discard(old)
        if free_bytes(self.folder) < size:
            return False
        files.make_dirs(self.unchecked(version))
        return True

    def give_up(self, version: str) -> None:
        files.discard(self.unchecked(version).parent)

    def confirm(self, model: Path, between_reads: Callable[[], None]) -> str:
        """Complete the copy of the committed folder `model` with the files beside the weights, verify it, and rename it for use.

        Returns why there is no copy, or "". Raises ProgramFailed if the version itself is damaged, and what `between_reads` raises.
        """
        version = model.parent.name
        copy = self.unchecked(version)
        manifest = checkpoints.check_sizes(model.parent)
        # An engine does not need the adapters, which are merged into the weights.
        prefix, adapter_prefix = f"{model.name}/", f"{model.name}/adapter/"
        listed = manifest.files.items()
        wanted = {
            name: file
            for name, file in listed
            if name.startswith(prefix) and not name.startswith(adapter_prefix)
        }
        weights = [name for name in wanted if name.endswith(".safetensors")]
        if not weights or not all((copy.parent / name).is_file() for name in weights):
            size = sum(wanted[name].size for name in weights)
            self.give_up(version)
            return (
                f"no copy of {version} is here ({size / GB:.1f} GB of weights; {free_bytes(self.folder) / GB:.1f} GB may be written to "
                f"{self.folder.parent})"
            )
        try:
            for name in wanted.keys() - weights:
                files.make_dirs((copy.parent / name).parent)
                copy_hashed(model.parent / name, copy.parent / name, model.parent.parent)
            if sum(not path.is_dir() for path in copy.rglob("*")) > len(wanted):
                raise ProgramFailed(f"{copy} has files that are not in the {checkpoints.MANIFEST}")
            checkpoints.compare(copy.parent, wanted, between_reads)
            os.rename(copy.parent, self.checked(version).parent)
        except (OSError, ProgramFailed) as error:
            self.give_up(version)
            return f"the copy of {version} is not what was published ({error})"
        return ""
