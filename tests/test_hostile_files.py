"""What lies in a run directory may be anything: a FIFO, a device, a link, a file of a terabyte. Every command says so in a line and ends,
a living daemon goes on or ends as for any record that cannot be read, and nothing outside the run directory is touched."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import typed
from fake_run import long_run
from trajectory_files import write_part

from fsbarrier.cli.commands import stop
from fsbarrier.errors import EXIT_INTERNAL, ProgramFailed
from fsbarrier.run.job import Surroundings
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.log_tail import last_lines_of_node
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import reading
from fsbarrier.trajectories import RankFileWriter, scan_rank_file

REPO = Path(__file__).resolve().parent.parent
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
    KINDS[kind](theirs)
    assert [part.tasks for part in Surroundings().parts_on_disk(paths, "train", 1)] == [(3,)]


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
