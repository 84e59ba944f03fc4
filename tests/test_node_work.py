"""A node's work: each call of a row is carried out, a program is watched, a job can be cancelled at any moment."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from other_user import needs_root, start_as_other
from waiting import DEADLINE_S, until

from fsbarrier.context import Context
from fsbarrier.decisions import JsonRecord
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.network.listening import LOOPBACK
from fsbarrier.network.this_host import candidate_addresses
from fsbarrier.node import Node as RowNode
from fsbarrier.node import Publication, Weights
from fsbarrier.processes.worker_contract import WorkerFiles
from fsbarrier.program import Phase
from fsbarrier.protocol.state import Node, RowPart
from fsbarrier.run import worker_program
from fsbarrier.run.job import NodeUnfit, RowJob, Workplace
from fsbarrier.run.job_runner import JobRunner, failure
from fsbarrier.run.working_node import WorkingNode
from fsbarrier.rundir import checkpoints, known_logprobs, retention
from fsbarrier.rundir.known_logprobs import KnownLogprobs, KnownSequence
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import Launch, Spec
from fsbarrier.store import reading


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


def context(*, newest: Callable[[], int] = lambda: 1, **facts: Any) -> Context:
    known: dict[str, Any] = {"phase": Phase(10, "update"), "decisions": {}, "newest": newest, **facts}
    paths = RunPaths(Path("/run"))
    return Context("run", paths, Settings(), {}, None, 3, 1, (), 3, 1, 5, 0, **known)


@dataclass(frozen=True)
class Got(JsonRecord):
    got: int = 0


@dataclass(frozen=True)
class OwnSpec(Spec[Got]):
    """Of a program of the test."""


def python(code: str, **more: Any) -> Launch:
    return Launch((sys.executable, "-c", code, "{spec}"), "update.log", **more)


def node_at(place: Workplace, seen: Any = None, job: RowJob | None = None) -> WorkingNode:
    return WorkingNode(seen or context(), job or RowJob(), place)


def run(launch: Launch, place: Workplace, job: RowJob | None = None) -> Got:
    return node_at(place, job=job).run(OwnSpec(context().identity), launch)


def test_a_program_that_fails_is_quoted_with_the_end_of_its_log(place: Workplace) -> None:
    with pytest.raises(
        ProgramFailed, match=r"(?s)ended with exit code 7\n\(from .*update\.log\)\nthe reason"
    ):
        run(python("print('the reason'); raise SystemExit(7)"), place)
    with pytest.raises(ProgramFailed, match="ended well but left no result"):
        run(python("pass"), place)


def test_a_program_without_a_sign_of_life_is_ended(place: Workplace) -> None:
    place.stall_timeout_s = 0.3
    with pytest.raises(
        ProgramFailed, match=r"no progress for 0\.3 s \(coordination\.stall_timeout_s\); update was ended"
    ):
        run(python("import threading; threading.Event().wait()"), place)


def test_a_log_that_grows_is_a_sign_of_life(place: Workplace) -> None:
    """A trainer of one's own writes no progress. Here its time passes with its log alone: 40 s a line, of 60 s that it may be silent."""
    log = place.log_dir / "update.log"
    may_write = place.log_path / "may-write"

    def clock() -> float:
        lines = log.read_text().count("a line") if log.exists() else 0
        may_write.write_text(str(lines + 1))
        return 40.0 * lines

    code = f"""
import json, pathlib, sys
lines, may_write = 0, pathlib.Path({str(may_write)!r})
while lines < 6:
    if may_write.exists() and (may_write.read_text() or "0") > str(lines):
        lines += 1
        print("a line", flush=True)
spec = json.load(open(sys.argv[1]))
json.dump({{"got": lines}}, open(spec["result"], "w"))
"""
    assert run(python(code), place, RowJob(clock=clock)).got == 6


def test_where_no_spec_can_be_written_it_is_the_node_that_fails(place: Workplace) -> None:
    place.work_dir.write_text("no folder")
    with pytest.raises(NodeUnfit, match=r"node 3: its temporary folder .* cannot be written to"):
        run(python("pass"), place)


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
    runner, woken = jobs(place, lambda node: node.publish_weights(publish))
    runner.launch(NODE, RowPart.EACH)
    until(lambda: runner.unfit() is not None, lives=lambda: runner.report is None)
    unfit = runner.unfit()
    assert unfit is not None and unfit.exit_code == 3
    assert re.search(r"publishing policy-000001.g0001: no progress for 0.2 s .* hang\?", str(unfit))
    goes_on.set()
    assert woken.wait(DEADLINE_S) and runner.report is not None, "what goes on after all is reported as ever"


def policy(tmp_path: Path) -> Publication:
    folder = tmp_path / "checkpoints" / "policy-000001.g0001"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"w" * 100)
    checkpoints.write_manifest(folder, 1)
    return Publication(folder, 1, keep=3)


def made(log_path: Path, version: int, generation: int) -> Path:
    folder = log_path / "checkpoints" / f"policy-{version:06d}.g{generation:04d}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_bytes(b"%d" % version)
    checkpoints.write_manifest(folder, version)
    return folder


def test_the_model_never_goes_back_to_an_older_version(place: Workplace, tmp_path: Path) -> None:
    six, seven, again = made(tmp_path, 6, 2), made(tmp_path, 7, 2), made(tmp_path, 7, 3)
    for folder, version in ((seven, 7), (again, 7)):
        publish = Publication(folder, version, keep=0)
        assert node_at(place).publish_weights(publish).folder == folder.name
    for folder, version in ((seven, 7), (six, 6)):
        with pytest.raises(ProgramFailed, match=r"names policy-000007.g0003 already"):
            node_at(place).publish_weights(Publication(folder, version, keep=0))
    assert (tmp_path / "model.pt" / "weights").read_bytes() == b"7"
    # what was not published is not left lying either
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model.pt"]


@pytest.mark.parametrize("step", ["model", "file", "retain", "old trajectories"])
def test_the_last_look_is_directly_before_each_public_step(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A node that sleeps before any of these steps finds a newer generation when it wakes up, and leaves them."""
    newest = [1]
    woken, folder = context(newest=lambda: newest[0]), made(tmp_path, 1, 1)

    def goes_on_without_us(module: Any, name: str) -> None:
        before = getattr(module, name)

        def act(*args: Any, **more: Any) -> Any:
            result = before(*args, **more)
            newest[0] = 2
            return result

        monkeypatch.setattr(module, name, act)

    publication = Publication(folder, 1, keep=1, trained_on=1, keep_batches=1, keep_trajectories=1)
    if step == "model":
        goes_on_without_us(os, "symlink")
    elif step == "file":
        (tmp_path / "merged").write_text("new")
        goes_on_without_us(os, "link")
    elif step == "retain":
        goes_on_without_us(checkpoints, "publish_link")
        monkeypatch.setattr(retention, "remove_old_versions", lambda *_: pytest.fail("deleted all the same"))
    else:
        goes_on_without_us(retention, "remove_old_versions")
        monkeypatch.setattr(retention, "remove_old", lambda *_, **__: pytest.fail("deleted"))
    with pytest.raises(ProgramFailed, match="generation 1 has ended"):
        if step == "file":
            node_at(place, woken).publish_file(tmp_path / "merged", tmp_path / "public")
        else:
            node_at(place, woken).publish_weights(publication)
    assert not (tmp_path / "public").exists()
    assert (tmp_path / "model.pt").exists() == (step in ("retain", "old trajectories"))


def engine_that_serves(place: Workplace) -> list[Path]:
    """What the node's engines are told to serve from now on."""
    served: list[Path] = []

    def ensure(folder: Path, version: int, **_: Any) -> Any:
        served.append(folder)
        info = {"url": f"u{len(served)}", "api_key": "k", "model": "m", "action": "reloaded"}
        return [SimpleNamespace(**info, seconds=1.0, note="")]

    place.engines = cast(Any, SimpleNamespace(ensure=ensure, use=lambda devices: None))
    return served


@pytest.mark.parametrize("name", ["weights", "config.json"])
def test_a_damaged_policy_version_is_never_served(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, served = policy(tmp_path).folder, engine_that_serves(place)
    path, weights = folder / "model" / name, Weights(folder / "model", 1)
    path.write_bytes(b"w" * 100)
    checkpoints.write_manifest(folder, 1)
    path.write_bytes(b"w" * 99 + b"v")
    with pytest.raises(ProgramFailed, match=rf"{name} differs from what MANIFEST\.json says"):
        node_at(place).serve(weights)
    assert not served
    path.write_bytes(b"w" * 100)
    node_at(place).serve(weights)
    # Read once, and not before every rollout.
    monkeypatch.setattr(checkpoints, "verify", None)
    engines = node_at(place).serve(weights)
    assert served == [folder / "model"] * 2
    # A server that was started again has another address.
    assert [engine.url for engine in engines] == ["u2"]


def test_no_engine_loads_another_policy_than_the_one_that_was_published(
    place: Workplace, tmp_path: Path
) -> None:
    publish = policy(tmp_path)
    published = node_at(place).publish_weights(publish).digest
    served, folder = engine_that_serves(place), publish.folder
    weights = Weights(folder / "model", 1, policy=checkpoints.identity(folder.name, published))
    node_at(place).serve(weights)
    (folder / "model" / "weights").write_bytes(b"v" * 100)
    checkpoints.write_manifest(folder, 1)
    with pytest.raises(ProgramFailed, match="holds another policy than was published"):
        node_at(place).serve(weights)
    assert served == [folder / "model"]


@pytest.mark.parametrize("limit", [None, 3.0])
def test_engines_are_compared_with_what_the_version_s_trainer_computed(
    place: Workplace, tmp_path: Path, limit: float | None
) -> None:
    """With the limit of today's settings, if there is one, so that a person can go on after a difference that is none."""
    folder, asked = policy(tmp_path).folder, list[Any]()

    def ensure(*_: Any, known: Any, **more: Any) -> Any:
        asked.append(known)
        info = {"url": "u", "api_key": "k", "model": "m", "action": "reloaded"}
        return [SimpleNamespace(**info, seconds=1.0, note="")]

    place.engines = cast(Any, SimpleNamespace(ensure=ensure, use=lambda devices: None))
    settings = Settings()
    settings = replace(settings, algorithm=replace(settings.algorithm, max_logprob_gap=limit))
    node, weights = node_at(place, replace(context(), settings=settings)), Weights(folder / "model", 1)
    node.serve(weights)
    told = KnownLogprobs(0.5, (KnownSequence((4, 7), (None, -1.25)),))
    (folder / known_logprobs.NAME).write_bytes(told.encode())
    checkpoints.write_manifest(folder, 1)
    node.serve(weights)
    assert asked == [None, replace(told, limit=limit or 0.5)]


@pytest.mark.parametrize("size", [0, 99, 101])
def test_a_policy_version_of_another_size_is_not_published(
    place: Workplace, tmp_path: Path, size: int
) -> None:
    publish = policy(tmp_path)
    (publish.folder / "model" / "weights").write_bytes(b"w" * size)
    with pytest.raises(ProgramFailed, match=rf"weights has {size} bytes; MANIFEST\.json says 100"):
        node_at(place).publish_weights(publish)
    assert not (tmp_path / "model.pt").is_symlink()


# Tries to listen on the port of somebody else, in each way that there is, and ends when it does.
SQUATS = """
import itertools, socket, sys
print("trying", flush=True)
for option, (family, host) in itertools.cycle(itertools.product((0, socket.SO_REUSEADDR, socket.SO_REUSEPORT),
        ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "")))):
    with socket.socket(family) as one:
        try:
            if option:
                one.setsockopt(socket.SOL_SOCKET, option, 1)
            one.bind((host, int(sys.argv[1])))
            one.listen()
            break
        except OSError:
            pass
"""
ANSWERS = """
import os, socket
held = [socket.socket(fileno=int(fd)) for fd in os.environ["FSBARRIER_LISTENING"].split(",")]
for one in held:
    one.accept()[0].sendall(b"the update")
assert open("/proc/%d/stat").read().split()[2] != "Z", "somebody else listens on the port"
"""


@needs_root
@pytest.mark.parametrize("addresses", [LOOPBACK, tuple(candidate_addresses())], ids=["one host", "several"])
def test_nobody_can_take_the_port_of_an_update_before_its_program(
    place: Workplace, addresses: tuple[str, ...]
) -> None:
    """Another user tries all the time. Who connected before the program ran is answered by it, on each address."""
    port = int(node_at(place).listen(addresses))
    with start_as_other(SQUATS, str(port)) as other, ExitStack() as peers:
        assert other.stdout is not None and other.stdout.readline() == "trying\n"
        # Of what this host does not know to be its own the last socket hears.
        others = () if addresses == LOOPBACK else LOOPBACK
        connected = [
            peers.enter_context(socket.create_connection((host, port))) for host in (*addresses, *others)
        ]
        node_at(place).command(python(ANSWERS % other.pid, listens=True))
        assert [peer.recv(99) for peer in connected] == [b"the update"] * len(connected)
        other.wait(DEADLINE_S)
    assert not place.rendezvous


def test_a_program_that_does_not_take_the_port_over_finds_it_free(place: Workplace) -> None:
    port = node_at(place).listen(LOOPBACK)
    listens = f"import socket; socket.create_server(('127.0.0.1', {port}))"
    node_at(place).command(python(listens))


def jobs(
    place: Workplace, each: Callable[[RowNode], object], **facts: Any
) -> tuple[JobRunner, threading.Event]:
    woken = threading.Event()
    seen = context(phase=Phase(10, "update", each=cast(Any, each)), **facts)
    return JobRunner(lambda node: seen, place, woken.set), woken


def run_on(node: RowNode, launch: Launch) -> object:
    return node.run(OwnSpec(context().identity), launch)


NODE = cast(Node, SimpleNamespace(rank=0, place=(SimpleNamespace(era=0), None)))


def test_a_cancelled_job_leaves_nothing_and_reports_nothing(place: Workplace) -> None:
    begun = threading.Event()

    def each(node: RowNode) -> object:
        begun.set()
        return run_on(node, python("import threading; threading.Event().wait()"))

    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert begun.wait(DEADLINE_S)
    running.cancel()
    assert running.report is None and not woken.is_set() and running.progress() == {}


def test_a_job_that_cannot_be_ended_ends_the_node(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: it hangs in the shared directory. The next generation's work must not begin beside it."""
    begun, let_go = threading.Event(), threading.Event()

    def each(node: RowNode) -> None:
        begun.set()
        assert let_go.wait(DEADLINE_S)

    monkeypatch.setattr("fsbarrier.run.job_runner.CANCEL_S", 0.05)
    running, _ = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    thread = running._thread
    assert thread is not None and begun.wait(DEADLINE_S)
    try:
        with pytest.raises(StoreError, match="does not end within"):
            running.cancel()
    finally:
        let_go.set()
        thread.join()


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
    if name == "public":
        node_at(place).publish_file(tmp_path / "merged", tmp_path / "public")
    else:
        node_at(place).publish_weights(Publication(made(tmp_path, 6, 1), 6, keep=0))
    assert len(tries) == 4 and (tmp_path / name).exists()
    assert not [left for left in os.listdir(tmp_path) if left.startswith(".")]


def of_ours(place: Workplace, monkeypatch: pytest.MonkeyPatch, fails_times: int) -> Launch:
    """A program of fsbarrier's own: the shared directory fails at its first starts."""
    monkeypatch.setattr(worker_program, "program_name", lambda argv: "fsbarrier.workers.some")
    code = f"""
import json, pathlib, sys
starts = pathlib.Path({str(place.log_path / "starts")!r})
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= {fails_times}:
    print("error: part: No space left on device", file=sys.stderr)
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
    assert run(of_ours(place, monkeypatch, 2), place, job).got == 1
    ended = "fsbarrier.workers.some ended with exit code 3: part: No space left on device"
    why = f"{ended}; {place.log_path} fails or is full"
    assert job.events == [{"event": "program_restarted", "times": 2, "why": why}]


def test_where_the_shared_directory_goes_on_failing_the_node_is_unfit_and_not_the_program(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.outage_s = 0.2
    with pytest.raises(NodeUnfit, match=r"(?s)node 3: update: .* exit code 3.*No space left on device"):
        run(of_ours(place, monkeypatch, 10**6), place)


def test_a_node_that_may_not_use_a_file_ends_with_the_code_of_a_failed_filesystem(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of its attempts; nobody waits for the permission to come."""
    monkeypatch.setattr(worker_program, "program_name", lambda argv: "fsbarrier.workers.some")
    denied = python("import sys; print('error: /shared/part: Permission denied'); sys.exit(77)")
    with pytest.raises(
        StoreError, match="ended with exit code 77: /shared/part: Permission denied"
    ) as caught:
        run(denied, place)
    assert not isinstance(caught.value, NodeUnfit)
    assert failure(str(caught.value), code=caught.value.exit_code)["exit_code"] == 3


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


def test_a_program_that_is_ended_while_python_ends_leaves_no_traceback(tmp_path: Path) -> None:
    """As a node's helper is at the end of every run, whose logs people read."""
    program = """
import atexit, os, signal, sys
from fsbarrier.processes.worker_contract import run_worker
def main(spec, settings, progress):
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    return {}
sys.exit(run_worker(main))
"""
    files = WorkerFiles(tmp_path)
    files.write_spec({"settings": Settings().as_json()})
    ended = subprocess.run([sys.executable, "-c", program, "--spec", str(files.spec)], capture_output=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, b"") and files.result.is_file()


def test_a_job_that_ends_while_it_is_cancelled_reports_nothing(place: Workplace) -> None:
    """Its failure would count as one of the row that the node is in by then."""
    begun = threading.Event()

    def each(node: RowNode) -> None:
        begun.set()
        assert running._job is not None and running._job.cancel.wait(DEADLINE_S)
        raise ProgramFailed("too late")

    running, woken = jobs(place, each)
    running.launch(NODE, RowPart.EACH)
    assert begun.wait(DEADLINE_S)
    running.cancel()
    assert running.report is None and not woken.is_set()


@pytest.mark.parametrize("error", [OSError("stale"), StoreError("p.part: cannot read it: stale")], ids=repr)
def test_a_directory_that_goes_on_failing_is_the_nodes_fault_and_no_programs(
    place: Workplace, error: Exception
) -> None:
    """A row's read is retried by itself: what the row has done before is not done again."""
    place.outage_s, begun = 0.1, list[str]()

    def reports(phase_name: str) -> Any:
        raise error

    def each(node: RowNode) -> object:
        begun.append("the row")
        return node.context.reports("train_rollout")

    running, woken = jobs(place, each, reports=reports)
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(DEADLINE_S)
    assert "cannot begin its work" in str(running.unfit()) and running.report is None
    assert begun == ["the row"]


def test_an_unfit_node_says_so(place: Workplace) -> None:
    place.work_dir.write_text("no folder")
    running, woken = jobs(place, lambda node: run_on(node, python("pass")))
    running.launch(NODE, RowPart.EACH)
    assert woken.wait(DEADLINE_S)
    assert isinstance(running.unfit(), StoreError) and running.report is None


def test_a_job_ends_before_the_next_one_begins_and_its_report_goes(place: Workplace) -> None:
    order: list[str] = []
    begun = threading.Event()

    def first(node: RowNode) -> dict[str, str]:
        begun.set()
        assert running._job is not None
        job = running._job
        job.cancel.wait(DEADLINE_S)
        order.append("the first ended")
        return {"of": "the first"}

    def second(node: RowNode) -> dict[str, str]:
        order.append("the second began")
        return {"of": "the second"}

    running, woken = jobs(place, first)
    running.launch(NODE, RowPart.EACH)
    assert begun.wait(DEADLINE_S)
    running.make_context = jobs(place, second)[0].make_context
    running.launch(NODE, RowPart.LEADER)
    assert order[0] == "the first ended"
    # What the second row asks for is built by `leader`, which is missing here: its report is a failure, and not the first one's value.
    assert woken.wait(DEADLINE_S)
    report = running.report
    assert report is not None and report.part is RowPart.LEADER and report.value.get("of") != "the first"
