"""A node's work: each kind is carried out, a program is watched, a job can be cancelled at any moment."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import until

from fsbarrier.engine.replicas import Keeper
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes.worker_contract import WorkerFiles
from fsbarrier.program import (
    Command,
    Context,
    OpenRendezvous,
    PublishFile,
    PublishWeights,
    ServeWeights,
    Steps,
    Value,
    Work,
)
from fsbarrier.protocol.state import Node, RowPart, WorkReport
from fsbarrier.run import work_kinds, worker_program
from fsbarrier.run.job import Cancelled, NodeUnfit, RowJob, Workplace
from fsbarrier.run.job_runner import JobRunner, failure
from fsbarrier.run.worker_program import program_name
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files, owned, reading
from fsbarrier.store.retry import Backoff

WRITES_RESULT = "import json, sys; spec = json.load(open(sys.argv[1])); json.dump({'got': spec['n']}, open(spec['result'], 'w'))"


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(
        engines=cast(Any, None),
        work_dir=tmp_path / "work",
        log_dir=tmp_path / "logs",
        log_path=tmp_path,
        stall_timeout_s=60.0,
        grace_s=0.1,
    )


def context(*, newest: int = 1) -> Context:
    phase = SimpleNamespace(name="update", each=None, leader=None)
    fields = {
        "phase": phase,
        "node_rank": 3,
        "generation": 1,
        "newest": lambda: newest,
        "settings": Settings(),
        "members": (),
        "joins": {},
        "model": None,
        "leader": 3,
        "published": None,
        "iteration": 5,
        "run_id": "run",
    }
    return cast(Context, SimpleNamespace(**fields))


def python(code: str, **more: Any) -> Command:
    return Command((sys.executable, "-c", code, "{spec}"), "update.log", **more)


def test_results_of_steps_are_merged_and_all_their_events_are_kept(place: Workplace) -> None:
    both, job = Steps((Value({"a": 1}, [{"event": "x"}]), Value({"b": 2}, [{"event": "y"}]))), RowJob()
    done = work_kinds.carry_out(both, context(), job, place)
    assert done == {"a": 1, "b": 2} and job.events == [{"event": "x"}, {"event": "y"}]


def test_a_program_reads_its_spec_and_leaves_its_result(place: Workplace) -> None:
    place.engine_access = [{"url": "http://here"}]
    place.engines = cast(Any, SimpleNamespace(kept_alive=lambda: Keeper([])))
    wanted = python(WRITES_RESULT, spec={"n": "{engine}"}, extra={"known": True}, event="ended")
    job = RowJob()
    done = work_kinds.carry_out(wanted, context(), job, place)
    assert done == {"known": True, "got": [{"url": "http://here"}]}
    assert job.events == [{"event": "ended", "known": True}]
    assert not list(place.work_dir.iterdir())


def test_a_program_that_fails_is_quoted_with_the_end_of_its_log(place: Workplace) -> None:
    with pytest.raises(
        ProgramFailed, match=r"(?s)ended with exit code 7\n\(from .*update\.log\)\nthe reason"
    ):
        work_kinds.carry_out(python("print('the reason'); raise SystemExit(7)"), context(), RowJob(), place)
    with pytest.raises(ProgramFailed, match="ended well but left no result"):
        work_kinds.carry_out(python("pass"), context(), RowJob(), place)


def test_a_program_without_a_sign_of_life_is_ended(place: Workplace) -> None:
    place.stall_timeout_s = 0.3
    with pytest.raises(
        ProgramFailed, match=r"no progress for 0\.3 s \(coordination\.stall_timeout_s\); update was ended"
    ):
        work_kinds.carry_out(python("import threading; threading.Event().wait()"), context(), RowJob(), place)


def test_where_no_spec_can_be_written_it_is_the_node_that_fails(place: Workplace) -> None:
    place.work_dir.write_text("no folder")
    with pytest.raises(NodeUnfit, match=r"node 3: its temporary folder .* cannot be written to"):
        work_kinds.carry_out(python("pass"), context(), RowJob(), place)


def test_an_older_generation_publishes_nothing(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "made").write_text("new")
    publish = PublishFile(tmp_path / "made", tmp_path / "public")
    with pytest.raises(ProgramFailed, match="generation 1 has ended"):
        work_kinds.carry_out(publish, context(newest=2), RowJob(), place)
    assert not (tmp_path / "public").exists()
    assert work_kinds.carry_out(publish, context(), RowJob(), place) == {}
    assert (tmp_path / "public").read_text() == "new"


def test_a_directory_that_hangs_makes_the_node_unfit(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is stuck in a read that nothing ends: after the stall time-out the node ends, whatever other nodes do."""
    publish = policy(tmp_path)
    goes_on, open_below = threading.Event(), reading.open_below

    def hang(root: Path, path: Path) -> int:
        goes_on.wait()
        return open_below(root, path)

    monkeypatch.setattr(reading, "open_below", hang)
    place.stall_timeout_s = 0.2
    runner, woken = jobs(place, lambda context: publish)
    runner.launch(NODE, RowPart.EACH)
    until(lambda: runner.unfit is not None, lives=lambda: runner.report() is None)
    assert runner.unfit is not None and runner.unfit.exit_code == 3
    assert re.search(r"publishing policy-000001.g0001: no progress for 0.2 s .* hang\?", str(runner.unfit))
    goes_on.set()
    assert woken.wait(60) and runner.report() is not None, "what goes on after all is reported as ever"


def policy(tmp_path: Path) -> PublishWeights:
    folder = tmp_path / "checkpoints" / "policy-000001.g0001"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"w" * 100)
    checkpoints.write_manifest(folder, 1)
    return PublishWeights(folder, 1, keep=3)


def test_a_leader_that_wakes_late_does_not_move_the_model_back(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, check_sizes, woken = policy(tmp_path), checkpoints.check_sizes, context()

    def check(*arguments: Any) -> Any:
        # The others have gone on while this node checked its policy version.
        monkeypatch.setattr(woken, "newest", lambda: 2)
        return check_sizes(*arguments)

    monkeypatch.setattr(checkpoints, "check_sizes", check)
    with pytest.raises(ProgramFailed, match="generation 1 has ended"):
        work_kinds.carry_out(publish, woken, RowJob(), place)
    assert not (tmp_path / "model.pt").is_symlink()
    assert work_kinds.carry_out(publish, context(newest=1), RowJob(), place)["policy_version"] == 1


def made(log_path: Path, version: int, generation: int) -> Path:
    folder = log_path / "checkpoints" / f"policy-{version:06d}.g{generation:04d}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"%d" % version)
    checkpoints.write_manifest(folder, version)
    return folder


@pytest.mark.parametrize("symlinks", [True, False])
def test_the_model_never_goes_back_to_an_older_version(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symlinks: bool
) -> None:
    if not symlinks:
        monkeypatch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(PermissionError(1, "none here")))
    six, seven, again = made(tmp_path, 6, 2), made(tmp_path, 7, 2), made(tmp_path, 7, 3)
    for folder, version in ((seven, 7), (again, 7)):
        publish = PublishWeights(folder, version, keep=0)
        assert work_kinds.carry_out(publish, context(), RowJob(), place)["folder"] == str(folder)
    for folder, version in ((seven, 7), (six, 6)):
        with pytest.raises(ProgramFailed, match=r"names policy-000007.g0003 already"):
            work_kinds.carry_out(PublishWeights(folder, version, keep=0), context(), RowJob(), place)
    assert (tmp_path / "model.pt" / "weights").read_bytes() == b"7"
    # what was not published is not left lying either
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model.pt"]


def test_a_copied_model_is_replaced_as_a_whole(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(PermissionError(1, "none here")))
    seen, remove = list[bytes](), owned.remove

    def removing(folder: Path) -> None:
        seen.append((tmp_path / "model.pt" / "weights").read_bytes())
        remove(folder)

    monkeypatch.setattr(owned, "remove", removing)
    for version in (6, 7):
        publish = PublishWeights(made(tmp_path, version, 2), version, keep=0)
        work_kinds.carry_out(publish, context(), RowJob(), place)
    assert seen == [b"7"], "a file of the old copy is removed only once the new one has its name"


def test_a_lost_reply_to_the_publication_is_no_failure(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    six, replace = made(tmp_path, 6, 2), os.replace

    def lost(source: Path, target: Path) -> None:
        replace(source, target)
        if Path(target).name == "model.pt":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", lost)
    work_kinds.carry_out(PublishWeights(six, 6, keep=0), context(), RowJob(), place)
    assert (tmp_path / "model.pt" / "weights").read_bytes() == b"6"


@pytest.mark.parametrize("made_before", [True, False])
def test_a_mount_that_fails_for_a_moment_has_symbolic_links_all_the_same(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: bool
) -> None:
    six, symlink, failures = made(tmp_path, 6, 2), os.symlink, [errno.EIO]

    def failing(target: str, name: Path) -> None:
        if made_before or not failures:
            symlink(target, name)
        if failures:
            raise OSError(failures.pop(), "once")

    monkeypatch.setattr(os, "symlink", failing)
    work_kinds.carry_out(PublishWeights(six, 6, keep=0), context(), RowJob(), place)
    assert (tmp_path / "model.pt").is_symlink()


@pytest.mark.parametrize("step", ["link", "copy", "retain", "old trajectories"])
def test_the_last_look_is_directly_before_each_public_step(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A node that sleeps before any of these steps finds a newer generation when it wakes up, and leaves them."""
    woken, folder = context(), made(tmp_path, 1, 1)

    def goes_on_without_us(module: Any, name: str) -> None:
        before = getattr(module, name)

        def act(*args: Any, **more: Any) -> Any:
            result = before(*args, **more)
            monkeypatch.setattr(woken, "newest", lambda: 2)
            return result

        monkeypatch.setattr(module, name, act)

    work: Work = PublishWeights(folder, 1, keep=1, trained_on=1, keep_trajectories=1)
    if step == "link":
        goes_on_without_us(os, "symlink")
    elif step == "copy":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "none here")))
        (tmp_path / "merged").write_text("new")
        work = PublishFile(tmp_path / "merged", tmp_path / "public")
        goes_on_without_us(files, "open_new")
    elif step == "retain":
        goes_on_without_us(checkpoints, "publish_link")
        monkeypatch.setattr(retention, "remove_old_versions", lambda *_: pytest.fail("deleted all the same"))
    else:
        goes_on_without_us(retention, "remove_old_versions")
        monkeypatch.setattr(work_kinds.retention, "remove_old", lambda *_, **__: pytest.fail("deleted"))
    with pytest.raises(ProgramFailed, match="generation 1 has ended"):
        work_kinds.carry_out(work, woken, RowJob(), place)
    assert not (tmp_path / "public").exists()
    assert (tmp_path / "model.pt").exists() == (step in ("retain", "old trajectories"))


def test_checking_a_policy_version_can_be_cancelled(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job, reads = policy(tmp_path).folder, RowJob(), []

    def cancelled_after_three() -> None:
        reads.append(1)
        if len(reads) == 3:
            job.cancel.set()
        RowJob.stop_if_cancelled(job)

    monkeypatch.setattr(files, "READ_BYTES", 10)
    monkeypatch.setattr(job, "stop_if_cancelled", cancelled_after_three)
    served = engine_that_serves(place)
    with pytest.raises(Cancelled):
        work_kinds.carry_out(ServeWeights(folder / "model", 1), context(), job, place)
    assert len(reads) == 3 and not served


def engine_that_serves(place: Workplace) -> list[Path]:
    """What the node's engines are told to serve from now on."""
    served: list[Path] = []

    def ensure(folder: Path, version: int, **_: Any) -> Any:
        served.append(folder)
        return [SimpleNamespace(url="u", api_key="k", model="m", action="reloaded", seconds=1.0, note="")]

    place.engines = cast(Any, SimpleNamespace(ensure=ensure))
    return served


@pytest.mark.parametrize("name", ["weights", "config.json"])
def test_a_damaged_policy_version_is_never_served(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, served = policy(tmp_path).folder, engine_that_serves(place)
    path, serve = folder / "model" / name, ServeWeights(folder / "model", 1)
    path.write_bytes(b"w" * 100)
    checkpoints.write_manifest(folder, 1)
    path.write_bytes(b"w" * 99 + b"v")
    with pytest.raises(ProgramFailed, match=rf"{name} differs from what MANIFEST\.json says"):
        work_kinds.carry_out(serve, context(), RowJob(), place)
    assert not served
    path.write_bytes(b"w" * 100)
    work_kinds.carry_out(serve, context(), RowJob(), place)
    # Read once, and not before every rollout.
    monkeypatch.setattr(checkpoints, "verify", None)
    work_kinds.carry_out(serve, context(), RowJob(), place)
    assert served == [folder / "model"] * 2


def test_no_engine_loads_another_policy_than_the_one_that_was_published(
    place: Workplace, tmp_path: Path
) -> None:
    publish = policy(tmp_path)
    published = work_kinds.carry_out(publish, context(), RowJob(), place)["digest"]
    served, folder = engine_that_serves(place), publish.folder
    serve = ServeWeights(folder / "model", 1, policy=checkpoints.identity(folder.name, published))
    work_kinds.carry_out(serve, context(), RowJob(), place)
    (folder / "model" / "weights").write_bytes(b"v" * 100)
    checkpoints.write_manifest(folder, 1)
    with pytest.raises(ProgramFailed, match="holds another policy than was published"):
        work_kinds.carry_out(serve, context(), RowJob(), place)
    assert served == [folder / "model"]


@pytest.mark.parametrize("size", [0, 99, 101])
def test_a_policy_version_of_another_size_is_not_published(
    place: Workplace, tmp_path: Path, size: int
) -> None:
    publish = policy(tmp_path)
    (publish.folder / "model" / "weights").write_bytes(b"w" * size)
    with pytest.raises(ProgramFailed, match=rf"weights has {size} bytes; MANIFEST\.json says 100"):
        work_kinds.carry_out(publish, context(), RowJob(), place)
    assert not (tmp_path / "model.pt").is_symlink()


def test_what_the_engine_serves_with_is_kept_for_the_programs(place: Workplace, tmp_path: Path) -> None:
    infos = [
        SimpleNamespace(url=url, api_key="k", model="m", action="started", seconds=seconds, note="")
        for url, seconds in (("u", 1.0004), ("v", 2.5))
    ]
    job, asked = RowJob(), []

    def ensure(*arguments: Any, threads: int, cancel: Any, show: Any) -> Any:
        asked.append((*arguments, threads))
        show(1)
        assert job.progress == {"note": "engine: policy version 4, 1 ready"}
        return infos

    place.engines = cast(Any, SimpleNamespace(ensure=ensure))
    done = work_kinds.carry_out(ServeWeights(tmp_path, 4, threads=2), context(), job, place)
    assert asked == [(tmp_path, 4, 2)] and (done["engines"], done["engine_s"]) == (2, 2.5)
    assert [(line["replica"], line["serving"], line["engine_action"]) for line in job.events] == [
        (0, 4, "started"),
        (1, 4, "started"),
    ]
    assert place.engine_access == [{"url": url, "api_key": "k", "model": "m"} for url in ("u", "v")]


def test_what_listens_beyond_this_host_is_told_with_its_port(place: Workplace) -> None:
    job = RowJob()
    work_kinds.carry_out(OpenRendezvous(loopback=True), context(), job, place)
    assert job.events == []
    told = work_kinds.carry_out(OpenRendezvous(loopback=False), context(), job, place)
    assert job.events == [{"event": "listens", "port": told["port"]}]
    place.close_rendezvous()


def test_the_port_of_a_rendezvous_is_held_until_a_program_starts(place: Workplace) -> None:
    port = work_kinds.carry_out(OpenRendezvous(loopback=True), context(), RowJob(), place)["port"]
    assert place.rendezvous is not None and place.rendezvous.getsockname()[1] == port
    work_kinds.carry_out(python("pass", result=False), context(), RowJob(), place)
    assert place.rendezvous is None


def jobs(place: Workplace, each: Callable[[Context], Work]) -> tuple[JobRunner, threading.Event]:
    woken = threading.Event()
    seen = cast(Any, context())
    seen.phase.each = each
    return JobRunner(lambda node: cast(Context, seen), place, woken.set), woken


NODE = cast(Node, SimpleNamespace(rank=0, place=(SimpleNamespace(era=0), None)))


def test_a_job_reports_what_became_of_it(place: Workplace) -> None:
    def fail(context: Context) -> Work:
        raise ProgramFailed("first line\nof the log")

    for each, ok, value in (
        (lambda context: Value({"a": 1}), True, {"a": 1}),
        (fail, False, {"error": "first line", "log": ["of the log"]}),
        (lambda context: 1 / 0, False, {"error": "ZeroDivisionError: division by zero", "log": []}),
    ):
        running, woken = jobs(place, cast(Any, each))
        running.launch(NODE, RowPart.EACH)
        assert woken.wait(30)
        report = running.report()
        assert report is not None and (report.part, report.ok, report.value) == (RowPart.EACH, ok, value)


@pytest.mark.parametrize(
    ("each", "says"),
    [
        (partial(lambda work, context: work, None), "TypeError: partial returned NoneType, which is no work"),
        (lambda context: Value({}, cast(Any, 3)), "TypeError: the events of a Value"),
        (lambda context: Value({}, cast(Any, ["begun"])), "TypeError: the events of a Value"),
        (lambda context: Value({}, [{"name": "begun"}]), "TypeError: the events of a Value"),
        (
            lambda context: Value({}, [{"event": "node_lost"}]),
            "TypeError: the event 'node_lost' is one",
        ),
        (
            lambda context: Value({"text": "x" * (17 << 20)}),
            "TypeError: a result of 17825804 bytes; write it",
        ),
        (
            lambda context: Value({"deep": nested(200)}),
            "TypeError: a result that is nested more than 100 deep",
        ),
    ],
)
def test_a_function_of_ones_own_that_gives_no_result_has_failed(
    place: Workplace, each: Callable[[Context], Work], says: str
) -> None:
    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(30)
    report = running.report()
    assert report is not None and not report.ok
    assert report.value["error"].startswith(says)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_a_failure_s_message_is_no_larger_than_a_fact_may_be(place: Workplace) -> None:
    def fails(context: Context) -> Work:
        raise ValueError("x" * (70 << 20))

    running, woken = jobs(place, fails)
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(30)
    report = running.report()
    assert report is not None and report.value["error"].startswith("ValueError: xxx")
    assert len(str(report.value)) < 20_000


def test_a_cancelled_job_leaves_nothing_and_reports_nothing(place: Workplace) -> None:
    begun = threading.Event()

    def each(context: Context) -> Work:
        begun.set()
        return python("import threading; threading.Event().wait()")

    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert begun.wait(30)
    running.cancel()
    assert running.report() is None and not woken.is_set() and running.progress() == {}


def test_a_job_that_cannot_be_ended_ends_the_node(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: it hangs in the shared directory. The next generation's work must not begin beside it."""
    begun, let_go = threading.Event(), threading.Event()

    def each(context: Context) -> Work:
        begun.set()
        assert let_go.wait(60)
        return Value({})

    monkeypatch.setattr("fsbarrier.run.job_runner.CANCEL_S", 0.05)
    running, _ = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    thread = running._thread
    assert thread is not None and begun.wait(30)
    try:
        with pytest.raises(StoreError, match="does not end within"):
            running.cancel()
    finally:
        let_go.set()
        thread.join()


def test_a_last_look_that_fails_for_a_moment_is_no_failure(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, fails = context(), [OSError(errno.EIO, "for a moment")]

    def newest() -> int:
        if fails:
            raise fails.pop()
        return 1

    monkeypatch.setattr(here, "newest", newest)
    work_kinds.carry_out(PublishWeights(made(tmp_path, 6, 1), 6, keep=0), here, RowJob(), place)
    assert (tmp_path / "model.pt" / "weights").read_bytes() == b"6" and not fails


@pytest.mark.parametrize("name", ["model.pt", "public"])
def test_a_mount_that_fails_while_something_is_made_public_costs_no_attempt(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As a server that is restarted: for longer than a moment each try fails, and then one succeeds."""
    replace, tries = os.replace, []

    def failing(source: Path, target: Path) -> None:
        if Path(target).name == name:
            tries.append(target)
            if len(tries) < 4:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    (tmp_path / "merged").write_text("new")
    of_name: dict[str, Work] = {
        "model.pt": PublishWeights(made(tmp_path, 6, 1), 6, keep=0),
        "public": PublishFile(tmp_path / "merged", tmp_path / "public"),
    }
    work_kinds.carry_out(of_name[name], context(), RowJob(), place)
    assert len(tries) == 4 and (tmp_path / name).exists()
    assert not [left for left in os.listdir(tmp_path) if left.startswith(".")]


def of_ours(place: Workplace, monkeypatch: pytest.MonkeyPatch, fails_times: int) -> Command:
    """A program of fsbarrier's own: the shared directory fails at its first starts."""
    monkeypatch.setattr(worker_program, "program_name", lambda argv: "fsbarrier.workers.some")
    monkeypatch.setattr(worker_program, "AGAIN", Backoff(0.01, 0.01))
    code = f"""
import json, pathlib, sys
starts = pathlib.Path({str(place.log_path / "starts")!r})
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= {fails_times}:
    print("part: No space left on device", file=sys.stderr)
    sys.exit(3)
spec = json.load(open(sys.argv[1]))
json.dump({{"got": 1}}, open(spec["result"], "w"))
"""
    return python(code)


def test_a_program_is_started_again_while_the_shared_directory_fails(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program has failed, so no attempt is used up."""
    job = RowJob()
    done = work_kinds.carry_out(of_ours(place, monkeypatch, 2), context(), job, place)
    assert done["got"] == 1
    ended = "fsbarrier.workers.some ended with exit code 3: part: No space left on device"
    why = f"{ended}; {place.log_path} fails or is full"
    assert job.events == [{"event": "program_restarted", "times": 2, "why": why}]


def test_where_the_shared_directory_goes_on_failing_the_node_is_unfit_and_not_the_program(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.outage_s = 0.2
    with pytest.raises(NodeUnfit, match=r"(?s)node 3: update: .* exit code 3.*No space left on device"):
        work_kinds.carry_out(of_ours(place, monkeypatch, 10**6), context(), RowJob(), place)


def test_a_program_that_waits_to_be_started_again_can_be_cancelled(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, work = RowJob(), of_ours(place, monkeypatch, 10**6)
    monkeypatch.setattr(worker_program, "AGAIN", Backoff(60.0, 60.0))
    threading.Thread(target=lambda: until((place.log_path / "starts").exists) and job.cancel.set()).start()
    with pytest.raises(Cancelled):
        work_kinds.carry_out(work, context(), job, place)


def test_a_log_that_cannot_be_opened_is_no_failure_of_the_program(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, fails = files.open_append, [OSError(errno.EIO, "for a moment")]

    def open_append(path: Path) -> int:
        if fails:
            raise fails.pop()
        return append(path)

    monkeypatch.setattr(files, "open_append", open_append)
    done = work_kinds.carry_out(of_ours(place, monkeypatch, 0), context(), RowJob(), place)
    assert done["got"] == 1 and not fails


def test_a_node_that_may_not_use_a_file_ends_with_the_code_of_a_failed_filesystem(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of its attempts; nobody waits for the permission to come."""
    monkeypatch.setattr(worker_program, "program_name", lambda argv: "fsbarrier.workers.some")
    denied = python("import sys; print('/shared/part: Permission denied'); sys.exit(77)")
    with pytest.raises(
        StoreError, match="ended with exit code 77: /shared/part: Permission denied"
    ) as caught:
        work_kinds.carry_out(denied, context(), RowJob(), place)
    assert not isinstance(caught.value, NodeUnfit)
    assert failure(str(caught.value), code=caught.value.exit_code)["exit_code"] == 3


def test_a_program_of_the_user_s_own_has_failed_whatever_its_exit_code(place: Workplace) -> None:
    with pytest.raises(ProgramFailed, match=r"python.* ended with exit code 3"):
        work_kinds.carry_out(python("import sys; sys.exit(3)"), context(), RowJob(), place)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("OSError(errno.ENOSPC, 'full')", 3),
        ("OSError(errno.EROFS, 'read-only for a while')", 3),
        ("OSError(errno.ENOTCONN, 'gone', '/shared/part')", 3),
        ("OSError(errno.ENOTCONN, 'a socket')", 1),
        ("FileNotFoundError(errno.ENOENT, 'none', '/shared/part')", 1),
        ("PermissionError(errno.EACCES, 'no', '/shared/part')", 77),
        ("PermissionError(errno.EPERM, 'no file')", 1),
        ("caused(StoreError('part'), OSError(errno.EIO, 'fails'))", 3),
        ("caused(StoreError('part'), PermissionError(errno.EACCES, 'no'))", 1),
        ("StoreError('part: only 3 of 5 acknowledged bytes are valid')", 1),
        ("UsageError('no')", 2),
    ],
)
def test_a_program_says_by_its_exit_code_that_the_mount_failed(
    tmp_path: Path, raised: str, code: int
) -> None:
    """Also where its log lies on that mount, so that it cannot say anything else."""
    program = f"""
import errno, os, sys
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.processes.worker_contract import run_worker
def caused(error, cause):
    error.__cause__ = cause
    return error
def main(spec, settings, progress):
    raise {raised}
sys.exit(run_worker(main))
"""
    spec = WorkerFiles(tmp_path)
    spec.write_spec({"settings": Settings().as_json()})
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program, "--spec", str(spec.spec)], stderr=full)
    assert ended.returncode == code


def test_no_work_begins_for_a_cancelled_job(place: Workplace) -> None:
    job = RowJob()
    job.cancel.set()
    with pytest.raises(Cancelled):
        work_kinds.carry_out(Value({}), context(), job, place)


def test_a_job_that_ends_while_it_is_cancelled_reports_nothing(place: Workplace) -> None:
    """Its failure would count as one of the row that the node is in by then."""
    begun = threading.Event()

    def each(context: Context) -> Work:
        begun.set()
        assert running._job is not None and running._job.cancel.wait(30)
        raise ProgramFailed("too late")

    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert begun.wait(30)
    running.cancel()
    assert running.report() is None and not woken.is_set()


def test_a_job_that_was_about_to_report_when_it_was_cancelled_reports_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    about_to, waited_for = threading.Event(), threading.Event()

    def report(*about: Any) -> WorkReport:
        about_to.set()
        assert waited_for.wait(30)
        return WorkReport(*about)

    monkeypatch.setattr("fsbarrier.run.job_runner.WorkReport", report)
    running, _ = jobs(place, lambda context: Value({}))
    running.launch(NODE, RowPart.EACH)
    thread = running._thread
    assert thread is not None and about_to.wait(30)
    join = thread.join

    def joined(timeout: float | None = None) -> None:
        waited_for.set()
        join(timeout)

    monkeypatch.setattr(thread, "join", joined)
    running.cancel()
    assert running.report() is None


@pytest.mark.parametrize("error", [OSError("stale"), StoreError("p.part: cannot read it: stale")], ids=repr)
def test_a_directory_that_fails_for_a_moment_is_asked_again(place: Workplace, error: Exception) -> None:
    answers = iter([error, Value({"a": 1})])

    def each(context: Context) -> Work:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(30)
    report = running.report()
    assert report is not None and report.value == {"a": 1}


@pytest.mark.parametrize("error", [OSError("stale"), StoreError("p.part: cannot read it: stale")], ids=repr)
def test_a_directory_that_goes_on_failing_is_the_nodes_fault_and_no_programs(
    place: Workplace, error: Exception
) -> None:
    place.outage_s = 0.0

    def each(context: Context) -> Work:
        raise error

    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(30)
    assert "cannot begin its work" in str(running.unfit) and running.report() is None


def test_a_cancelled_job_stops_asking(place: Workplace) -> None:
    job = RowJob()
    job.cancel.set()

    def ask() -> None:
        raise OSError("stale")

    with pytest.raises(Cancelled):
        place.patiently(job, ask)


def test_a_job_asks_a_failing_mount_as_long_as_its_node_bears_an_outage(place: Workplace) -> None:
    asked: list[None] = []
    place.outage_s = 0.0

    def ask() -> None:
        asked.append(None)
        raise OSError("stale")

    with pytest.raises(OSError, match="stale"):
        place.patiently(RowJob(), ask)
    assert len(asked) == 1


def test_an_unfit_node_says_so(place: Workplace) -> None:
    place.work_dir.write_text("no folder")
    running, woken = jobs(place, lambda context: python("pass"))
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(30)
    assert isinstance(running.unfit, StoreError) and running.report() is None


def test_names_and_failures_as_people_read_them() -> None:
    assert program_name(["python", "-m", "torch.distributed.run", "-m", "fsbarrier.workers.update"]) == (
        "fsbarrier.workers.update"
    )
    assert program_name(["/usr/bin/my-trainer", "--x"]) == "my-trainer"
    assert failure("") == {"error": "failed", "log": []}
    said = failure("\n".join(["why", "(from x.log)", *map(str, range(30))]))
    assert said == {"error": "why", "log": ["(from x.log)", *map(str, range(10, 30))]}


def test_a_job_ends_before_the_next_one_begins_and_its_report_goes(place: Workplace) -> None:
    order: list[str] = []
    begun = threading.Event()

    def first(context: Context) -> Work:
        begun.set()
        assert running._job is not None
        job = running._job
        job.cancel.wait(30)
        order.append("the first ended")
        return Value({"of": "the first"})

    def second(context: Context) -> Work:
        order.append("the second began")
        return Value({"of": "the second"})

    running, woken = jobs(place, first)
    running.launch(NODE, RowPart.EACH)
    assert begun.wait(30)
    running.make_context = jobs(place, second)[0].make_context
    running.launch(NODE, RowPart.LEADER)
    assert order[0] == "the first ended"
    # What the second row asks for is built by `leader`, which is missing here: its report is a failure, and not the first one's value.
    assert woken.wait(30)
    report = running.report()
    assert report is not None and report.part is RowPart.LEADER and report.value.get("of") != "the first"
