"""Publishes a version as a delta against an earlier whole one, its anchor.

There is no chain: each delta changes the anchor itself. Nobody keeps the anchor for that. A node's copy of the version before, with that
version's own delta undone, is the anchor, as its digest in the manifest proves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.checkpoints import Base, Manifest
from fsbarrier.rundir.hashed_file import FileDigest
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.store import files
from fsbarrier.training.materialise import DELTA, delta_of
from fsbarrier.training.weight_delta import Encoded, Source, encode
from fsbarrier.training.weights_copy import WeightsCopy


@dataclass(frozen=True, slots=True)
class Against:
    """The version `before` the new one, of which this node has a copy, and its `anchor`, which is that version itself if it is whole.
    `manifest`: the anchor's. Paths are in the shared directory."""

    before: Path
    anchor: Path
    manifest: Manifest

    @classmethod
    def of(cls, before: Path, new_version: int, generation: int, whole_every: int) -> Self | None:
        """The anchor of the version that follows `before`; None if that is to be whole: it is the `whole_every`-th after the last whole
        one, it is the first of its generation, or there is no anchor with all of its files."""
        made = POLICY_FOLDER.parse(before.name)
        if made is None or made.generation != generation:
            # A node may have ended because it found the anchor damaged. Those that are new now have no copies either.
            return None
        with contextlib.suppress(ProgramFailed):
            base = checkpoints.read_manifest(before).base
            anchor = before if base is None else before.parent / base.folder
            manifest = checkpoints.check_sizes(anchor)
            if manifest.whole and new_version - manifest.policy_version < whole_every:
                return cls(before, anchor, manifest)
        return None

    def write(self, place: WeightsCopy, out: Path, file: str, most: int | None = None) -> Encoded | None:
        """Write the delta of one file of weights, whose new content is in this node's copy. None if it is to be published whole: the delta
        has more than `most` bytes (None: half of the file's), or this node has no copy of the version before. Raises OSError."""
        old, new = place.held(self.before.name) / file, place.unchecked(out.name) / file
        listed = self.manifest.files.get(f"model/{file}")
        if listed is None or not (old.is_file() and new.is_file()):
            return None
        undo = None if self.before == self.anchor else delta_of(self.before, file)
        target = delta_of(out, file)
        files.make_dirs(target.parent)
        try:
            made = encode(Source(old, undo=undo), new, target, listed.size // 2 if most is None else most)
        except (ProgramFailed, FileNotFoundError) as error:
            print(f"{file} is published whole: {error}", file=sys.stderr)
            return None
        if made is not None and made.anchor != listed.sha256:
            print(
                f"{file} is published whole: {old} is not what {self.before.name} was published with",
                file=sys.stderr,
            )
            return None
        return made

    def base(self, made: Mapping[str, FileDigest]) -> Base:
        """The entry of the new version's manifest about its weights. `made`: the files that anchor and delta make."""
        return Base(self.anchor.name, self.manifest.digest, made)


def is_worth_it(written: Mapping[str, FileDigest], made: Mapping[str, FileDigest]) -> bool:
    """Whether to publish a version as a delta: each of its files of weights has one, and together they have at most half of the bytes."""
    moved = sum(file.size for name, file in written.items() if name.startswith(f"{DELTA}/"))
    return not any(map(checkpoints.is_weights, written)) and 2 * moved <= sum(
        file.size for file in made.values()
    )
