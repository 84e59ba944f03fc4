"""The error classes and their exit codes.

A message is one line that tells the user what happened, where (node, phase, path), and what to do next.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


def first_line(error: Exception) -> str:
    """The first line of another library's error message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class FsbarrierError(Exception):
    """Base class of the errors that fsbarrier raises on purpose; the command exits with `exit_code`."""

    exit_code = EXIT_INTERNAL


class UsageError(FsbarrierError):
    """A flag, a setting, a task file or a program file is wrong; nothing was started."""

    exit_code = 2


class NodesRefused(UsageError):
    """The nodes of a run are incompatible, or lack something the run needs. A retry would fail in the same way."""


class NodeError(FsbarrierError):
    """An error about one node. `age`: seconds since its last heartbeat; None: unknown."""

    def __init__(
        self, message: str, rank: int | None = None, host: str = "", age: float | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.host, self.age = rank, host, age


class StoreError(NodeError):
    """The shared filesystem failed (EIO, ENOSPC, lost mount), and retries did not help."""

    exit_code = 3


class ProgramFailed(FsbarrierError):
    """A program that a phase launched failed; the message ends with its last log lines."""

    exit_code = 4


class TooFewNodes(FsbarrierError):
    """Fewer nodes are left than `min_nodes`; the message names the missing ones."""

    exit_code = 5


class PeerLost(NodeError):
    """A member of a group died, left or was restarted; `Group.regroup()` continues without it."""

    exit_code = 5


class OutOfStep(NodeError, RuntimeError):
    """The members of a group called different collectives; `rank` is a member whose call differs from this node's."""

    exit_code = 4


class BarrierTimeout(NodeError):
    """A member of a group did not reach the barrier in time."""

    exit_code = 5


class Fenced(NodeError):
    """A newer incarnation took this node's rank, or the other nodes continued without this node."""

    exit_code = 6
