"""The error families and the exit code each of them means.

A message is one line a person can act on: what happened, on which node, in which phase, with which path, what to do next.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


def first_line(error: Exception) -> str:
    """What another library's error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class FsbarrierError(Exception):
    """Base of everything that fsbarrier raises on purpose; `exit_code` is what the command ends with."""

    exit_code = EXIT_INTERNAL


class UsageError(FsbarrierError):
    """A flag, a setting, a task file or a program file is wrong; nothing was started."""

    exit_code = 2


class NodesRefused(UsageError):
    """The nodes of a run do not fit together, or lack what it needs; to try again changes nothing."""


class NodeError(FsbarrierError):
    """An error about one node: its `rank` and `host`, and `age`, the seconds for which nothing was heard of it; None: not known."""

    def __init__(
        self, message: str, rank: int | None = None, host: str = "", age: float | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.host, self.age = rank, host, age


class StoreError(NodeError):
    """The shared filesystem failed (EIO, ENOSPC, a mount that went away) beyond what retrying can hide."""

    exit_code = 3


class ProgramFailed(FsbarrierError):
    """A program that a phase launched failed; the message ends with its last log lines."""

    exit_code = 4


class TooFewNodes(FsbarrierError):
    """Fewer nodes are left than the run may go on with; the message names the missing ones."""

    exit_code = 5


class PeerLost(NodeError):
    """A member of a group is dead, left, or was started anew; `Group.regroup()` goes on without it."""

    exit_code = 5


class OutOfStep(NodeError, RuntimeError):
    """The members of a group called different collectives; `rank` is a member that called another one than this node."""

    exit_code = 4


class BarrierTimeout(NodeError):
    """A member of a group did not come in time."""

    exit_code = 5


class Fenced(NodeError):
    """A newer incarnation took this node's rank, or the others went on without this node."""

    exit_code = 6
