"""A name in a run directory may be a second name (a hard link) of a file outside: that file is neither written, cut, opened to others,
removed nor copied. Kernels that forbid such links to strangers are the rule, and no condition."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_hostile_files import SECRET
from trajectory_files import group

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
