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
from pathlib import Path

import pytest
from cluster import REPO, leftovers
from commands import typed
from waiting import until

from fsbarrier.pool import directory
from fsbarrier.pool.directory import RECORD, Pool, existing
from fsbarrier.pool.queue import (
    Assignment,
    Ended,
    Job,
    Joined,
    Over,
    Placed,
    Queue,
    Record,
    StopAsked,
    next_decision,
)
from fsbarrier.protocol.facts import Beat
from fsbarrier.rundir import logs
from fsbarrier.rundir.names import START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files

# for whole jobs on a machine that does much else
DEADLINE_S = 1000.0


# --- what is decided ----------------------------------------------------------------------------------------------------


def job(nodes: int = 1, priority: int = 0, log_path: str = "/run") -> Job:
    return Job("j", nodes, priority, (), "/", log_path, "ann@host", "now")


def queue(*records: Record) -> Queue:
    made = Queue()
    for record in records:
        made.apply(record)
    return made


def decides(queue: Queue, living: set[int], dead: set[int] | None = None) -> Placed | Over | None:
    return next_decision(queue, living, dead or set())


def test_the_higher_priority_goes_first_and_then_the_older_job() -> None:
    line = queue(job(), job(priority=1), job(priority=1))
    order = []
    for _ in range(3):
        decision = decides(line, {5, 6, 7})
        assert isinstance(decision, Placed)
        order.append(decision.job)
        line.apply(decision)
    assert order == [2, 3, 1]
    assert [line.place_of(node) for node in (5, 6, 7)] == [
        Assignment(2, 0, 5, 4),
        Assignment(3, 0, 6, 5),
        Assignment(1, 0, 7, 6),
    ]
    assert decides(line, {5, 6, 7}) is None


def test_a_job_gets_all_its_nodes_or_none() -> None:
    line = queue(job(2))
    assert decides(line, {3}) is None
    assert decides(line, {3, 7}) == Placed(1, {0: 3, 1: 7})
    # A small one does not overtake it, or a large one would never begin.
    line = queue(job(1), Placed(1, {0: 5}), job(3), job(1))
    assert decides(line, {5, 6, 7}) is None
    # What the pool never had the nodes for waits without them.
    assert decides(line, {5, 6}) == Placed(3, {0: 6})


def test_a_dead_node_s_place_goes_to_a_free_one_and_a_silent_one_s_does_not_yet() -> None:
    line = queue(job(2), Placed(1, {0: 0, 1: 1}))
    assert decides(line, {0, 2}) is None
    assert decides(line, {0}, dead={1}) is None
    decision = decides(line, {0, 2}, dead={1})
    assert decision == Placed(1, {1: 2})
    line.apply(decision)
    # It is free again when it comes back, and what it says of its old place no longer counts.
    line.apply(Ended(1, 1, 2, 4))
    assert line.jobs[1].codes == {} and line.place_of(1) is None
    line.apply(job())
    assert decides(line, {0, 1, 2}) == Placed(2, {0: 1})


def test_a_job_that_was_stopped_gets_no_nodes_any_more() -> None:
    line = queue(job(), job(), StopAsked(1, "ann"))
    decision = decides(line, {5})
    assert decision == Over(1, 143, "stopped while queued")
    line.apply(decision)
    assert (line.jobs[1].word, decides(line, {5})) == ("stopped", Placed(2, {0: 5}))
    assert decides(queue(job(2), Placed(1, {0: 0, 1: 1}), StopAsked(1, "ann")), {0, 2}, dead={1}) is None


def ends(*codes: int | None, stop: bool = False, dead: set[int] | None = None) -> int | None:
    """The exit code with which job 1, whose nodes 0, 1, ... ended with `codes`, is over."""
    line = queue(job(len(codes)), Placed(1, {rank: rank for rank in range(len(codes))}))
    for rank, code in enumerate(codes):
        if code is not None:
            line.apply(Ended(1, rank, 2, code))
    if stop:
        line.apply(StopAsked(1, "ann"))
    decision = next_decision(line, set(), dead or set())
    return decision.exit_code if isinstance(decision, Over) else None


def test_when_a_job_is_over() -> None:
    assert ends(0, 0) == 0
    assert ends(0, None) is None
    assert ends(0, None, dead={1}) == 0
    # All its nodes are gone: it is taken up again.
    assert ends(None, None, dead={0, 1}) is None
    assert ends(None, None, dead={0, 1}, stop=True) == 143
    assert ends(143, None, stop=True) is None
    assert ends(143, 143, stop=True) == 143
    # A node that fails leaves the others to go on, one that refuses to start does not.
    assert ends(3, None) is None
    assert ends(2, None) == 2
    assert ends(-9, 0) == 0
    assert ends(4, 4) == 4


# --- the directory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    made = Pool(tmp_path / "pool")
    made.make(shared_group=False)
    return made


def test_what_is_submitted_is_open_to_whom_the_pool_is(tmp_path: Path) -> None:
    for shared, mode in ((True, 0o660), (False, 0o600)):
        root = tmp_path / str(shared)
        Pool(root).make(shared_group=shared)
        # Another process, which knows only the directory.
        files.set_shared_group(False)
        assert existing(root).submit(job()) == 1
        files.set_shared_group(False)
        assert stat.S_IMODE((root / "log" / RECORD.build(1)).stat().st_mode) == mode


def test_of_two_decisions_at_once_one_counts(pool: Pool) -> None:
    assert [pool.append(Joined("a", 1)), pool.submit(job(2)), pool.submit(job(log_path=""))] == [1, 1, 2]
    other = Pool(pool.root)
    pool.read(), other.read()
    assert pool.decide(Placed(1, {0: 1, 1: 2}))
    assert not other.decide(Placed(2, {0: 1}))
    assert other.read().place_of(1) == Assignment(1, 0, 1, 4)
    # What does not follow from the log is said after whatever others say.
    assert Pool(pool.root).append(Ended(1, 1, 4, 4)) == 5
    assert pool.append(StopAsked(1, "ann")) == 6
    assert pool.read().jobs[1].codes == {1: 4} and pool.queue.jobs[1].stop
    assert pool.run_of(2) == pool.root / "runs" / "job-000002"


JOB_FIELDS = {
    "type": "job",
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
    "content",
    [
        {**JOB_FIELDS, "nodes": 0},
        {**JOB_FIELDS, "nodes": "2"},
        {**JOB_FIELDS, "nodes": True},
        {**JOB_FIELDS, "nodes": float("nan")},
        {**JOB_FIELDS, "priority": [1]},
        {**JOB_FIELDS, "words": "--force"},
        {**JOB_FIELDS, "words": [["a"]]},
        {**JOB_FIELDS, "words": ["a\0b"]},
        {**JOB_FIELDS, "words": ["\ud800"]},
        {**JOB_FIELDS, "later": 1},
        {"type": "job", "name": "j"},
        [],
        {"type": "placed", "job": 1, "ranks": {"x": 0}},
        {"type": "placed", "job": 1, "ranks": {"-1": 0}},
        {"type": "placed", "job": 1, "ranks": {"0": None}},
        {"type": "placed", "job": 1, "ranks": {}},
        {"type": "placed", "job": 2, "ranks": {"0": 1}},
        {"type": "over", "job": "1", "exit_code": 0},
        {"type": "ended", "job": 1, "rank": 0, "by": 1},
        {"type": "unknown"},
    ],
)
def test_a_record_that_nodes_could_not_follow_is_one_clear_line(pool: Pool, content: object) -> None:
    pool.submit(job())
    path = pool.root / "log" / RECORD.build(2)
    path.write_text(json.dumps(content))
    (line,) = typed("jobs", pool.root, code=3).err.splitlines()
    assert f"{path}: not a record of this version of fsbarrier" in line


def test_the_list_says_what_a_job_in_the_queue_could_get(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.submit(job(2))
    said = typed("jobs", pool.root)
    assert "the pool has 0 nodes, of which 0 can take a job\n" in said.out
    # However slow this machine is, the node that lives is seen before the watch ends.
    monkeypatch.setattr(directory, "WATCH_S", DEADLINE_S)
    number = pool.append(Joined("host", 1))
    path, counters, over = pool.paths.beat(number, 1), itertools.count(), threading.Event()

    def beat() -> None:
        PosixStore().put(path, Beat(number, 1, next(counters), "host", 1, "idle"))

    def beat_on() -> None:
        while not over.wait(0.01):
            beat()

    beat()
    beating = threading.Thread(target=beat_on)
    beating.start()
    try:
        said = typed("jobs", pool.root)
        assert "the pool has 1 node, of which 1 can take a job\n" in said.out
        said = typed("jobs", "logs", pool.root, "1", code=2)
        assert "job 1 has no output yet: it is queued\n" in said.err
    finally:
        over.set()
        beating.join()


def test_the_list_names_each_job_s_hosts_its_run_and_its_iteration(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.append(Joined("gpu-4", 1)), pool.append(Joined("gpu-7", 1))
    pool.submit(job(2, log_path=str(tmp_path / "run")))
    pool.submit(job(3, log_path=""))
    pool.append(Placed(1, {0: first, 1: second}))
    run = RunPaths(tmp_path / "run")
    PosixStore().make_dir(run.status)
    for rank, iteration in ((0, 5), (1, 4)):
        PosixStore().put(run.beat(rank, 1), Beat(rank, 1, 9, "host", 1, "running", iteration=iteration))
    header, one, two, *_ = typed("jobs", pool.root).out.splitlines()
    assert header.split()[4:8] == ["nodes", "iteration", "run", "directory"]
    assert "2 (gpu-4, gpu-7)          5  " in one and f"{tmp_path}/run" in one
    assert "–  runs/job-000002" in two
    pool.append(Over(1, 4))
    pool.append(StopAsked(2, "ann"))
    pool.append(Over(2, 143))
    pool.submit(job())
    pool.append(Over(3, 0))
    said = typed("jobs", pool.root, "--json")
    found = [(row["state"], row["exit_code"]) for row in json.loads(said.out)]
    assert found == [("failed", 4), ("stopped", 143), ("finished", 0)]
    assert "failed (4)" in typed("jobs", pool.root).out


def test_logs_are_followed_until_the_job_is_over(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.submit(job())
    pool.append(Placed(1, {0: 1}))
    said: list[str] = []

    class Pause:
        """What happens between two looks."""

        def wait(self, seconds: float) -> None:
            said.append(sys.stdout.buffer.getvalue().decode())
            path = pool.log(1, 0)
            if len(said) == 1:
                path.parent.mkdir(parents=True)
                path.write_text("one\ntwo\nthr")
            elif len(said) == 2:
                path.write_text("one\ntwo\nthree\n")
                pool.append(Over(1, 0))

    monkeypatch.setattr(logs.threading, "Event", Pause)
    ended = typed("jobs", "logs", pool.root, "1", "--follow").out
    followed = "[node 0] one\n[node 0] two\n"
    assert said == ["", followed] and ended == f"{followed}[node 0] three\n"
    pool.log(1, 1).write_text("four\n")
    three, four = "[node 0] three\n", "[node 1] four\n"
    for flags, shown in (((), three + four), (("--node", "0"), three), (("--node", "1"), four)):
        assert typed("jobs", "logs", pool.root, "1", "--lines", "1", *flags).out == shown
    typed("submit", pool.root, "--name", "nightly", "--program", "toy")
    assert '"nightly"' in typed("jobs", pool.root, "--json").out


def test_a_pool_that_others_may_write_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The group has other members.
    monkeypatch.setattr("fsbarrier.store.trusted_folder._is_only_ours", lambda group: False)
    assert pool.root.stat().st_mode & 0o777 == 0o700
    (pool.root / "log").chmod(0o770)
    assert "its group may write" in typed("daemon", pool.root, code=2).err
    (pool.root / "log").chmod(0o777)
    typed("daemon", pool.root, "--shared-group", code=2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("submit", "POOL", "--nodes", "0"), "--num-nodes: must be"),
        (("submit", "POOL", "--nodes", "2:3"), "give one number"),
        (("submit", "POOL", "toy.task=3"), "did you mean toy.tasks?"),
        (("submit", "nowhere"), "not a pool"),
        (("jobs", "stop", "POOL"), "give POOL_DIR N"),
        (("jobs", "stop", "POOL", "7"), "no such job"),
        (("daemon", "POOL", "--dead", "0"), "--dead 0"),
    ],
)
def test_wrong_command_lines_say_what_to_do(pool: Pool, words: tuple[str, ...], says: str) -> None:
    assert says in typed(*(pool.root if word == "POOL" else word for word in words), code=2).err


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

    def until(self, holds: Callable[[Queue], bool]) -> Queue:
        def queue() -> Queue | None:
            found = Pool(self.root).read() if (self.root / "log").is_dir() else None
            return found if found is not None and holds(found) else None

        def said() -> str:
            paths = (*self.root.parent.glob("host*/said.txt"), *self.root.glob("logs/*/*"))
            return "\n".join(path.read_text() for path in paths)

        return until(queue, said, deadline_s=DEADLINE_S)

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
    typed("submit", root, "--nodes", nodes, *calm, *words)


def starts(log_path: Path) -> list[StartName]:
    """The starts of a run's nodes."""
    return sorted(START.parse_all(PosixStore().names(RunPaths(log_path).joins)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_outlives_the_daemons_and_ends_when_it_is_told(daemons: Daemons, tmp_path: Path) -> None:
    root, run = daemons.root, tmp_path / "run"
    daemons.start(0, 1, dead_s=15.0)
    daemons.until(lambda queue: len(queue.hosts) == 2)
    submit(root, "--log-path", str(run), nodes=2)
    # Not before: as long as one node knows of no other, the second job would go first.
    daemons.until(lambda queue: bool(queue.jobs[1].places))
    submit(root, "--priority", "3")
    daemons.until(lambda queue: len(starts(run)) == 2)
    typed("jobs", "stop", root, "2")
    daemons.until(lambda queue: queue.jobs[2].word == "stopped")
    # Its guard ends what a daemon ran, however the daemon ended; and the next one there takes it up again.
    assert daemons.end(1, signal.SIGKILL) == -signal.SIGKILL
    daemons.start(1, dead_s=15.0)
    daemons.until(lambda queue: len(starts(run)) >= 3)
    typed("jobs", "stop", root, "1")
    daemons.until(lambda queue: queue.jobs[1].word == "stopped")
    daemons.until(lambda queue: leftovers(run) == {})
    submit(root, "--iterations", "1", nodes=2)
    daemons.until(lambda queue: queue.jobs[3].word == "finished")
    submit(root)
    third = root / "runs" / "job-000004"
    daemons.until(lambda queue: len(starts(third)) == 1)
    assert [daemons.end(number, signal.SIGINT) for number in (0, 1)] == [130, 130]
    daemons.until(lambda queue: leftovers(third) == {})
    # It is in nobody's hands, and not over.
    assert Pool(root).read().jobs[4].word == "running"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_jobs_on_three_nodes_of_which_one_dies(daemons: Daemons) -> None:
    daemons.start(0, 1, 2, dead_s=15.0)
    daemons.until(lambda queue: len(queue.hosts) == 3)
    for number in range(10):
        submit(daemons.root, "--iterations", "1", "--priority", str(number % 3), nodes=1 + number % 2)
    daemons.until(lambda queue: any(state.word == "finished" for state in queue.jobs.values()))
    victim = 2
    daemons.until(lambda queue: queue.place_of(victim) is not None)
    # Whichever of the processes is the pool's node 2.
    for number, process in daemons.processes.items():
        said = (daemons.root.parent / f"host{number}" / "said.txt").read_text()
        if f"as node {victim};" in said:
            process.kill()
    daemons.until(lambda queue: all(state.word == "finished" for state in queue.jobs.values()))
