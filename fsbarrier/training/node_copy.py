"""This node's copy of the new weights, as its processes of the update write it: each a part of the files, for its own engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fsbarrier.rundir.weights_copy import WeightsCopy
from fsbarrier.training import safetensors_file


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """`ranks`: of this node's processes; the first of them does what only one may do."""

    place: WeightsCopy
    ranks: range

    def writer(self, number: int, owner: int) -> int:
        """Which of this node's processes copies file `number`, which `owner` writes to the shared directory: the same, if it is here."""
        return owner if owner in self.ranks else self.ranks[number % len(self.ranks)]

    def write(self, version: str, file: str, tensors: Mapping[str, Tensor]) -> None:
        """One file of the copy. Where that fails there is no copy, and the update goes on."""
        path = self.place.unchecked(version) / file
        try:
            safetensors_file.write_unhashed(path, tensors)
        except OSError as error:
            print(f"{path}: {error.strerror or error}: no copy of the weights on this node", file=sys.stderr)
            self.place.give_up(version)
