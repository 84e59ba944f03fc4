"""Trajectory files: `ShardWriter` writes the growing file of one rank; growing, finished and merged ones are read here.

`torch.load(path, weights_only=True)` opens finished and merged files as `{"trajectories": [...], "metadata": {...}}`; the
functions here need no torch, and read files that are still growing too. All of it is in fsbarrier/data.
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
