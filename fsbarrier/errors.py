"""The error families and the exit code each of them means.

A message is one line a person can act on: what happened, on which node, in which phase, with which path, what to do next.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_INTERNAL = 1
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class FsbarrierError(Exception):
    """Base of everything that fsbarrier raises on purpose; `exit_code` is what the command ends with."""

    exit_code = EXIT_INTERNAL


class UsageError(FsbarrierError):
    """A flag, a setting, a task file or a program file is wrong; nothing was started."""

    exit_code = 2


class StoreError(FsbarrierError):
    """The shared filesystem failed (EIO, ENOSPC, a mount that went away) beyond what retrying can hide."""

    exit_code = 3


class ProgramFailed(FsbarrierError):
    """A program that a phase launched failed; the message ends with its last log lines."""

    exit_code = 4


class TooFewNodes(FsbarrierError):
    """Fewer nodes are left than the run may go on with; the message names the missing ones."""

    exit_code = 5


class Fenced(FsbarrierError):
    """A newer incarnation took this node's rank."""

    exit_code = 6
