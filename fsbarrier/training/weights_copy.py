"""A node's own copy of the newest weights, so that its engines need not read the shared directory. Its trainer writes it, or it is made of
a version that is not whole.

    FOLDER/policy-000006.g0004.unchecked/model/   what the node's processes of the update write: the files of weights
    FOLDER/policy-000006.g0004/model/             the same with the small files beside, compared with the committed version's manifest
    FOLDER/first_model.json                       with adapters: the digest of the run's first model, which is read once

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
from fsbarrier.rundir.checkpoints import ADAPTER, Manifest
from fsbarrier.rundir.hashed_file import copy_hashed
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.store import files
from fsbarrier.training.materialise import materialise, size_of
from fsbarrier.training.merge_adapters import digest_of

GB = 1e9


@dataclass(frozen=True, slots=True)
class WeightsCopy:
    """The copies in `folder`, by the name of the policy version's folder in the shared directory."""

    folder: Path

    def unchecked(self, version: str) -> Path:
        return self.folder / f"{version}.unchecked" / "model"

    def checked(self, version: str) -> Path:
        return self.folder / version / "model"

    def state(self, version: str) -> Path:
        """The folder for this node's part of the trainer's state (local_state.py)."""
        return self.folder / f"{version}.state"

    def digest_of_first(self, model: Path, between_reads: Callable[[], None] = lambda: None) -> str:
        """The digest of the run's first model. Raises ProgramFailed, OSError, and what `between_reads` raises."""
        return digest_of(model, between_reads, self.folder / "first_model.json")

    def nearest(self, model: Path) -> Path:
        """The checked copy of the shared folder `model`; that folder if this node has none."""
        here = self.checked(model.parent.name)
        return here if here.is_dir() else model

    def held(self, version: str) -> Path:
        """The folder of the files of a version that are here, whether they were verified or not."""
        checked = self.checked(version)
        return checked if checked.is_dir() else self.unchecked(version)

    def begin(self, version: str, size: int, keep: str = "") -> bool:
        """Remove all copies of weights, and make a folder for the next one; False if there is no room for `size` bytes. `keep`: the version
        whose copy stays for now, if there is room for both."""
        kept = self.held(keep).parent if keep else None
        for old in self.folder.iterdir():
            if old != kept and old.is_dir() and old.suffix != ".state":
                files.discard(old)
        if kept is not None and free_bytes(self.folder) < size:
            files.discard(kept)
        if free_bytes(self.folder) < size:
            return False
        files.make_dirs(self.unchecked(version))
        return True

    def discard(self, version: str) -> None:
        files.discard(self.held(version).parent)

    def give_up(self, version: str) -> None:
        files.discard(self.unchecked(version).parent)

    def confirm(self, model: Path, between_reads: Callable[[], None], first_model: Path | None = None) -> str:
        """Complete the copy of the committed folder `model` with the files beside the weights, verify it, and rename it for use. A version
        that is not whole is made whole here, of its base and, if it has adapters, of `first_model`.

        Returns why there is no copy, or "". Raises ProgramFailed if the version itself is damaged, or there is no room for one that is not
        whole, and what `between_reads` raises.
        """
        version = model.parent.name
        copy = self.unchecked(version)
        manifest = checkpoints.check_sizes(model.parent)
        # An engine does not need the adapters, which are merged into the weights.
        without = f"{model.name}/{ADAPTER}/"
        wanted = {
            name: digest for name, digest in manifest.model_files.items() if not name.startswith(without)
        }
        weights = [name for name in wanted if name.endswith(".safetensors")]
        if not weights or not all((copy.parent / name).is_file() for name in weights):
            self.give_up(version)
            if not manifest.whole:
                self._make(model, manifest, between_reads, first_model)
                return ""
            size = sum(wanted[name].size for name in weights)
            return f"no copy of {version} is here ({self._room(size)})"
        try:
            for name in wanted.keys() & manifest.files.keys() - weights:
                files.make_dirs((copy.parent / name).parent)
                copy_hashed(model.parent / name, copy.parent / name, model.parent.parent)
            if sum(not path.is_dir() for path in copy.rglob("*")) > len(wanted):
                raise ProgramFailed(f"{copy} has files that are not in the {checkpoints.MANIFEST}")
            checkpoints.compare(copy.parent, wanted, between_reads)
            os.rename(copy.parent, self.checked(version).parent)
        except (OSError, ProgramFailed) as error:
            self.give_up(version)
            if not manifest.whole:
                self._make(model, manifest, between_reads, first_model)
                return ""
            return f"the copy of {version} is not what was published ({error})"
        return ""

    def _make(
        self, model: Path, manifest: Manifest, between_reads: Callable[[], None], first_model: Path | None
    ) -> None:
        """Make a version whole that nobody has written here."""
        version = model.parent.name
        size, near = size_of(model.parent, manifest, first_model), self._near(model.parent, manifest)
        if not self.begin(version, size, keep=near.parent.name if near else ""):
            raise ProgramFailed(
                f"{version} is not whole, and there is no room to make its weights here ({self._room(size)}); give "
                "checkpoint.weights_dir=DIR, a folder of this node with more room"
            )
        unchecked = self.unchecked(version)
        try:
            materialise(model.parent, unchecked, first_model, between_reads, near)
            if near is not None:
                files.discard(near.parent)
            os.rename(unchecked.parent, self.checked(version).parent)
        except BaseException:
            self.give_up(version)
            raise

    def _near(self, version: Path, manifest: Manifest) -> Path | None:
        """A verified copy that is here, of the anchor of this version or of another version with the same anchor."""
        for here in self.folder.iterdir() if manifest.base is not None and manifest.base.folder else ():
            if POLICY_FOLDER.parse(here.name) is None or not (here / "model").is_dir():
                continue
            try:
                base = checkpoints.read_manifest(version.parent / here.name).base
            except ProgramFailed:
                continue
            anchor = here.name if base is None else base.folder
            if manifest.base is not None and anchor == manifest.base.folder:
                return here / "model"
        return None

    def _room(self, size: int) -> str:
        return f"{size / GB:.1f} GB of weights; {free_bytes(self.folder) / GB:.1f} GB may be written to {self.folder.parent}"
