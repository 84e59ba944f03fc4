"""A run directory in which somebody has put links, pipes, holes and nonsense: every command ends, and touches nothing outside."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster
from commands import typed
from fake_run import long_run
from trajectory_files import write_part

from fsbarrier.cli.commands import stop
from fsbarrier.errors import EXIT_INTERNAL, ProgramFailed
from fsbarrier.run.job import Surroundings
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.logs import last_lines_of_node
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import reading
from fsbarrier.trajectories import RankFileWriter, scan_rank_file

SECRET = "a canary that nobody may copy"


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_link(path: Path) -> None:
    path.symlink_to(path.with_name("outside"))


def as_sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def as_folder(path: Path) -> None:
    path.mkdir()


def as_socket(path: Path) -> None:
    import socket

    # The name of a socket must be short.
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
        one.bind(path.name)


KINDS = {
    "fifo": as_fifo,
    "device": as_device,
    "link": as_link,
    "sparse": as_sparse,
    "folder": as_folder,
    "socket": as_socket,
}


def policy(log_path: Path, number: int = 1) -> Path:
    folder = RunPaths(log_path).checkpoint(number, 1)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    checkpoints.write_manifest(folder, number)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_plain_file_is_opened_and_nothing_waits(kind: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text(SECRET)
    KINDS[kind](tmp_path / "file")
    with pytest.raises(OSError) as caught:
        reading.read_bytes(tmp_path / "file", reading.RECORD_BYTES)
    assert str(tmp_path / "file") in str(caught.value)


# --- policy versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "model/../../secret", "", "."])
def test_a_manifest_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    folder = policy(tmp_path)
    manifest = folder / checkpoints.MANIFEST
    listed = {"files": {name: {"bytes": 1, "sha256": "0"}}, "policy_version": 1}
    manifest.write_text(json.dumps(listed))
    with pytest.raises(ProgramFailed, match="no name inside the folder"):
        checkpoints.read_manifest(folder)


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
@pytest.mark.parametrize("where", [checkpoints.MANIFEST, "model/config.json", "model", "."])
def test_a_policy_version_is_read_from_plain_files_alone(kind: str, where: str, tmp_path: Path) -> None:
    folder = policy(tmp_path / "run")
    outside = tmp_path / "outside"
    (folder / where).rename(outside) if where != "." else folder.rename(outside)
    target = folder if where == "." else folder / where
    if kind == "link":
        target.symlink_to(outside)
    else:
        KINDS[kind](target)
    with pytest.raises(ProgramFailed, match=re.escape(str(folder))):
        checkpoints.verify(folder)


def test_old_policy_versions_are_not_removed_through_a_link(tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = [policy(run, number) for number in (1, 2, 3, 4)][-1]
    outside = policy(tmp_path / "elsewhere")
    gone = RunPaths(run).checkpoint(1, 1)
    gone.rename(tmp_path / "first")
    gone.symlink_to(outside)
    removed = retention.remove_old_versions(run, 2, newest)
    assert [folder.name for folder in removed] == [RunPaths(run).checkpoint(2, 1).name]
    assert (outside / checkpoints.MANIFEST).exists() and (outside / "model" / "config.json").exists()


# --- trajectory files ------------------------------------------------------------------------------------------------------


def memory_of(code: str, *words: str | Path) -> int:
    """What a process took at most, in bytes, to run this code; it may fail."""
    attempt = f"import resource, sys\ntry:\n exec({code!r})\nexcept Exception as e: print(type(e).__name__)\n"
    measured = f"{attempt}print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-c", measured, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * 1024


LOAD = "from pathlib import Path; from fsbarrier.trajectories import load; load(Path(sys.argv[1]))"


def test_a_sparse_trajectory_file_costs_no_memory(tmp_path: Path) -> None:
    """A file that says it has a group of almost a gigabyte, and has a terabyte of zeros."""
    data = write_part(tmp_path / "whole", [1]).read_bytes()
    group = scan_rank_file(tmp_path / "whole").groups[0]
    head = struct.pack("<4I", 10, (1 << 30) - 1, 0, 0)
    as_sparse(tmp_path / "sparse")
    with (tmp_path / "sparse").open("r+b") as stream:
        stream.write(data[: group.offset] + head + struct.pack("<I", zlib.crc32(head)))
    before = memory_of("pass")
    assert memory_of(LOAD, tmp_path / "sparse") - before < 200 << 20


# --- every command ---------------------------------------------------------------------------------------------------------

#: What of a run directory is put in the place of something hostile.
PLACES: dict[str, Callable[[RunPaths], Path]] = {
    "run.json": lambda paths: paths.record,
    "join": lambda paths: paths.join(0, 1),
    "beat": lambda paths: paths.beat(0, 1),
    "generation": lambda paths: paths.generation(1),
    "stop": lambda paths: paths.stop(1),
    "journal": lambda paths: paths.journal(0, 1),
    "log": lambda paths: paths.node_logs(1, 0) / "daemon.log",
    "part": lambda paths: paths.part("train", 1, 0, 1, 1),
    "merged": lambda paths: paths.merged("train", 1),
    "policy": lambda paths: paths.checkpoint(1, 1),
    "manifest": lambda paths: paths.checkpoint(1, 1) / checkpoints.MANIFEST,
    "model.pt": lambda paths: paths.served_model,
}
COMMANDS = (
    "status --no-watch",
    "status --no-watch --json",
    "logs",
    "report --out {out}/report.html",
    "export {out}/model",
    "export {out}/table.jsonl",
    "stop",
    "recover --iteration 1 --dry-run",
    "aggregate --iteration 1 --dry-run",
    "debug --out {out}/debug.tar.gz",
)


def each_place_and_kind() -> Iterator[object]:
    """All of them; each place with one kind in the everyday suite."""
    for number, place in enumerate(PLACES):
        for other, kind in enumerate(KINDS):
            everyday = number % len(KINDS) == other
            yield pytest.param(kind, place, marks=[] if everyday else pytest.mark.slow, id=f"{kind}-{place}")


@pytest.mark.parametrize(("kind", "place"), [*each_place_and_kind()])
def test_every_command_ends_and_touches_nothing_outside(
    kind: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody is there, and `stop` need not look long.
    monkeypatch.setattr(stop, "LEAST_S", 0.0)
    run = long_run(tmp_path / "run", 1, extra={"coordination.beat_s": 0.1}).log_path
    path = PLACES[place](RunPaths(run))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        path.rename(tmp_path / "was-there")
    else:
        path.unlink(missing_ok=True)
    (path.parent / "outside").write_text(SECRET)
    KINDS[kind](path)
    out = tmp_path / "out"
    out.mkdir()
    for command in COMMANDS:
        words = command.format(out=out).split()
        said = typed(*words, "--log-path", run, code=None)
        assert said.code != EXIT_INTERNAL, (command, said.err)
        shown = said.out + said.err + "".join(capfd.readouterr())
        assert SECRET not in shown and "\x1b" not in shown, command
        # It looks at neither of these.
        assert command != "stop" or place not in ("policy", "merged") or "no node of run" in shown
    for file in out.rglob("*"):
        if file.name.endswith(".tar.gz"):
            with tarfile.open(file) as tar:
                tar.extractall(out / "unpacked", filter="data")
    for file in out.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_holds_no_trajectories_and_stops_nobody(kind: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    folder = paths.trajectories("train")
    folder.mkdir(parents=True)
    (folder / "outside").write_text(SECRET)
    ours, theirs = paths.part("train", 1, 0, 1, 1), paths.part("train", 1, 1, 1, 1)
    with RankFileWriter(ours, header={"policy": "p"}) as writer:
        known = {
            "task_id": "t",
            "task_index": 3,
            "sample": 0,
            "reward": 1.0,
            "policy_version": 0,
            "node_rank": 0,
        }
        writer.append_group(3, [known])
        # Nothing could be sampled, so that another attempt has to try again.
        failed = {**known, "task_index": 4, "valid": False, "finish_reason": "error"}
        writer.append_group(4, [failed, {**failed, "sample": 1}])
    KINDS[kind](theirs)
    (part,) = Surroundings().parts_on_disk(paths, "train", 1)
    assert (part.tasks, part.unjudged) == ((3, 4), {4})


def test_logs_behind_a_link_are_not_this_runs(tmp_path: Path) -> None:
    paths, outside = long_run(tmp_path / "run", 2).paths, tmp_path / "outside"
    for planted, log in (
        (paths.logs / "attempt_8", "node_0/daemon.log"),
        (paths.logs / "attempt_9" / "node_1", "daemon.log"),
    ):
        (outside / log).parent.mkdir(parents=True, exist_ok=True)
        (outside / log).write_text(f"{SECRET}\n")
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.symlink_to(outside)
    assert last_lines_of_node(paths, 0, 9) == last_lines_of_node(paths, 1, 9) == []
    said = typed("logs", "--log-path", paths.root, code=None)
    assert SECRET not in said.out + said.err


# --- everything at once ---------------------------------------------------------------------------------------------------------

# Each test starts many commands, one after the other.

MOST_BYTES = 600 << 20
#: What a terminal would obey: a title, a colour, a link, a cleared screen, another direction of writing.
ORDERS = "\x1b]0;pwned\x07\x1b[31mred\x1b]8;;http://x\x1b\\link\x1b[2J\u202e"
ALL_COMMANDS = (
    "status --no-watch --log-path {run}",
    "status --no-watch --json --log-path {run}",
    "runs {parent}",
    "logs --log-path {run}",
    "logs --first-error --log-path {run}",
    "report --out {out}/report.html --csv {out}/csv --perfetto {out}/trace --prometheus {out}/prom --log-path {run}",
    "export {out}/model --log-path {run}",
    "export {out}/table.jsonl --log-path {run}",
    "recover --iteration 1 --log-path {run}",
    "aggregate --iteration 1 --log-path {run}",
    "stop --log-path {run}",
)


def hostile_lines(line: dict[str, object]) -> Iterator[bytes]:
    """What could stand in a journal, made from a line that does."""
    for changed in (
        {
            "phase_name": ORDERS,
            "event": "phase_started",
            "host": ORDERS,
            "error": ORDERS,
            "log": [ORDERS] * 50,
        },
        {"event": "node_lost", "lost": [{"node_rank": ORDERS, "host": {"a": 1}, "log": ORDERS}]},
        {"event": "generation_started", "members": list(range(10_000)), "number": 10**40, "reason": ORDERS},
        {
            "event": "phase_finished",
            "iteration": 10**30,
            "phase": -(10**30),
            "mono_s": 1e300,
            "seconds": 1e308,
        },
        {"event": "evaluated", "reward_mean": float("inf"), "iteration": 2**62, "time": "9999-99-99"},
        {"event": "updated", "loss": float("nan"), "node_rank": -5, "generation": "1", "time": 7},
        {"event": "work_failed", "error": None, "log": {"a": []}, "phase": True},
    ):
        yield json.dumps({**line, **changed}).encode()
    yield json.dumps(line).encode().replace(b'"iteration": 1', b'"iteration": ' + b"9" * 6000)
    yield b"[" * 200_000
    yield b'{"event": ' * 100_000
    yield b"\xff\xfe\x00\xed\xa0\x80" * 1000
    yield b'{"event": "' + b"x" * (20 << 20) + b'"}'
    yield b"\x00" * 1000


def plant(folder: Path, name: str, kind: str) -> None:
    """Something hostile under a name that is not taken."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outside").write_text(SECRET)
    KINDS[kind](folder / name)


def plant_beside_everything(paths: Any) -> None:
    """One of each kind under names that mean something in each folder of a run, beside what is really there."""
    for number, kind in enumerate(KINDS):
        rank, iteration = 40 + number, 70 + number
        plant(paths.joins, paths.join(rank, 1).name, kind)
        plant(paths.status, paths.beat(rank, 1).name, kind)
        plant(paths.events, paths.journal(rank, 1).name, kind)
        plant(paths.logs / f"attempt_{rank}" / "node_0", "daemon.log", kind)
        plant(paths.logs, f"attempt_{iteration}", kind)
        plant(paths.checkpoints, paths.checkpoint(iteration, 1).name, kind)
        plant(paths.batches, paths.batch(iteration, 1).name, kind)
        for split in ("train", "test"):
            plant(paths.trajectories(split), paths.merged(split, iteration).name, kind)
            plant(paths.trajectories(split), paths.part(split, 1, rank, 1, 1).name, kind)


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[None]:
    """What lies beside the run, which must be as it was."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for name in ("canary", "folder/canary"):
        (outside / name).write_text(SECRET)

    def state() -> list[tuple[Path, tuple[int, ...]]]:
        # Of a file also the time of its last reading; that of a folder changes here.
        return sorted((path, path.lstat()[: 9 if path.is_file() else 7]) for path in outside.rglob("*"))

    before = state()
    yield
    assert state() == before


def measured(argv: list[str]) -> tuple[int, str, int]:
    """A command to its end: exit code, all that it said, and the most memory that it had."""
    reader, writer = os.pipe()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, cwd=REPO)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode(errors="surrogateescape")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, used.ru_maxrss * 1024


def fsbarrier(words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "fsbarrier", *words.split()]


def make(folder: Path) -> Any:
    """A run that was at work, with hostile things beside everything, hostile journals, and logs that give orders."""
    paths = long_run(folder, 2).paths
    for journal in sorted(paths.events.iterdir()):
        line = json.loads(journal.read_text().splitlines()[-1])
        with journal.open("ab") as stream:
            stream.write(b"".join(text + b"\n" for text in hostile_lines(line)))
    log = paths.node_logs(1, 0) / "rollout.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"Traceback {ORDERS}\nError: {ORDERS}\n")
    plant_beside_everything(paths)
    return paths


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("canaries")
def test_every_command_bears_a_run_that_is_hostile_everywhere(tmp_path: Path) -> None:
    paths, out = make(tmp_path / "runs" / "run"), tmp_path / "out"
    (paths.root / "quarantine").symlink_to(tmp_path / "outside" / "folder")
    out.mkdir()
    for command in ALL_COMMANDS:
        words = command.format(run=paths.root, parent=paths.root.parent, out=out)
        code, said, took = measured(fsbarrier(words))
        assert code not in (EXIT_INTERNAL, -signal.SIGKILL) and "Traceback (most" not in said, (command, said)
        assert SECRET not in said and not any(order in said for order in ("\x1b", "\x07", "\u202e")), command
        assert took < MOST_BYTES, (command, took)
    for file in out.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    assert b"\x1b" not in (out / "prom").read_bytes() + (out / "csv").read_bytes()


@contextmanager
def on_a_terminal(argv: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPO, env=env)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("canaries")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_shows_it_and_ends_by_a_signal(number: int, tmp_path: Path) -> None:
    paths, seen = make(tmp_path / "run"), b""
    with on_a_terminal(fsbarrier(f"top --log-path {paths.root}")) as (process, terminal):
        # It has drawn a picture once the names of the nodes' hosts are there.
        while b"gpu-c" not in seen:
            seen += os.read(terminal, 65536)
        process.send_signal(number)
        while True:
            try:
                if not (more := os.read(terminal, 65536)):
                    break
            except OSError:
                break
            seen += more
        assert process.wait() in (0, 130, 143, -signal.SIGTERM)
    text = seen.decode(errors="replace")
    assert SECRET not in text and "Traceback (most" not in text
    for order in ("\x1b]0;pwned", "\x1b]8;;", "\u202e", "\x1b[31mred"):
        assert order not in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("canaries")
def test_living_daemons_go_on_beside_all_that(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, *FAST, "--iterations", "3", "toy.tasks=8") as cluster:
        cluster.start()
        cluster.in_phase(0, 2)
        paths = cluster.paths
        plant_beside_everything(paths)
        for claims in paths.coordination.rglob("claims-*"):
            for number, kind in enumerate(KINDS):
                plant(claims, f"lot-0000-{900 + number:06d}", kind)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0) + cluster.said(1)
        assert SECRET not in cluster.said(0) + cluster.said(1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("canaries")
@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_that_cannot_read_its_generation_still_ends_by_a_signal(kind: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, *FAST, "coordination.dead_s=50", "toy.tasks=8") as cluster:
        cluster.start()
        cluster.in_phase(0, 2)
        paths = cluster.paths
        plant(paths.generations, paths.generation(2).name, kind)
        cluster.beating(0, lambda beat: beat.counter > 3)
        cluster.signal(0, signal.SIGTERM)
        assert cluster.wait() == {0: 143}, cluster.said(0)
