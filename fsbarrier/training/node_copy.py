"""This node's local copy of the new weights for its engines; each process of the update writes some of the files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fsbarrier.training import safetensors_file
from fsbarrier.training.weights_copy import WeightsCopy


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """`ranks`: the ranks of this node's processes; the first one does the work that only one process may do."""

    place: WeightsCopy
    ranks: range

    def writer(self, number: int, owner: int) -> int:
        """The process of this node that copies file `number`: `owner`, which writes it to the shared directory, if it is on this node."""
        return owner if owner in self.ranks else self.ranks[number % len(self.ranks)]

    def write(self, version: str, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one file of the copy. A failure only means that there is no copy; the update continues."""
        path = self.place.unchecked(version) / file
        try:
            safetensors_file.write_unhashed(path, tensors)
        except OSError as error:
            print(f"{path}: {error.strerror or error}: no copy of the weights on this node", file=sys.stderr)
            self.place.give_up(version)
