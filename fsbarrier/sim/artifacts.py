"""The results of simulated work: parts, merges, checkpoints; and the running pieces of work."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fsbarrier.errors import FsbarrierError, NodesRefused, ProgramFailed
from fsbarrier.node.job import NodeUnfit
from fsbarrier.protocol.state import Exit, Node, RowPart
from fsbarrier.sim.history import Merged

if TYPE_CHECKING:
    from fsbarrier.sim.process import Process

FOREVER = float("inf")
Waiting = Generator[float, None, dict[str, object]]


@dataclass
class PartFile:
    """A rank's growing file of durable groups. `policy`: the policy in its header; `made_by`: the policy that the engine really served."""

    generation: int
    iteration: int
    split: str
    policy: str
    made_by: str
    #: (task, when)
    groups: list[tuple[int, float]] = field(default_factory=list)


class Checkpoint(NamedTuple):
    """A policy version's folder. `digest`: that of its content, unique in the schedule."""

    version: int
    generation: int
    digest: str


@dataclass
class SimTorchrun:
    """A torchrun: it continues when all its nodes are there, and no node can finish it alone."""

    size: int
    pieces: dict[int, WorkPiece] = field(default_factory=dict)
    lost: bool = False


@dataclass
class Artifacts:
    """The files in the run directory beside the protocol's own."""

    parts: dict[str, PartFile] = field(default_factory=dict)
    merged: dict[str, Merged] = field(default_factory=dict)
    # merged files of another run, for runs that only update
    given: set[str] = field(default_factory=set)
    batches: set[str] = field(default_factory=set)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    # public name -> stamp of the merge
    public: dict[str, int] = field(default_factory=dict)
    meetings: dict[tuple[str, str], SimTorchrun] = field(default_factory=dict)
    stamps: int = 0
    ports: int = 40000

    def identity(self, folder: str) -> str:
        """The identity of the policy in a folder."""
        return f"{folder.rpartition('/')[2]}:{self.checkpoints[folder].digest}"

    def retain(self, keep: int, current: str) -> None:
        """Clean up after a publication, as rundir.retention.remove_old_versions does."""
        newest = self.checkpoints[current].version
        versions = {made.version for made in self.checkpoints.values() if made.version <= newest}
        spared = {*sorted(versions, reverse=True)[: max(keep, 2)], newest}
        for folder, made in list(self.checkpoints.items()):
            if made.version < newest and made.version not in spared:
                del self.checkpoints[folder]


@dataclass(slots=True)
class WorkPiece:
    """A running piece of work of one process. `inside`: the daemon itself does it, not a program."""

    process: Process
    node: Node
    part: RowPart
    began: float
    # the fraction of the program's time after which it fails, and its message; None: it succeeds
    fails: tuple[float, str] | None
    alive: bool = True
    inside: bool = True
    broken: str = ""
    meeting: SimTorchrun | None = None
    steps: Waiting = field(init=False)

    def advance(self) -> None:
        """Take the next step, unless the work was cancelled. While the process is stopped, the step is deferred."""
        process = self.process
        if not self.alive or not process.up:
            return
        if process.paused and (self.inside or process.frozen):
            process.deferred.append(self.advance)
            return
        try:
            if self.broken:
                raise ProgramFailed(self.broken)
            wait = next(self.steps)
        except StopIteration as stop:
            process.work.ended(self, True, stop.value)
        except NodeUnfit as error:
            self.alive = False
            process.loop.exit = Exit(error.exit_code, "left", str(error))
            process.world.finish(process)
        except FsbarrierError as error:
            value: dict[str, object] = {"error": str(error), "log": ["the program's last line"]}
            if self.broken:
                value["noticed"] = True
            if isinstance(error, NodesRefused):
                value["refused"] = True
            process.work.ended(self, False, value)
        else:
            if wait != FOREVER:
                process.world.after(wait, self.advance)
