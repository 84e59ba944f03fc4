"""One process of an update is killed at a stage of it; what is left is usable, and the next attempt makes what an undisturbed run makes.

`python killed_updates.py FOLDER WAY CASE STAGE...` (parallel_updates.py says what a case is). WAY is `torchrun`, the real one on two
nodes, or `forked`, which is faster. A stage is one of STAGES and a rank, like `forward:1`. Each stage strikes the next policy version,
so every attempt goes on from what the one after the last kill has left.

Under torchrun this file is also the update's program, which kills itself where DIES_AT says.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_ranks import die_at
from parallel_updates import Case, import_before_forking, make_batch
from trainer_bench import Bench
from zero_checkpoints import in_place

from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.worker_contract import ProgressWriter
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.names import POLICY_FOLDER
from fsbarrier.specs import UpdateSpec
from fsbarrier.training import checkpoint_write
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.checkpoint_write import NodeCopy
from fsbarrier.training.deepspeed_backend import DeepSpeedBackend
from fsbarrier.training.policy_model import PolicyModel, ValueModel
from fsbarrier.training.processes import Processes
from fsbarrier.training.torch_backend import TorchBackend
from fsbarrier.training.trainer import Trainer
from fsbarrier.training.weights_copy import WeightsCopy
from fsbarrier.workers.update import Updates

DIES_AT = "FSBARRIER_TEST_DIES_AT"
BACKENDS = (TorchBackend, DeepSpeedBackend)
#: By name: what is called there, whether the process is killed before or after, and in which of its calls.
STAGES: dict[str, tuple[tuple[Any, ...], str, str, int]] = {
    "batch": ((TrainingBatch,), "load", "before", 1),
    "loaded": ((Trainer,), "load", "after", 1),
    "forward": ((PolicyModel,), "forward", "after", 2),
    # While the critic is trained: its first pass tells the values that the advantages come from.
    "value": ((ValueModel,), "forward", "after", 9),
    "backward": (BACKENDS, "backward", "before", 2),
    "reduce": ((Processes,), "sum", "before", 2),
    "step": (BACKENDS, "step", "before", 2),
    "stepped": (BACKENDS, "step", "after", 1),
    "gather": ((checkpoint_write,), "whole_tensor", "after", 3),
    "copy": ((NodeCopy,), "write", "after", 1),
    "part": ((checkpoint_write,), "_write_part", "after", 1),
    "commit": ((checkpoint_write,), "_commit", "before", 1),
    "committed": ((checkpoint_write,), "_commit", "after", 1),
    "result": ((Processes,), "peak_memory_bytes", "before", 1),
}
COMMITTED = ("committed", "result")


class Run:
    """The policy versions of one run of two nodes, in a folder of its own."""

    def __init__(self, folder: Path, case: Case, batch: Path) -> None:
        self.case = case
        shutil.copytree(batch, folder)
        self.work = Bench(folder, case.settings(folder).as_json())
        # The batch is always the same, so it is another policy's from the second update on.
        self.work.nested["algorithm"]["max_logprob_gap"] = 1e9
        for node in range(case.nodes):
            self.copies(node).folder.mkdir()

    def copies(self, node: int) -> WeightsCopy:
        return WeightsCopy(self.work.folder / f"copies{node}")

    def spec(self, node: int, before: str, out: str) -> dict[str, Any]:
        made = POLICY_FOLDER.parse(out)
        assert made is not None
        known = {"node_rank": node, "weights_dir": str(self.copies(node).folder)}
        known |= {
            "reference": str(self.work.folder / "reference"),
            "result": str(self.work.folder / f"{out}.{node}"),
        }
        return self.work.update_spec(out, version=made.number, before=before, **known)

    def update(self, before: str, out: str, dies_at: str = "") -> list[int]:
        """By processes that are forked; how they ended."""

        def act(rank: int) -> None:
            die(dies_at, rank)
            spec = UpdateSpec.from_json(self.spec(rank // self.case.per_node, before, out))
            Updates().main(spec, self.work.settings, ProgressWriter(None))

        return in_place(self.case, self.work.folder, act, may_fail=bool(dies_at))

    def torchrun(self, before: str, out: str, dies_at: str) -> list[int]:
        """By the real torchrun; how the processes ended, as far as it says."""
        os.environ[DIES_AT] = dies_at
        specs = [self.spec(node, before, out) for node in range(self.case.nodes)]
        ended = self.work.torchrun(*specs, processes=self.case.per_node, program="killed_updates")
        assert all(process.returncode for process, _ in ended), dies_at
        codes = [re.findall(r"exitcode\s*: (-?\d+)", said) for _, said in ended]
        return [-int(found[0]) if found else 0 for found in codes]

    def files(self, version: str) -> dict[str, bytes]:
        """Everything that was trained: weights and moments, by name."""
        place = self.work.folder / version
        found = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.safetensors")}
        assert any("trainer/" in name for name in found) and any("model/" in name for name in found)
        return found

    def check(self, version: str) -> None:
        """The version is whole, each node has a copy of it that agrees, and no node has one of any other."""
        checkpoints.verify(self.work.folder / version)
        for node in range(self.case.nodes):
            assert self.copies(node).confirm(self.work.folder / version / "model", lambda: None) == ""


def die(dies_at: str, rank: int) -> None:
    """Be killed where `dies_at` says, if it says this rank."""
    stage, _, victim = dies_at.partition(":")
    if victim == str(rank):
        for place in STAGES[stage][0]:
            die_at(place, *STAGES[stage][1:])


def strike(run: Run, before: str, out: str, dies_at: str, way: str) -> None:
    stage, victim = dies_at.split(":")
    ended = (run.torchrun if way == "torchrun" else run.update)(before, out, dies_at)
    assert ended[int(victim)] == signal.SIGKILL, f"{dies_at}: {ended}"
    folder = run.work.folder / out
    if stage in COMMITTED:
        run.check(out)
        return
    checkpoints.verify(run.work.folder / before)
    for node in range(run.case.nodes):
        assert run.copies(node).nearest(folder / "model") == folder / "model"
        try:
            run.copies(node).confirm(folder / "model", lambda: None)
        except ProgramFailed as error:
            assert checkpoints.MANIFEST in str(error)
        else:
            raise AssertionError(f"{dies_at}: what nobody committed is served")


def main(folder: Path, way: str, case_text: str, stages: list[str]) -> None:
    import_before_forking([case_text])
    case, before, undisturbed_before = Case(case_text), "", ""
    make_batch(folder / "batch", tied=False)
    batch = torch.load(folder / "batch" / "batch", weights_only=True)
    torch.save({**batch, "steps": list(batch["steps"][0].split(9))}, folder / "batch" / "batch")
    undisturbed, struck = (Run(folder / name, case, folder / "batch") for name in ("undisturbed", "struck"))
    for number, dies_at in enumerate(["", *stages], start=1):
        out = POLICY_FOLDER.build(number, 1)
        undisturbed.update(undisturbed_before, out)
        undisturbed_before, wanted = out, undisturbed.files(out)
        if dies_at:
            strike(struck, before, out, dies_at, way)
            if dies_at.split(":")[0] in COMMITTED:
                assert struck.files(out) == wanted, f"{dies_at}: what was committed differs"
            out = POLICY_FOLDER.build(number, 2)
        struck.update(before, out)
        struck.check(out)
        before, found = out, struck.files(out)
        assert found == wanted, f"{dies_at}: what the next attempt made differs"
        print(f"{dies_at or 'undisturbed'}: the same", flush=True)


if __name__ == "__main__":
    if DIES_AT in os.environ and "--spec" in sys.argv:
        die(os.environ[DIES_AT], int(os.environ["RANK"]))
        runpy.run_module("fsbarrier.workers.update", run_name="__main__")
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
