"""Public API for trajectory files: `ShardWriter` writes a rank's growing file; the readers accept growing, finished and merged files.

`torch.load(path, weights_only=True)` opens finished and merged files as `{"trajectories": [...], "metadata": {...}}`. The functions here do
not need torch. The implementation is in fsbarrier/data.
"""

from fsbarrier.data.shardreader import iter_trajectories, load
from fsbarrier.data.shardscan import GroupEntry, NotOurs, ShardScan, scan_shard
from fsbarrier.data.shardwriter import ShardInfo, ShardWriter
from fsbarrier.data.torchpickle import FormatError
from fsbarrier.data.torchunpickle import ForeignObject
from fsbarrier.data.trajectory import Trajectory

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
