"""The growing file of a rank: what survives a kill at any byte, damage, a full disk; and what a merge makes of it."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import tempfile
from array import array
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from other_decoder import frames
from trajectory_files import group, trajectory, write_part

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.trajectories import (
    FormatError,
    GroupEntry,
    NotOurs,
    RankFileWriter,
    iter_trajectories,
    load,
    scan_rank_file,
)

HEADER = {"run_id": "r", "expected": [0, 1, 2]}
FRAME_HEAD = 12  # bytes: the length and the checksum of a frame, and a checksum of these
TASKS = range(12)
GROUPS = {task: group(task, samples=1 + task % 3, tokens=5) for task in TASKS}


class GrowingFile(RuleBasedStateMachine):
    """One file that is appended to, cut off at any byte, damaged, opened again and merged. `sure`: the tasks whose groups were
    acknowledged and not damaged since."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        # A flush is slow, and what it is good for is another test's.
        self.unflushed = mock.patch("os.fsync", lambda fd: None)
        self.unflushed.start()
        self.path = self.folder / "part"
        self.sure: set[int] = set()
        self.ruined = False
        self.open()

    def teardown(self) -> None:
        self.unflushed.stop()
        self.writer.close()
        shutil.rmtree(self.folder)

    def open(self) -> None:
        self.writer = RankFileWriter(self.path, header=HEADER)

    @rule(tasks=st.sets(st.sampled_from(TASKS), min_size=1, max_size=4))
    @precondition(lambda self: not self.ruined)
    def append(self, tasks: set[int]) -> None:
        """As a rollout does: only what is not there."""
        there = {one.task_index for one in self.writer.groups}
        if not self.writer.finished and tasks - there:
            self.writer.write([self.writer.framed(task, GROUPS[task]) for task in sorted(tasks - there)])
            self.sure |= tasks - there

    @rule(
        tasks=st.sets(st.sampled_from(TASKS), min_size=1, max_size=3),
        cut=st.floats(0, 1),
        rest=st.binary(max_size=40),
    )
    @precondition(lambda self: not self.ruined)
    def die_while_appending(self, tasks: set[int], cut: float, rest: bytes) -> None:
        """Killed, or without power: any number of the new bytes is there, and perhaps others behind them."""
        before, sure = self.writer.valid_bytes, set(self.sure)
        self.append(tasks)
        self.writer.close()
        os.truncate(self.path, before + int(cut * (self.writer.valid_bytes - before)))
        with self.path.open("ab") as stream:
            stream.write(rest)
        self.sure = sure
        self.open()

    @rule(data=st.data())
    @precondition(lambda self: not self.ruined)
    def flip(self, data: st.DataObject) -> None:
        self.writer.close()
        groups = scan_rank_file(self.path).groups
        content = bytearray(self.path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << (place % 8)
        self.path.write_bytes(content)
        hit = [one for one in groups if one.offset <= place < one.end]
        lost = hit
        if not hit or place < hit[0].offset + FRAME_HEAD:
            # What is behind a damaged head, or an end frame, cannot be found.
            lost = [one for one in groups if one.end > place]
        self.sure -= {one.task_index for one in lost}
        self.ruined = place < (groups[0].offset if groups else len(content))
        if not self.ruined:
            self.open()

    @rule()
    @precondition(lambda self: not self.ruined)
    def open_again(self) -> None:
        self.writer.close()
        self.open()

    @rule()
    @precondition(lambda self: not self.ruined)
    def finish(self) -> None:
        self.writer.finish()
        assert self.writer.valid_bytes == self.path.stat().st_size
        with pytest.raises(StoreError, match="finished"):
            self.writer.append_group(0, GROUPS[0])

    @rule()
    def merge(self) -> None:
        """With another file that has everything: each task once, from the first file that has it whole."""
        if not (self.folder / "other").exists():
            write_part(self.folder / "other", TASKS, rank=7)
        parts = (Part(self.path), Part(self.folder / "other"))
        try:
            aggregate(parts, self.folder / "merged", metadata={}, expected=TASKS)
        except FormatError:
            assert self.ruined
            return
        merged = load(self.folder / "merged")["trajectories"]
        found = {task: [item for item in merged if item["task_index"] == task] for task in TASKS}
        assert [*itertools.chain(*found.values())] == merged and all(found.values())
        ours = {task for task, made in found.items() if made == GROUPS[task]}
        assert ours >= self.sure
        assert all({item["node_rank"] for item in found[task]} == {7} for task in set(TASKS) - ours)

    @invariant()
    def nothing_is_lost_or_wrong(self) -> None:
        try:
            found = scan_rank_file(self.path)
            read = list(iter_trajectories(self.path))
        except FormatError:
            # A damaged header, or damage in a file that is finished.
            assert self.ruined or scan_rank_file(self.path).finished
            return
        tasks = [one.task_index for one in found.groups]
        assert len(set(tasks)) == len(tasks) and set(tasks) >= self.sure
        assert found.valid_bytes + found.torn_bytes == self.path.stat().st_size
        assert read == [item for task in tasks for item in GROUPS[task]]
        if not self.ruined:
            assert found.groups == self.writer.groups and found.valid_bytes == self.writer.valid_bytes


GrowingFile.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestGrowingFile = GrowingFile.TestCase


def small_part(path: Path, *, finished: bool = False) -> Path:
    return write_part(path, range(3), samples=1, tokens=5, finished=finished)


def test_another_reader_finds_the_same_in_a_file(tmp_path: Path) -> None:
    """Written from the format's description (data/rank_file.py), without the code of either writer or reader."""
    path = write_part(tmp_path / "part", range(3), samples=40, tokens=70, finished=True, expected=range(300))
    header, *groups, end = frames(path)
    assert header["header"]["expected"] == [*range(300)] and header["header"]["run_id"] == "run-1"
    assert [one["task_index"] for one in groups] == [0, 1, 2] and end == {"end": 3}
    found = [item for one in groups for item in one["trajectories"]]
    assert (
        found
        == list(iter_trajectories(path))
        == [item for task in range(3) for item in group(task, samples=40, tokens=70)]
    )
    assert [type(item["token_ids"]) for item in found[:1]] == [array]


@pytest.mark.parametrize("finished", [False, True])
def test_a_file_cut_at_any_byte_keeps_the_groups_before(tmp_path: Path, finished: bool) -> None:
    path = small_part(tmp_path / "part", finished=finished)
    groups: tuple[GroupEntry, ...] = scan_rank_file(path).groups
    wanted = load(path)["trajectories"]
    for cut in range(path.stat().st_size - 1, -1, -1):
        limited = scan_rank_file(path, cut)
        os.truncate(path, cut)
        found = scan_rank_file(path)
        kept = sum(one.end <= cut for one in groups)
        assert found == limited and found.groups == groups[:kept] and not found.finished
        assert found.valid_bytes + found.torn_bytes == cut
        assert list(iter_trajectories(path)) == wanted[:kept]


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    """Each byte of the middle group in turn: it is dropped, and behind its head the group after it stays."""
    path = small_part(tmp_path / "part")
    content = bytearray(path.read_bytes())
    hit = scan_rank_file(path).groups[1]
    wanted = {item["task_index"]: item for item in load(path)["trajectories"]}
    for place in range(hit.offset, hit.end):
        bit = 1 << (place % 8)
        content[place] ^= bit
        path.write_bytes(content)
        found = scan_rank_file(path)
        assert [one.task_index for one in found.groups] == (
            [0] if place < hit.offset + FRAME_HEAD else [0, 2]
        )
        assert bool(found.torn_bytes) == (place < hit.offset + FRAME_HEAD) != bool(found.damaged)
        assert all(item == wanted[item["task_index"]] for item in iter_trajectories(path))
        content[place] ^= bit


def test_anothers_file_is_refused(tmp_path: Path) -> None:
    path = write_part(tmp_path / "part", [1])
    with pytest.raises(UsageError, match="another rollout"):
        RankFileWriter(path, header=HEADER)
    (tmp_path / "other").write_bytes(b"something else entirely" * 100)
    with pytest.raises(NotOurs):
        RankFileWriter(tmp_path / "other", header=HEADER)
    assert (tmp_path / "other").read_bytes() == b"something else entirely" * 100
    with pytest.raises(UsageError, match=r"the header\.a is a set"):
        RankFileWriter(tmp_path / "new", header={"a": {1, 2}})
    assert not (tmp_path / "new").exists()


def test_a_bad_trajectory_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with RankFileWriter(path, header=HEADER) as writer:
        before = path.stat().st_size
        bad = trajectory(0, 0) | {"metadata": {"when": {1, 2}}}
        with pytest.raises(UsageError, match=r"task 0\.trajectories\[1\]\.metadata\.when is a set"):
            writer.append_group(0, [trajectory(0, 0), bad])
        lacking = {name: value for name, value in trajectory(0, 0).items() if name != "reward"}
        with pytest.raises(UsageError, match="lacks reward"):
            writer.append_group(0, [lacking])
        with pytest.raises(UsageError, match="empty"):
            writer.append_group(0, [])
        assert path.stat().st_size == before
        writer.append_group(0, group(0))
    assert len(load(path)["trajectories"]) == 2


def test_what_is_acknowledged_was_flushed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: (flushed.append(os.fstat(fd).st_size), real(fd))[1])
    with RankFileWriter(tmp_path / "part", header=HEADER) as writer:
        for task in range(3):
            writer.append_group(task, group(task))
            assert flushed[-1] == writer.valid_bytes
        before = flushed[-1]
        writer.finish()
        assert before < writer.valid_bytes == flushed[-1]


def test_a_full_disk_leaves_a_valid_file(tmp_path: Path) -> None:
    """A real write that stops half way: the kernel refuses to let the file grow beyond a limit."""
    path = tmp_path / "part"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RankFileWriter(path, header=HEADER) as writer:
        first = writer.append_group(0, group(0))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (first.end + 1000, hard))
            with pytest.raises(StoreError, match="cannot append task 1"):
                writer.append_group(1, group(1))
            assert path.stat().st_size == writer.valid_bytes == first.end
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        scan = scan_rank_file(path)
        assert scan.torn_bytes == 0 and [entry.task_index for entry in scan.groups] == [0]
        writer.append_group(1, group(1))
        writer.finish()
    assert len(load(path)["trajectories"]) == 4


def test_after_a_failed_flush_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with RankFileWriter(tmp_path / "part", header=HEADER) as writer:
        writer.append_group(0, group(0))
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                writer.append_group(1, group(1))
        with pytest.raises(StoreError, match="unusable after a failed flush"):
            writer.append_group(1, group(1))
        assert [entry.task_index for entry in writer.groups] == [0]


def test_a_missing_file_and_a_directory_are_clean_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        for read in (scan_rank_file, load):
            with pytest.raises(StoreError, match="cannot read"):
                read(path)
    with pytest.raises(StoreError, match="cannot start"):
        RankFileWriter(tmp_path / "no" / "such", header=HEADER)
