"""Programs that stay for the next job of their kind: helpers, and the trainer under the real torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster import all_gone
from forks import run_script
from sim.work import TASKS
from trainer_bench import Bench, bench
from waiting import DEADLINE_S, free_port

from fsbarrier.context import Context
from fsbarrier.coordination.observer import Observer
from fsbarrier.errors import ProgramFailed
from fsbarrier.loader import load_program
from fsbarrier.processes import processes
from fsbarrier.protocol.facts import Generation, Join, Member, Position
from fsbarrier.protocol.state import Node
from fsbarrier.run.job import RowJob, Workplace
from fsbarrier.run.job_runner import ContextMaker
from fsbarrier.run.worker_program import ProgramRun
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import HELPER, TRAINER, Launch, Resident

# An agent and two workers, as torchrun has them on a node: if one of them fails, the agent ends. Both do every job, and the first leaves
# the result.
PROGRAM = """
import os, signal, subprocess, sys

if "NUMBER" not in os.environ:
    workers = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "NUMBER": n}) for n in "01"]
    code = 0
    for _ in workers:
        pid, status = os.wait()
        code = code or os.waitstatus_to_exitcode(status)
        if code:
            os._exit(abs(code))
    os._exit(0)

from fsbarrier.processes.worker_contract import run_worker

done = []

def main(spec, settings, progress):
    done.append(spec["n"])
    if "only" not in spec or spec["only"] == NUMBER:
        exec(spec.get("do", ""))
    if NUMBER == 0:
        return {"n": spec["n"], "pid": os.getpid(), "done": done}

NUMBER = int(os.environ["NUMBER"])
sys.exit(run_worker(main, lambda: done[-1] != "the last"))
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    (tmp_path / "work").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    workplace = Workplace(
        engines=cast(Any, None),
        work_dir=tmp_path / "work",
        log_dir=tmp_path / "logs",
        log_path=tmp_path,
        stall_timeout_s=DEADLINE_S,
        grace_s=0.0,
    )
    yield workplace
    workplace.end_residents()


Do = Callable[..., dict[str, Any]]


@pytest.fixture
def do(place: Workplace) -> Do:
    """One update: what is kept here goes on, else a program is started."""

    def do(
        n: object,
        *,
        generation: int = 1,
        formed: str | None = None,
        job: RowJob | None = None,
        **spec: object,
    ) -> dict[str, Any]:
        name = place.resident_name(generation) if formed is None else formed
        launch = Launch(
            (sys.executable, str(place.log_path / "program.py"), "--spec", "{spec}"),
            "update.log",
            resident=Resident(TRAINER, 2, name),
        )
        fields = {
            "phase": SimpleNamespace(name="update"),
            "generation": generation,
            "iteration": n,
            "node_rank": 0,
            "settings": Settings(),
        }
        seen = cast(Context, SimpleNamespace(**fields))
        return ProgramRun(launch, {"n": n, **spec}, seen, job or RowJob(), place).run()

    return do


def tree(place: Workplace) -> dict[int, int]:
    """All processes of what is kept, the guard too."""
    assert TRAINER in place.residents
    guard = place.residents[TRAINER].child.guard_pid
    return {guard: processes.Stat(guard).start, **processes.below(guard)}


def test_the_same_processes_do_one_job_after_the_other(place: Workplace, do: Do) -> None:
    begin = time.monotonic()
    first, second, third = do(1), do(2), do(3)
    assert 0 < first["start_s"] + second["start_s"] + third["start_s"] < time.monotonic() - begin
    assert first["pid"] == second["pid"] == third["pid"]
    assert (first["n"], second["n"], third["n"]) == (1, 2, 3) and third["done"] == [1, 2, 3]
    assert [path.name for path in place.work_dir.iterdir()] == ["trainer-jobs"]


def test_a_generation_that_only_continues_another_keeps_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord("run", "", "", "", Settings(), "", TASKS, "")
    program, asked = load_program("ping"), list[int]()
    observer = Observer(PosixStore(), RunPaths(tmp_path), program)
    place = Workplace(None, tmp_path, tmp_path, tmp_path, stall_timeout_s=60.0)
    monkeypatch.setattr(Workplace, "resident_name", lambda self, era: str(asked.append(era) or ""))
    make = ContextMaker(record, program, observer, place)
    members = (Member(0, 1),)
    observer.registry.learn_join(Join(0, 1, "host", 1, "boot"))
    for number, era in ((3, 3), (4, 3), (5, 5)):
        record_of = Generation(number, members, 0, Position(1, 0), "", era=era)
        make(Node(0, 1, 0.0, generation=record_of, position=Position(1, 0)))
    assert asked == [3, 3, 5]


@pytest.mark.parametrize("only", [0, 1])
def test_a_job_that_fails_ends_every_process(place: Workplace, do: Do, only: int) -> None:
    do(1)
    old = tree(place)
    with pytest.raises(ProgramFailed, match=r"(?s)ended with exit code [37].*the reason"):
        do(2, do="print('the reason', flush=True); os._exit(7 if NUMBER else 3)", only=only)
    assert all_gone(old) and place.resident_name(1) == ""
    assert do(3)["done"] == [3]


def test_a_job_that_hangs_ends_every_process(place: Workplace, do: Do) -> None:
    do(1)
    old = tree(place)
    place.stall_timeout_s = 0.3
    with pytest.raises(ProgramFailed, match=r"no progress for 0\.3 s"):
        do(2, do="signal.pause()", only=1)
    assert all_gone(old) and place.resident_name(1) == ""


def test_what_is_killed_while_it_waits_is_not_kept(place: Workplace, do: Do) -> None:
    """Any of its processes: the guard, the agent, the workers."""
    do(1)
    count = len(tree(place))
    assert count == 4
    for victim in range(count):
        do(2)
        old = tree(place)
        assert TRAINER in place.residents
        os.kill(sorted(old)[victim], signal.SIGKILL)
        assert place.residents[TRAINER].child.wait(DEADLINE_S) is not None
        assert place.resident_name(1) == "" and all_gone(old)
    assert do(3)["done"] == [3]


def test_helper_programs_share_a_process_until_a_job_fails(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("merging", "preparing"):
        code = (
            "import os\nfrom fsbarrier.errors import UsageError\n"
            "def work(spec, settings, progress):\n"
            "    if spec['n'] < 0:\n        raise UsageError('the reason')\n"
            "    return {'pid': os.getpid(), 'n': 1 // spec['n']}\n"
        )
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def job(module: str, n: int) -> dict[str, Any]:
        argv = (sys.executable, "-m", module, "--spec", "{spec}")
        launch = Launch(argv, "helper.log", resident=Resident(HELPER))
        fields = {
            "phase": SimpleNamespace(name=module),
            "generation": 1,
            "iteration": n,
            "node_rank": 0,
            "settings": Settings(),
        }
        seen = cast(Context, SimpleNamespace(**fields))
        return ProgramRun(launch, {"n": n}, seen, RowJob(), place).run()

    first = job("merging", 1)["pid"]
    assert job("preparing", 1)["pid"] == first
    with pytest.raises(ProgramFailed, match="preparing ended with exit code 1: ZeroDivisionError"):
        job("preparing", 0)
    with pytest.raises(ProgramFailed, match=r"(?s)preparing ended with exit code 2.*the reason"):
        job("merging", 1), job("preparing", -1)
    second = job("merging", 1)["pid"]
    assert second != first
    kept = {second: processes.Stat(second).start}
    place.end_residents()
    assert all_gone(kept)


# --- the trainer ----------------------------------------------------------------------------------------------------------------

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
        launch = Launch(tuple(argv), "update.log", env, resident=resident)
        fields = {
            "phase": SimpleNamespace(name="update"),
            "generation": generation,
            "iteration": self.version,
            "node_rank": 0,
            "settings": self.work.settings,
        }
        seen = cast(Context, SimpleNamespace(**fields))
        done = ProgramRun(launch, spec, seen, RowJob(), self.place).run()
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


@pytest.mark.torch
@pytest.mark.slow
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


@pytest.mark.torch
@pytest.mark.slow
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


@pytest.mark.torch
@pytest.mark.slow
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


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    ["1x2:none:5", "2x1:all:5", "1x2:node:5", "1x2:all:5:bf16"],
)
def test_processes_that_stay_make_the_updates_of_those_that_load_anew(tmp_path: Path, case: str) -> None:
    run_script("kept_updates.py", tmp_path, case, f"{case}:lora:critic")
