"""The trainer under the real torchrun, kept from one update to the next: it grows no fatter, and killed it begins where the run stands."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster import all_gone
from trainer_bench import Bench, bench

from fsbarrier.node import work_kinds
from fsbarrier.node.job import Job, Workplace
from fsbarrier.program import Command, Context, Keep
from fsbarrier.rundir import checkpoints
from fsbarrier.supervision import processes
from fsbarrier.supervision.template import Template

pytestmark = [pytest.mark.torch, pytest.mark.slow]
UPDATES, SETTLED = 110, 10


class Trainer:
    """One node's trainer, of two processes; the batch is always the same."""

    def __init__(self, work: Bench) -> None:
        self.work, self.version = work, 0
        folder = work.folder / "work"
        folder.mkdir()
        self.place = Workplace(
            engines=cast(Any, None),
            template=Template((), work_dir=folder, log_file=folder / "template.log"),
            work_dir=folder,
            log_dir=work.folder,
            log_path=work.folder,
            stall_timeout_s=600.0,
            grace_s=0.0,
        )

    def update(self) -> dict[str, Any]:
        before, self.version = self.version, self.version + 1
        known = checkpoints.read_manifest(self.work.folder / f"v{before}").digest if before else ""
        spec = self.work.update_spec(
            f"v{self.version}",
            version=self.version,
            before=f"v{before}" if before else "",
            policy=checkpoints.identity(f"v{before}", known),
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
        argv += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "0"]
        argv += ["-m", "fsbarrier.workers.update", "--spec", "{spec}"]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        keep = Keep(2, self.place.kept_in(1))
        command = Command(tuple(argv), "update.log", spec=spec, env=env, keep=keep)
        fields = {
            "phase": SimpleNamespace(name="update"),
            "generation": 1,
            "iteration": self.version,
            "node_rank": 0,
            "settings": self.work.settings,
        }
        done = work_kinds.carry_out(command, cast(Context, SimpleNamespace(**fields)), Job(), self.place)
        if before:
            shutil.rmtree(self.work.folder / f"v{before}")
        return done

    def tree(self) -> dict[int, int]:
        assert self.place.kept is not None
        return processes.below(self.place.kept.child.guard_pid)

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
        trainer.place.end_kept()


@pytest.mark.timeout(1800)
def test_whichever_of_its_processes_is_killed_the_next_update_begins_where_the_run_stands(
    tmp_path: Path,
) -> None:
    work = bench(tmp_path, algorithm__max_logprob_gap=1e9)
    work.prepare()
    trainer = Trainer(work)
    try:
        for which in range(4):
            assert trainer.update()["went_on"] is False
            assert trainer.update()["went_on"] is True
            tree = trainer.tree()
            assert len(tree) == 4, "inner guard, torchrun, two processes"
            os.kill(sorted(tree)[which], signal.SIGKILL)
            assert all_gone(tree, 60.0)
        assert trainer.update()["policy_version"] == 9
    finally:
        trainer.place.end_kept()
