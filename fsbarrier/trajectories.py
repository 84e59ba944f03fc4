"""Public API for trajectory files: `RankFileWriter` writes a rank's growing file; the readers accept ranks' files and merged ones.

`torch.load(path, weights_only=True)` opens merged files as `{"trajectories": [...], "metadata": {...}}`. The functions here need torch
only for merged files. The implementation is in fsbarrier/data.
"""

from fsbarrier.data.rank_file import FormatError, GroupEntry, NotOurs, RankFile, scan_rank_file
from fsbarrier.data.rank_file_writer import RankFileWriter
from fsbarrier.data.reader import iter_trajectories, load
from fsbarrier.data.trajectory import Trajectory

__all__ = [
    "FormatError",
    "GroupEntry",
    "NotOurs",
    "RankFile",
    "RankFileWriter",
    "Trajectory",
    "iter_trajectories",
    "load",
    "scan_rank_file",
]
