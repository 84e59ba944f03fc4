"""Public API for trajectory files: `ShardWriter` writes a rank's growing file; the readers accept growing, finished and merged files.

`torch.load(path, weights_only=True)` opens finished and merged files as `{"trajectories": [...], "metadata": {...}}`. The functions here do
not need torch. In their names a *shard* is the trajectory file of one rank; it has nothing to do with `trainer.shard`, which splits the
policy over processes. The implementation is in fsbarrier/data.
"""

from fsbarrier.data.torch_pickle import FormatError
from fsbarrier.data.torch_unpickle import ForeignObject
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.data.trajectory_reader import iter_trajectories, load
from fsbarrier.data.trajectory_scan import GroupEntry, NotOurs, ShardScan, scan_shard
from fsbarrier.data.trajectory_writer import ShardInfo, ShardWriter

__all__ = [
    "ForeignObject",
    "FormatError",
    "GroupEntry",
    "NotOurs",
    "ShardInfo",
    "ShardScan",
    "ShardWriter",
    "Trajectory",
    "iter_trajectories",
    "load",
    "scan_shard",
]
