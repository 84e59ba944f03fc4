"""The trainer under the real torchrun, kept from one update to the next: it grows no fatter, and killed it begins where the run stands."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster import all_gone
from forks import run_script
from trainer_bench import Bench, bench
from waiting import free_port

from fsbarrier.processes import processes
from fsbarrier.program import TRAINER, Command, Context, Resident
from fsbarrier.run import work_kinds
from fsbarrier.run.job import RowJob, Workplace
from fsbarrier.rundir import checkpoints

pytestmark = [pytest.mark.torch, pytest.mark.slow]
UPDATES, SETTLED = 110, 10


class Trainer:
    """One node's trainer, of two processes; the batch is always the same."""

    def __init__(self, work: Bench) -> None:
        self.work, self.version = work, 0
        folder = work.folder / "work"
        folder.mkdir()
        # Nothing is made in the directory of a run that is gone.
        (work.folder / "run.json").touch()
        self.place = Workplace(
            engines=cast(Any, None),
            work_dir=folder,
            log_dir=work.folder,
            log_path=work.folder,
            stall_timeout_s=600.0,
            grace_s=0.0,
        )

    def update(self, generation: int = 1, processes: int = 2) -> dict[str, Any]:
        before, self.version = self.version, self.version + 1
        known = checkpoints.read_manifest(self.work.folder / f"v{before}").digest if before else ""
        spec = self.work.update_spec(
            f"v{self.version}",
            version=self.version,
            before=f"v{before}" if before else "",
            policy=checkpoints.identity(f"v{before}", known),
        )
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
        argv += ["--nproc-per-node", str(processes), "--master-addr", "127.0.0.1"]
        argv += ["--master-port", str(free_port()), "--max-restarts", "0"]
        argv += ["-m", "fsbarrier.workers.update", "--spec", "{spec}"]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        resident = Resident(TRAINER, processes, self.place.resident_name(generation))
        command = Command(tuple(argv), "update.log", spec=spec, env=env, resident=resident)
        fields = {
            "phase": SimpleNamespace(name="update"),
            "generation": generation,
            "iteration": self.version,
            "node_rank": 0,
            "settings": self.work.settings,
        }
        done = work_kinds.execute(command, cast(Context, SimpleNamespace(**fields)), RowJob(), self.place)
        if before:
            shutil.rmtree(self.work.folder / f"v{before}")
        return done

    def tree(self) -> dict[int, int]:
        assert TRAINER in self.place.residents
        return processes.below(self.place.residents[TRAINER].child.guard_pid)

    def resident_kib(self) -> int:
        """Of all its processes together."""
        return sum(
            int(line.split()[1])
            for pid in self.tree()
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )


@pytest.mark.timeout(1800)
def test_a_hundred_updates_take_no_more_memory_than_ten(tmp_path: Path) -> None:
    work = bench(tmp_path, algorithm__max_logprob_gap=1e9)
    work.prepare()
    trainer = Trainer(work)
    try:
        assert trainer.update()["went_on"] is False
        tree, settled_kib = trainer.tree(), 0
        for number in range(2, UPDATES + 1):
            assert trainer.update()["went_on"] is True
            if number == SETTLED:
                settled_kib = trainer.resident_kib()
        assert trainer.tree() == tree
        grown = trainer.resident_kib() / settled_kib - 1
        print(f"memory grew by {grown:.2%} in {UPDATES - SETTLED} updates, from {settled_kib >> 10} MiB")
        assert grown < 0.01
    finally:
        trainer.place.end_resident(TRAINER)


def deepspeed(folder: Path, backend: str = "deepspeed") -> Bench:
    work = bench(folder, algorithm__max_logprob_gap=1e9)
    if backend == "deepspeed":
        work.nested["trainer"] |= {"backend": "deepspeed"}
    work.prepare()
    return work


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_whichever_of_its_processes_is_killed_the_next_update_begins_where_the_run_stands(
    tmp_path: Path, backend: str
) -> None:
    work = deepspeed(tmp_path, backend)
    trainer = Trainer(work)
    try:
        for which in range(3):
            assert trainer.update()["went_on"] is False
            assert trainer.update()["went_on"] is True
            tree = trainer.tree()
            assert len(tree) == 3, "torchrun, two processes"
            assert TRAINER in trainer.place.residents
            os.kill(sorted(tree)[which], signal.SIGKILL)
            # Whoever looks before the guard has told of it gives it an update, which then fails.
            assert trainer.place.residents[TRAINER].child.wait(60.0) is not None and all_gone(tree)
        assert trainer.update()["policy_version"] == 7
    finally:
        trainer.place.end_resident(TRAINER)


@pytest.mark.timeout(1800)
def test_deepspeed_s_processes_go_on_in_their_own_generation_alone(tmp_path: Path) -> None:
    """A restart, other processes or another learning rate begin a generation. What comes of it all is what processes make that are formed
    anew for each update, to the last bit."""

    def last_version(folder: Path, *, keep: bool) -> dict[str, bytes]:
        folder.mkdir()
        work = deepspeed(folder)
        trainer, went_on = Trainer(work), []

        def update(generation: int, processes: int = 2) -> None:
            if not keep:
                trainer.place.end_resident(TRAINER)
            went_on.append(trainer.update(generation, processes)["went_on"])

        try:
            for generation in (1, 1, 2, 2):
                update(generation)
            update(3, processes=3)
            work.nested["optimizer"]["lr"] = 5e-4
            update(4)
            update(4)
        finally:
            trainer.place.end_resident(TRAINER)
        assert went_on == [keep and number in (1, 3, 6) for number in range(7)]
        out = work.folder / f"v{trainer.version}"
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}

    kept = last_version(tmp_path / "kept", keep=True)
    assert kept and kept == last_version(tmp_path / "anew", keep=False)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    ["1x2:none:5", "2x1:all:5", "1x2:node:5", "1x2:all:5:bf16"],
)
def test_processes_that_stay_make_the_updates_of_those_that_load_anew(tmp_path: Path, case: str) -> None:
    run_script("kept_updates.py", tmp_path, case, f"{case}:lora:critic")
