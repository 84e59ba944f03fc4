"""The run directory beside the protocol's own files: merged files, batches and checkpoints as small real files, on which the node's own
code works; and parts of rollouts in a table, since mounts may hide their ends.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files
from fsbarrier.training.delta_write import Against
from fsbarrier.training.weights_copy import WeightsCopy

_BASE = Path("/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir())
_PROCESS, _NUMBERS = f"fsbarrier-sim-{secrets.token_hex(8)}", count()
#: a delta of a simulated file is larger than the file
MOST = 1 << 10
#: the file of a model's weights
WEIGHTS = "model.safetensors"


@dataclass
class PartFile:
    """A rank's growing file of durable groups. `policy`: the policy in its header."""

    generation: int
    iteration: int
    split: str
    policy: str
    #: (task, when, the policy that the engine really served)
    groups: list[tuple[int, float, str]] = field(default_factory=list)


@dataclass
class SimTorchrun:
    """A torchrun's job: it continues when all its nodes are there, and no node can finish it alone."""

    size: int
    programs: dict[int, Program] = field(default_factory=dict)
    lost: bool = False
    #: the weights that it makes
    weights: str = ""


class Program(Protocol):
    """A program of a node, which its guard ends with it; perhaps its part in a torchrun. `broken`: why it fails in its next step."""

    alive: bool
    broken: str

    def advance(self) -> None: ...

    def stop(self, grace_s: float = 0.0) -> None: ...


class Artifacts:
    """The files of one schedule."""

    def __init__(self) -> None:
        # Processes of a campaign are forks, and have the same token.
        self.root = _BASE / f"{_PROCESS}-{os.getpid():08d}-{next(_NUMBERS):08d}"
        self.paths = RunPaths(self.root)
        self.parts: dict[str, PartFile] = {}
        # path -> the number of the process whose program wrote it
        self.writers: dict[str, int] = {}
        # what is in a file of weights -> the identity of that policy
        self.policies: dict[str, str] = {}
        # a damaged file of weights -> its content
        self.damaged: dict[Path, bytes] = {}
        # public name -> the stamp in it
        self.public: dict[str, str] = {}
        self.served = ""
        # what runs in several nodes at once, by its address and the folder that it writes
        self.meetings: dict[tuple[str, str, str], SimTorchrun] = {}
        # the places of those that have come to an engine over several nodes, by its nodes and what they are asked for
        self.spans: dict[tuple[object, ...], set[int]] = {}
        self.stamps = 0

    def make(self, given: int) -> None:
        """Make the run directory; `given`: of so many iterations there are merged files of another run."""
        self.root.mkdir(mode=0o700)
        for folder in (*map(self.paths.trajectories, SPLITS), self.paths.checkpoints, self.paths.batches):
            folder.mkdir()
        for iteration in range(1, given + 1):
            self.paths.merged("train", iteration).write_text("0")

    def remove(self) -> None:
        files.discard(self.root)

    def stamp(self) -> int:
        """A number that nothing else has."""
        self.stamps += 1
        return self.stamps

    def make_policy(
        self,
        folder: Path,
        version: int,
        content: str,
        against: Against | None = None,
        copies: WeightsCopy | None = None,
    ) -> None:
        """Write a policy version, as the update does. `content`: of its weights, which are in `copies`, this node's, too; `against`: the
        version becomes a delta if the node's copy of the version before allows it."""
        for name, text in (("model/config.json", "{}"), ("trainer/state", "")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made = (
            against.write(copies, folder, WEIGHTS, MOST)
            if against is not None and copies is not None
            else None
        )
        base = None
        if against is not None and made is not None:
            base = against.base({f"model/{WEIGHTS}": made.made})
        else:
            (folder / "model" / WEIGHTS).write_text(content)
        digest = checkpoints.write_manifest(folder, version, base).digest
        self.policies[content] = checkpoints.identity(folder.name, digest)

    def policy_in(self, model: Path) -> str:
        """The identity of the policy that an engine gets from this folder; of damaged weights there is no merged file (I17)."""
        return self.policies.get((model / WEIGHTS).read_bytes().decode("latin-1"), "damaged weights")

    def weights_on_disk(self) -> list[Path]:
        """The weights of all complete versions: those of whole ones, of which some are anchors, and deltas."""
        there = sorted(self.paths.checkpoints.glob(f"*/*/{WEIGHTS}*"))
        return [path for path in there if (path.parents[1] / checkpoints.MANIFEST).exists()]

    def restore(self) -> None:
        """Restore what was damaged and has not been removed since."""
        for path, data in self.damaged.items():
            if path.exists():
                path.write_bytes(data)
        self.damaged.clear()

    def served_now(self) -> str:
        """The folder of the policy that model.pt points at; "": none."""
        served = self.paths.served_model
        return str(self.root / os.readlink(served)).removesuffix("/model") if served.is_symlink() else ""
