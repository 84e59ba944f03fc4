"""A name in a run directory may be a second name (a hard link) of a file outside: that file is neither written, cut, opened to others,
removed nor copied. Kernels that forbid such links to strangers are the rule, and no condition."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_run import long_run
from test_export import checkpoint, export
from test_hostile_files import SECRET, as_fifo, as_link, policy
from trajectory_files import group

from fsbarrier.run import recovery
from fsbarrier.rundir import checkpoints, retention, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings
from fsbarrier.store import files
from fsbarrier.trajectories import RankFileWriter, scan_rank_file


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A private file beside the run, which must stay what it is."""
    file = tmp_path / "private"
    file.write_text(SECRET)
    file.chmod(0o400)
    before = file.stat()
    yield file
    after = file.stat()
    assert file.read_text() == SECRET
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.fixture(params=[False, True], ids=["owner", "group"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder, written as the owner's alone or with --shared-group."""
    (tmp_path / "run").mkdir()
    files.set_shared_group(request.param)
    yield tmp_path / "run"
    files.set_shared_group(False)


def test_what_is_written_goes_to_a_file_of_the_runs_own(run: Path, outside: Path) -> None:
    for name in ("log", "mark", "record"):
        os.link(outside, run / name)
    fd = files.open_append(run / "log")
    os.write(fd, b"line\n")
    os.close(fd)
    files.write_in_place(run / "mark", b"line\n")
    files.write_atomic(run / "record", b"line\n")
    for path in run.iterdir():
        assert path.read_bytes() == b"line\n" and path.stat().st_nlink == 1


def test_a_journal_goes_on_after_a_snapshot_of_hard_links(run: Path, tmp_path: Path) -> None:
    for line in (b"before\n", b"after\n"):
        fd = files.open_append(run / "journal")
        os.write(fd, line)
        os.close(fd)
        if line == b"before\n":
            os.link(run / "journal", tmp_path / "snapshot")
    assert (run / "journal").read_bytes() == b"before\nafter\n"
    assert (tmp_path / "snapshot").read_bytes() == b"before\n"
    assert [path.name for path in run.iterdir()] == ["journal"]


@pytest.mark.parametrize("plant", [as_fifo, as_link])
def test_a_mark_waits_for_no_reader_and_follows_no_link(run: Path, outside: Path, plant: object) -> None:
    plant(run / "outside") if plant is as_fifo else (run / "outside").symlink_to(outside)  # type: ignore[operator]
    files.write_in_place(run / "outside", b"line\n")
    assert (run / "outside").read_bytes() == b"line\n" and not (run / "outside").is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o644], ids=["of the same people", "of others"])
@pytest.mark.parametrize("begun", [0, 1], ids=["its start", "its groups"])
def test_no_trajectory_goes_into_a_file_with_a_second_name(tmp_path: Path, begun: int, mode: int) -> None:
    """Torn, it would be cut: to nothing where not even its start is whole. The rollout goes on in a copy, or anew."""
    part, other = tmp_path / "run" / "part", tmp_path / "private"
    part.parent.mkdir()
    with RankFileWriter(part, header={"policy": "p"}) as writer:
        for task in range(begun):
            writer.append_group(task, group(task))
    content = part.read_bytes() + b"torn" if begun else part.read_bytes()[:40]
    other.write_bytes(content)
    other.chmod(mode)
    part.unlink()
    os.link(other, part)
    kept = begun if mode == 0o600 else 0
    for _ in range(2):
        with RankFileWriter(part, header={"policy": "p"}) as writer:
            assert [one.task_index for one in writer.groups] == [*range(kept)]
            writer.append_group(kept, group(kept))
            kept += 1
    assert other.read_bytes() == content and part.stat().st_mode & 0o777 == 0o600
    assert [one.task_index for one in scan_rank_file(part).groups] == [*range(kept)]
    assert [path.name for path in part.parent.iterdir()] == ["part"]


def test_a_finished_part_has_two_names(tmp_path: Path) -> None:
    part = tmp_path / "part"
    with RankFileWriter(part, header={}) as writer:
        writer.append_group(1, group(1))
        writer.finish()
    os.link(part, tmp_path / "checkpoint")
    with RankFileWriter(part, header={}) as writer:
        assert writer.finish().groups == 1


def test_a_new_folder_that_becomes_a_link_opens_nothing_to_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the group swaps it, before its mode is widened."""
    theirs, real = tmp_path / "theirs", os.mkdir
    theirs.mkdir(mode=0o700)

    def mkdir(path: Path, mode: int) -> None:
        real(path, mode)
        os.rmdir(path)
        os.symlink(theirs, path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    files.set_shared_group(True)
    try:
        files.try_to_make_dirs(tmp_path / "new")
    finally:
        files.set_shared_group(False)
    assert theirs.stat().st_mode & 0o777 == 0o700


def test_what_is_removed_or_moved_away_loses_a_name_only(tmp_path: Path, outside: Path) -> None:
    run = long_run(tmp_path / "run", 1)
    paths = run.paths
    newest = [policy(paths.root, number) for number in (11, 12, 13, 14)][-1]
    old = paths.checkpoint(11, 1) / "model" / "more"
    merged, part = paths.merged("train", 1), paths.part("train", 5, 0, 1, 1)
    for planted in (old, merged, part):
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.unlink(missing_ok=True)
        os.link(outside, planted)
    assert paths.checkpoint(11, 1) in retention.remove_old_versions(paths.root, 2, newest)
    assert retention.remove_old(paths.root, 5, batches=1, trajectories=2) == [1]
    found = [item for item in recovery.inspect(paths.root, 5) if item.path == part]
    folder = recovery.quarantine(paths.root, found)
    assert folder is not None and (folder / part.name).samefile(outside)
    assert not old.exists() and not merged.exists() and not part.exists()


@pytest.mark.parametrize("name", ["more.txt", ".hidden", "model.safetensors"])
def test_an_export_copies_no_second_name_of_a_file_outside(tmp_path: Path, outside: Path, name: str) -> None:
    log_path = tmp_path / "run"
    runrecord.publish(runrecord.new(log_path, Settings(), tasks={}, model=None))
    folder = checkpoint(log_path, 1, 1, "one")
    (folder / "model" / name).unlink(missing_ok=True)
    os.link(outside, folder / "model" / name)
    checkpoints.publish_link(log_path, folder)
    code = export(log_path, tmp_path / "out")
    assert code == (4 if name in checkpoints.read_manifest(folder).files else code)
    copied = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert SECRET.encode() not in b"".join(copied)
    assert RunPaths(log_path).checkpoint(1, 1) == folder
