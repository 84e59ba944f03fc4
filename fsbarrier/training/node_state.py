"""The trainer state on the nodes' local disks between two writes to the shared directory. It is lost with the node.

Only every N-th policy version has its trainer state in the shared directory (`checkpoint.trainer_every`). After the other updates each node
stores its processes' parts, in the same format, below `checkpoint.local_dir`. If a node and its part are lost, the run falls back to the
newest version whose state is in the shared directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fsbarrier import files
from fsbarrier.host.memory import free_bytes
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.settings.sections import CheckpointSettings
from fsbarrier.training.processes import Processes
from fsbarrier.training.trainer_state import Pace

# Write to the shared directory after every update if that takes less than CHEAP_S; otherwise spend at most the share WORTH of the update
# time on it.
CHEAP_S, WORTH = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class NodeState:
    """`folder`: of this run and node. `ranks`: of this node's processes; the first of them does what only one may do. `follows`: the
    nodes bring it to the shared directory behind the next rollouts (node/state_upload.py).
    """

    folder: Path
    ranks: range
    follows: bool = False

    @classmethod
    def of(cls, settings: CheckpointSettings, run_id: str, node_rank: int, processes: Processes) -> Self:
        folder = checkpoints.kept_on_node(settings.local_dir, run_id, node_rank)
        first = processes.rank - processes.local_rank
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(folder, range(first, first + here))

    def of_version(self, name: str) -> Path:
        """The local folder of a policy version, given the name of its folder in the shared directory."""
        return self.folder / name

    def has_room(self, size: int) -> bool:
        """Whether the folder is private to this user and has room for this many bytes."""
        try:
            files.make_dirs(self.folder)
            ours = self.folder.stat().st_uid == os.getuid() and not self.folder.is_symlink()
            return ours and free_bytes(self.folder) >= size
        except OSError:
            return False

    def forget_before(self, policy_version: int) -> None:
        """Remove the states of older versions, except the one from which a failed update would restart."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                made = POLICY_FOLDER.parse(path.name)
                if made is not None and made.number < policy_version:
                    shutil.rmtree(path, ignore_errors=True)


def is_due(every: int, policy_version: int, pace: Pace, *, last: bool) -> bool:
    """Whether to write this version's trainer state to the shared directory. `last`: the run ends after it."""
    if last:
        return True
    if every:
        return policy_version % every == 0
    return pace.saved_s < CHEAP_S or pace.worked_s * WORTH >= pace.saved_s
