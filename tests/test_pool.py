"""Jobs on a pool of nodes: what is decided from what is known, and real daemons that are killed, stopped and started again."""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import REPO, leftovers
from waiting import until

from fsbarrier.cli import main
from fsbarrier.cli.commands import jobs
from fsbarrier.cli.pool import directory
from fsbarrier.cli.pool.directory import JOB, PoolDirectory, existing
from fsbarrier.cli.pool.facts import Decision, Facts, Job, Placement, next_decision
from fsbarrier.protocol.facts import Beat
from fsbarrier.rundir.names import START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files

# for whole jobs on a machine that does much else
DEADLINE_S = 1000.0


# --- what is decided ----------------------------------------------------------------------------------------------------


def job(nodes: int = 1, priority: int = 0) -> Job:
    return Job("j", nodes, priority, (), "/", "/run", "ann@host", "now")


def placed(job: int, **ranks: int) -> Decision:
    """`placed(1, r0=5)`: node 5 of the pool runs rank 0 of job 1."""
    return Decision(job, {rank[1:]: node for rank, node in ranks.items()})


def decides(
    facts: Facts, living: set[int], dead: set[int] | None = None, begun: set[int] | None = None
) -> Decision | None:
    return next_decision(facts, living, dead or set(), begun or set())


def test_the_higher_priority_goes_first_and_then_the_older_job() -> None:
    facts = Facts(jobs={1: job(), 2: job(priority=1), 3: job(priority=1)})
    order = []
    for number in (1, 2, 3):
        decision = decides(facts, {0, 1, 2})
        assert decision is not None
        order.append(decision.job)
        facts = replace(facts, decisions={**facts.decisions, number: decision})
    assert order == [2, 3, 1]
    assert sorted(one.node for one in facts.open_placements()) == [0, 1, 2]
    assert decides(facts, {0, 1, 2}) is None


def test_a_job_gets_all_its_nodes_or_none() -> None:
    facts = Facts(jobs={1: job(2)}, decisions={})
    assert decides(facts, {3}) is None
    assert decides(facts, {3, 7}) == placed(1, r0=3, r1=7)


def test_a_dead_node_s_place_goes_to_a_free_one_and_a_silent_one_s_does_not_yet() -> None:
    facts = Facts(jobs={1: job(2)}, decisions={1: placed(1, r0=0, r1=1)})
    assert decides(facts, {0, 2}) is None
    found = decides(facts, {0, 2}, dead={1})
    assert found is not None and (found.job, found.ranks) == (1, {"1": 2})
    assert decides(facts, {0}, dead={1}) is None
    moved = replace(facts, decisions={**facts.decisions, 2: found})
    assert moved.placements(1)[1] == Placement(1, 1, 2, 2)
    # It is free again when it comes back, whatever its first place was.
    assert decides(replace(moved, jobs={**moved.jobs, 2: job()}), {0, 1, 2}) == placed(2, r0=1)


def ends(*codes: int | None, stops: tuple[int, ...] = (), **more: set[int]) -> int | None:
    """The exit code with which job 1, whose nodes 0, 1, ... ended with `codes`, is over."""
    ranks = {f"r{rank}": rank for rank in range(len(codes))}
    ended = {Placement(1, rank, rank, 1): code for rank, code in enumerate(codes) if code is not None}
    facts = Facts(jobs={1: job(len(codes))}, decisions={1: placed(1, **ranks)}, stops=stops, ended=ended)
    found = decides(facts, set(), **more)
    return found.exit_code if found is not None else None


def test_when_a_job_is_over() -> None:
    assert ends(0, 0) == 0
    assert ends(0, None) is None
    assert ends(0, None, dead={1}) == 0
    # All its nodes are gone: it is taken up again.
    assert ends(None, None, dead={0, 1}) is None
    assert ends(None, None, dead={0, 1}, stops=(1,)) == 143
    assert ends(143, None, stops=(1,)) is None
    assert ends(143, 143, stops=(1,)) == 143
    # A node that fails later leaves the others to go on, one that fails before they begin does not.
    assert ends(3, None, begun={1}) is None
    assert ends(3, None) == 3
    assert ends(2, None, begun={1}) == 2
    assert ends(-9, 0, begun={1}) == 0
    assert ends(4, 4, begun={1}) == 4


# --- the directory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> PoolDirectory:
    made = PoolDirectory(tmp_path / "pool")
    made.make(shared_group=False)
    return made


def test_what_is_submitted_is_open_to_whom_the_pool_is(tmp_path: Path) -> None:
    for shared, mode in ((True, 0o660), (False, 0o600)):
        root = tmp_path / str(shared)
        PoolDirectory(root).make(shared_group=shared)
        # Another process, which knows only the directory.
        files.set_shared_group(False)
        number = existing(root).submit(job())
        files.set_shared_group(False)
        assert stat.S_IMODE((root / "jobs" / JOB.build(number)).stat().st_mode) == mode


def test_of_two_decisions_at_once_one_counts(pool: PoolDirectory) -> None:
    assert [pool.submit(job(2)), pool.submit(replace(job(), log_path=""))] == [1, 2]
    other = PoolDirectory(pool.root)
    seen, also = pool.read(), other.read()
    assert pool.decide(seen, placed(1, r0=0, r1=1))
    assert not other.decide(also, placed(2, r0=0))
    assert other.read().decisions == {1: placed(1, r0=0, r1=1)}
    other.report(Placement(1, 1, 1, 1), 4)
    assert pool.read().ended == {Placement(1, 1, 1, 1): 4}
    assert pool.read().jobs[2].log_path == str(pool.root / "runs" / "job-000002")


JOB_FIELDS = {
    "name": "j",
    "nodes": 1,
    "priority": 0,
    "words": [],
    "folder": "/",
    "log_path": "/run",
    "submitted_by": "ann",
    "time": "now",
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("jobs/job-000001.json", {**JOB_FIELDS, "nodes": 0}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "nodes": "2"}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "nodes": True}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "nodes": float("nan")}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "priority": [1]}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "words": "--force"}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "words": [["a"]]}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "words": ["a\0b"]}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "words": ["\ud800"]}),
        ("jobs/job-000001.json", {**JOB_FIELDS, "later": 1}),
        ("jobs/job-000001.json", {"name": "j"}),
        ("jobs/job-000001.json", []),
        ("decisions/000001.json", {"job": 1, "ranks": {"x": 0}}),
        ("decisions/000001.json", {"job": 1, "ranks": {"00": 0}}),
        ("decisions/000001.json", {"job": 1, "ranks": {"0": None}}),
        ("decisions/000001.json", {"job": 1, "ranks": {}}),
        ("decisions/000001.json", {"job": "1", "exit_code": 0}),
        ("ended/job-000001.rank-0000.by-000001.json", {}),
        ("ended/job-000001.rank-0000.by-000001.json", {"exit_code": "0"}),
    ],
)
def test_a_record_that_nodes_could_not_follow_is_one_clear_line(
    pool: PoolDirectory, capsys: pytest.CaptureFixture[str], name: str, content: object
) -> None:
    if name.startswith("ended/"):
        pool.submit(job())
        pool.decide(pool.read(), placed(1, r0=0))
    (pool.root / name).write_text(json.dumps(content))
    assert main(["jobs", str(pool.root)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{pool.root / name}: not a record of this version of fsbarrier" in line


def test_a_job_in_the_queue_says_for_what_it_waits(
    pool: PoolDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.submit(job(2))
    says = "is waiting for 2 nodes, of which the pool has "
    assert main(["jobs", str(pool.root)]) == 0
    assert f"job 1 {says}0\n" in capsys.readouterr().out
    # However slow this machine is, the node that lives is seen before the watch ends.
    monkeypatch.setattr(directory, "WATCH_S", DEADLINE_S)
    PosixStore().make_dir(pool.paths.status)
    path, counters, over = pool.paths.beat(0, 1), itertools.count(), threading.Event()

    def beat() -> None:
        PosixStore().put(path, Beat(0, 1, next(counters), "host", 1, "idle"))

    def beat_on() -> None:
        while not over.wait(0.01):
            beat()

    beat()
    beating = threading.Thread(target=beat_on)
    beating.start()
    try:
        assert main(["jobs", str(pool.root), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["state"], row["waits_for"]) == ("queued", "2 nodes, of which the pool has 1")
        assert main(["jobs", "logs", str(pool.root), "1"]) == 2
        assert f"job 1 has no output yet; it {says}1\n" in capsys.readouterr().err
    finally:
        over.set()
        beating.join()
    pool.decide(pool.read(), placed(1, r0=0, r1=1))
    assert main(["jobs", str(pool.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["waits_for"] is None


def test_the_list_names_each_job_s_nodes_once_its_run_and_its_iteration(
    pool: PoolDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.submit(replace(job(2), log_path=str(tmp_path / "run")))
    pool.submit(replace(job(3), log_path=""))
    pool.decide(pool.read(), placed(1, r0=4, r1=7))
    run = RunPaths(tmp_path / "run")
    PosixStore().make_dir(run.status)
    for rank, iteration in ((0, 5), (1, 4)):
        PosixStore().put(run.beat(rank, 1), Beat(rank, 1, 9, "host", 1, "running", iteration=iteration))
    assert main(["jobs", str(pool.root)]) == 0
    header, first, second, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[4:8] == ["nodes", "iteration", "run", "directory"]
    assert f"2 (4, 7)          5  {tmp_path}/run" in first
    assert "3                 –  runs/job-000002" in second


def test_logs_are_followed_until_the_job_is_over(
    pool: PoolDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.submit(job())
    pool.decide(pool.read(), placed(1, r0=0))
    said: list[str] = []

    class Pause:
        """What happens between two looks."""

        def wait(self, seconds: float) -> None:
            said.append(capsys.readouterr().out)
            path = pool.log(1, 0)
            if len(said) == 1:
                path.parent.mkdir(parents=True)
                path.write_text("one\ntwo\nthr")
            elif len(said) == 2:
                path.write_text("one\ntwo\nthree\n")
                pool.decide(pool.read(), Decision(1, exit_code=0))

    monkeypatch.setattr(jobs.threading, "Event", Pause)
    assert main(["jobs", "logs", str(pool.root), "1", "--follow"]) == 0
    assert said == ["", "[node 0] one\n[node 0] two\n", "[node 0] three\n"]
    assert main(["jobs", "logs", str(pool.root), "1", "--node", "0", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "[node 0] three\n"
    assert main(["submit", str(pool.root), "--name", "nightly", "--program", "toy"]) == 0
    assert main(["jobs", str(pool.root), "--json"]) == 0
    assert '"nightly"' in capsys.readouterr().out


def test_a_pool_that_others_may_write_is_refused(
    pool: PoolDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The group has other members.
    monkeypatch.setattr("fsbarrier.store.trusted_folder._is_only_ours", lambda group: False)
    assert pool.root.stat().st_mode & 0o777 == 0o700
    (pool.root / "jobs").chmod(0o770)
    assert main(["daemon", str(pool.root)]) == 2
    assert "its group may write" in capsys.readouterr().err
    (pool.root / "jobs").chmod(0o777)
    assert main(["daemon", str(pool.root), "--shared-group"]) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("submit", "POOL", "--nodes", "0"), "--nodes 0"),
        (("submit", "POOL", "--num-nodes", "2"), "use --nodes N"),
        (("submit", "POOL", "toy.task=3"), "did you mean toy.tasks?"),
        (("submit", "nowhere"), "not a pool"),
        (("jobs", "stop", "POOL"), "give POOL_DIR N"),
        (("jobs", "stop", "POOL", "7"), "no such job"),
        (("daemon", "POOL", "--dead", "0"), "--dead 0"),
    ],
)
def test_wrong_command_lines_say_what_to_do(
    pool: PoolDirectory, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main([str(pool.root) if word == "POOL" else word for word in words]) == 2
    assert says in capsys.readouterr().err


# --- real daemons -----------------------------------------------------------------------------------------------------------


class Daemons:
    """Daemons of one pool, each with temporary files of its own, as on a host of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.processes = root, dict[int, subprocess.Popen[bytes]]()

    def start(self, *numbers: int, dead_s: float = 60.0) -> None:
        for number in numbers:
            folder = self.root.parent / f"host{number}"
            folder.mkdir(exist_ok=True)
            argv = [sys.executable, "-m", "fsbarrier", "daemon", str(self.root), "--dead", str(dead_s)]
            with (folder / "said.txt").open("ab") as out:
                env = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(folder)}
                self.processes[number] = subprocess.Popen(
                    argv, stdout=out, stderr=out, env=env, start_new_session=True
                )

    def until(self, holds: Callable[[Facts], bool]) -> Facts:
        def facts() -> Facts | None:
            found = PoolDirectory(self.root).read() if (self.root / "jobs").is_dir() else None
            return found if found is not None and holds(found) else None

        def said() -> str:
            paths = (*self.root.parent.glob("host*/said.txt"), *self.root.glob("logs/*/*"))
            return "\n".join(path.read_text() for path in paths)

        return until(facts, said, deadline_s=DEADLINE_S)

    def end(self, number: int, signal_number: int) -> int:
        self.processes[number].send_signal(signal_number)
        return self.processes.pop(number).wait(DEADLINE_S)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path / "pool")
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def submit(root: Path, *words: str, nodes: int = 1) -> None:
    calm = ("--program", "toy", "toy.phase_s=1", "toy.tasks=4")
    assert main(["submit", str(root), "--nodes", str(nodes), *calm, *words]) == 0


def starts(log_path: Path) -> list[StartName]:
    """The starts of a run's nodes."""
    return sorted(START.parse_all(PosixStore().names(RunPaths(log_path).joins)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_outlives_the_daemons_and_ends_when_it_is_told(daemons: Daemons, tmp_path: Path) -> None:
    root, run = daemons.root, tmp_path / "run"
    daemons.start(0, 1)
    daemons.until(lambda facts: True)
    submit(root, "--log-path", str(run), nodes=2)
    # Not before, as long as node 0 knows of no other node the second job would go first.
    daemons.until(lambda facts: bool(facts.placements(1)))
    submit(root, "--priority", "3")
    daemons.until(lambda facts: len(starts(run)) == 2)
    assert main(["jobs", "stop", str(root), "2"]) == 0
    daemons.until(lambda facts: facts.state(2) == "stopped")
    # Its guard ends what a daemon ran, however the daemon ended; and the next one there takes it up again.
    assert daemons.end(1, signal.SIGKILL) == -signal.SIGKILL
    daemons.start(1)
    daemons.until(lambda facts: len(starts(run)) >= 3)
    assert main(["jobs", "stop", str(root), "1"]) == 0
    daemons.until(lambda facts: facts.state(1) == "stopped")
    daemons.until(lambda facts: leftovers(run) == {})
    submit(root, "--iterations", "1", nodes=2)
    daemons.until(lambda facts: facts.state(3) == "finished")
    submit(root)
    third = root / "runs" / "job-000004"
    daemons.until(lambda facts: len(starts(third)) == 1)
    assert [daemons.end(number, signal.SIGINT) for number in (0, 1)] == [130, 130]
    daemons.until(lambda facts: leftovers(third) == {})
    # It is in nobody's hands, and not over.
    assert PoolDirectory(root).read().state(4) == "running"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_jobs_on_three_nodes_of_which_one_dies(daemons: Daemons) -> None:
    daemons.start(0, 1, 2, dead_s=15.0)
    daemons.until(lambda facts: True)
    for number in range(10):
        submit(daemons.root, "--iterations", "1", "--priority", str(number % 3), nodes=1 + number % 2)
    daemons.until(lambda facts: any(facts.state(number) == "finished" for number in facts.jobs))
    daemons.until(lambda facts: any(one.node == 1 for one in facts.open_placements()))
    # Whichever of them is the pool's node 1.
    for number, process in daemons.processes.items():
        said = (daemons.root.parent / f"host{number}" / "said.txt").read_text()
        if "as node 1;" in said:
            process.kill()
    daemons.until(lambda facts: all(facts.state(number) == "finished" for number in range(1, 11)))
