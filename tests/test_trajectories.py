"""The growing rank file: what survives a kill at any byte, damage, a full disk; and that torch opens what is finished."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_files import group, trajectory, write_part

from fsbarrier.data.torch_pickle import FormatError
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import FsbarrierError, StoreError, UsageError
from fsbarrier.rollouts.shared_flush import SharedFlush
from fsbarrier.trajectories import NotOurs, ShardWriter, iter_trajectories, load, scan_shard

HEADER = {"run_id": "r", "assigned": [0, 1, 2]}


def small_part(path: Path, *, finished: bool = False) -> Path:
    return write_part(path, range(3), samples=1, tokens=5, finished=finished)


def same(found: Any, wanted: Any) -> bool:
    """Equality of a value that torch loaded and the one that was written."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)
    return bool(found.tolist() == wanted.tolist() if hasattr(wanted, "typecode") else found == wanted)


def test_growing_and_finished_files_load_alike(tmp_path: Path) -> None:
    wanted = [item for task in (4, 2, 9) for item in group(task)]
    growing = write_part(tmp_path / "growing", (4, 2, 9))
    finished = write_part(tmp_path / "finished", (4, 2, 9), finished=True)
    for path in (growing, finished):
        assert list(iter_trajectories(path)) == wanted
        assert load(path)["trajectories"] == wanted
    metadata = load(finished)["metadata"]
    assert metadata["run_id"] == "run-1" and metadata["note"] == "done"
    assert (metadata["groups"], metadata["trajectories"]) == (3, 6)
    assert metadata["reward_mean"] == sum(item["reward"] for item in wanted) / 6
    assert load(growing)["metadata"]["finished"] is False


@pytest.mark.torch
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_opens_a_finished_file_with_weights_only(tmp_path: Path, mmap: bool) -> None:
    import torch

    path = write_part(tmp_path / "part", (4, 2), finished=True)
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    wanted = group(4) + group(2)
    assert len(loaded["trajectories"]) == 4
    assert all(same(found, item) for found, item in zip(loaded["trajectories"], wanted, strict=True))
    types = {name: loaded["trajectories"][0][name].dtype for name in ("token_ids", "loss_mask", "logprobs")}
    assert types == {"token_ids": torch.int32, "loss_mask": torch.uint8, "logprobs": torch.float32}


def test_a_scan_tells_what_is_there(tmp_path: Path) -> None:
    path = small_part(tmp_path / "part")
    scan = scan_shard(path)
    assert [(entry.task_index, entry.task_id, entry.trajectories) for entry in scan.groups] == [
        (task, f"task-{task}", 1) for task in range(3)
    ]
    assert (scan.finished, scan.torn_bytes, scan.valid_bytes) == (False, 0, path.stat().st_size)
    assert scan.header["node_rank"] == 0
    finished = scan_shard(small_part(tmp_path / "finished", finished=True))
    assert finished.finished and finished.groups == scan.groups and finished.torn_bytes == 0


def test_a_limit_hides_what_was_not_acknowledged(tmp_path: Path) -> None:
    path = small_part(tmp_path / "part", finished=True)
    whole = scan_shard(path)
    for entry in whole.groups:
        assert scan_shard(path, entry.end).groups[-1] == entry
        less = scan_shard(path, entry.end - 1)
        assert entry not in less.groups and not less.finished
    assert scan_shard(path, 10**12).finished


@pytest.mark.parametrize("finished", [False, True])
def test_a_file_cut_at_any_byte_keeps_the_groups_before(tmp_path: Path, finished: bool) -> None:
    path = small_part(tmp_path / "part", finished=finished)
    ends = [entry.end for entry in scan_shard(path).groups]
    start = scan_shard(path).groups[0].offset
    wanted = load(path)["trajectories"]
    for cut in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, cut)
        scan = scan_shard(path)
        kept = sum(end <= cut for end in ends)
        assert len(scan.groups) == kept and not scan.finished
        assert scan.valid_bytes + scan.torn_bytes == cut
        if cut >= start:
            assert scan.valid_bytes == ([start, *ends][kept])
        if cut % 97 == 0:
            assert list(iter_trajectories(path)) == wanted[:kept]


def test_a_tail_of_zeros_or_old_bytes_is_torn(tmp_path: Path) -> None:
    path = small_part(tmp_path / "part")
    whole = scan_shard(path)
    content = path.read_bytes()
    last = whole.groups[-1]
    for tail in (
        bytes(4096),
        os.urandom(500),
        content[last.offset : last.end - 70] + bytes(70),
        content[:200],
    ):
        path.write_bytes(content + tail)
        scan = scan_shard(path)
        assert scan.groups == whole.groups and (scan.valid_bytes, scan.torn_bytes) == (
            len(content),
            len(tail),
        )


def test_no_flipped_bit_gives_wrong_data(tmp_path: Path) -> None:
    """Each byte of the middle group in turn: either the bit does not matter (padding, dates), or the group is dropped; what is
    read is always what was written."""
    path = small_part(tmp_path / "part")
    content = bytearray(path.read_bytes())
    hit = scan_shard(path).groups[1]
    wanted = {item["task_index"]: item for item in load(path)["trajectories"]}
    dropped = damaged = 0
    for place in range(hit.offset, hit.end):
        bit = 1 << (place % 8)
        content[place] ^= bit
        path.write_bytes(content)
        found = scan_shard(path)
        tasks = [entry.task_index for entry in found.groups]
        assert tasks in ([0], [0, 2], [0, 1, 2])
        dropped += 1 not in tasks
        damaged += bool(found.damaged)
        if place % 7 == 0:
            assert all(item == wanted[item["task_index"]] for item in iter_trajectories(path))
        content[place] ^= bit
    assert dropped > 0.6 * hit.length and damaged > 0.3 * hit.length


def test_damage_between_whole_groups_costs_only_its_group(tmp_path: Path) -> None:
    for finished in (False, True):
        path = small_part(tmp_path / f"part-{finished}", finished=finished)
        scan = scan_shard(path)
        content = bytearray(path.read_bytes())
        content[scan.groups[1].storages[0].data_offset] ^= 1
        path.write_bytes(content)
        found = scan_shard(path)
        assert [entry.task_index for entry in found.groups] == [0, 2]
        assert found.damaged == ("the group of task 1 is damaged (checksum)",)
        assert found.torn_bytes == 0
        if finished:
            with pytest.raises(FormatError, match="damaged"):
                load(path)
            with pytest.raises(FormatError, match="damaged"):
                list(iter_trajectories(path))
        else:
            assert [item["task_index"] for item in iter_trajectories(path)] == [0, 2]


@pytest.mark.parametrize("finished", [False, True])
def test_a_storage_under_another_name_costs_its_group(tmp_path: Path, finished: bool) -> None:
    """The bytes match their checksums, so only the group's description tells that its storage is not there."""
    path = small_part(tmp_path / "part", finished=finished)
    hit = scan_shard(path).groups[1]
    content = path.read_bytes()
    name = hit.storages[0].name.encode()
    place = content.index(name, hit.storages[0].offset)
    path.write_bytes(content[:place] + name[:-1] + b"?" + content[place + len(name) :])
    for verify in (False, True):
        found = scan_shard(path, verify=verify)
        assert [entry.task_index for entry in found.groups] == [0, 2]
        assert found.damaged == (f"group {hit.key} has other storages than it was written with",)


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_no_shard(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("random") / "part"
    path.write_bytes(data)
    for read in (scan_shard, load, lambda path: list(iter_trajectories(path))):
        try:
            read(path)
        except FsbarrierError as error:
            assert str(path) in str(error)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_shards_give_groups_or_a_clean_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = small_part(tmp_path_factory.mktemp("mutated") / "part", finished=data.draw(st.booleans()))
    content = bytearray(path.read_bytes())
    wanted = {item["task_index"]: item for item in load(path)["trajectories"]}
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path.write_bytes(content)
    try:
        scan = scan_shard(path)
        found = list(iter_trajectories(path))
    except FormatError:
        return
    assert scan.valid_bytes + scan.torn_bytes == len(content)
    assert all(item == wanted[item["task_index"]] for item in found)


def test_a_writer_goes_on_behind_the_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        ends = [writer.append_group(task, group(task)).end for task in range(3)]
    content = path.read_bytes()
    for cut in (0, 1, 100, ends[0] - 1, ends[0], ends[1] + 77, ends[2] - 1, ends[2]):
        path.write_bytes(content[:cut])
        kept = [task for task in range(3) if ends[task] <= cut]
        with ShardWriter(path, prefix="p", header=HEADER) as writer:
            assert [entry.task_index for entry in writer.groups] == kept
            assert writer.valid_bytes == path.stat().st_size
            for task in range(3):
                if task not in kept:
                    writer.append_group(task, group(task))
            writer.finish({})
        assert load(path)["trajectories"] == [item for task in range(3) for item in group(task)]


def test_a_writer_cuts_off_a_half_written_finish(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        writer.append_group(0, group(0))
        writer.finish({})
    os.truncate(path, path.stat().st_size - 5)
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        assert not writer.finished
        writer.append_group(1, group(1))
        writer.finish({})
    assert [item["task_index"] for item in load(path)["trajectories"]] == [0, 0, 1, 1]


def test_a_finished_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        writer.append_group(0, group(0))
        first = writer.finish({"n": 1})
        assert writer.finish({"n": 2}) == first
        with pytest.raises(StoreError, match="finished"):
            writer.append_group(1, group(1))
    content = path.read_bytes()
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        assert writer.finished and writer.finish({"n": 3}) == first
        with pytest.raises(StoreError, match="finished"):
            writer.append_group(1, group(1))
    assert path.read_bytes() == content


def test_anothers_file_is_refused(tmp_path: Path) -> None:
    path = write_part(tmp_path / "part", [1])
    for prefix in ("p", scan_shard(path).prefix):
        with pytest.raises(UsageError, match="another rollout"):
            ShardWriter(path, prefix=prefix, header=HEADER)
    (tmp_path / "other").write_bytes(b"something else entirely" * 100)
    with pytest.raises(NotOurs):
        ShardWriter(tmp_path / "other", prefix="p", header=HEADER)
    assert (tmp_path / "other").read_bytes() == b"something else entirely" * 100
    with pytest.raises(UsageError, match="prefix"):
        ShardWriter(tmp_path / "new", prefix="a/b", header=HEADER)
    with pytest.raises(UsageError, match="JSON"):
        ShardWriter(tmp_path / "new", prefix="p", header={"a": {1, 2}})
    assert not (tmp_path / "new").exists()


def test_a_bad_trajectory_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        before = path.stat().st_size
        bad = trajectory(0, 0) | {"metadata": {"when": {1, 2}}}
        with pytest.raises(UsageError, match=r"trajectory\.metadata\.when is a set"):
            writer.append_group(0, [trajectory(0, 0), bad])
        lacking = {name: value for name, value in trajectory(0, 0).items() if name != "reward"}
        with pytest.raises(UsageError, match="lacks reward"):
            writer.append_group(0, [lacking])
        with pytest.raises(UsageError, match="empty"):
            writer.append_group(0, [])
        assert path.stat().st_size == before
        writer.append_group(0, group(0))
    assert len(load(path)["trajectories"]) == 2


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = small_part(tmp_path / "part")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_acknowledged_was_flushed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: (flushed.append(os.fstat(fd).st_size), real(fd))[1])
    with ShardWriter(tmp_path / "part", prefix="p", header=HEADER) as writer:
        for task in range(3):
            writer.append_group(task, group(task))
            assert flushed[-1] == writer.valid_bytes
        assert flushed[-1] < writer.finish({}).bytes == flushed[-1]


def test_groups_that_come_together_share_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync
    path = tmp_path / "part"
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        monkeypatch.setattr("os.fsync", lambda fd: (flushed.append(os.fstat(fd).st_size), real(fd))[1])
        groups = writer.append_groups({task: group(task) for task in range(3)})
        assert flushed == [writer.valid_bytes] == [groups[-1].end]
        before = path.stat().st_size
        bad = trajectory(4, 0) | {"metadata": {"when": {1, 2}}}
        with pytest.raises(UsageError, match="when is a set"):
            writer.append_groups({3: group(3), 4: [bad]})
        assert path.stat().st_size == before and len(writer.groups) == 3, "not even the good one's bytes"
        writer.append_group(4, group(4))
        writer.finish({})
    assert [item["task_index"] for item in load(path)["trajectories"]] == [0, 0, 1, 1, 2, 2, 4, 4]


class SlowFlushes:
    """A ShardWriter whose flushes take until `go` is set; `fails`: they end in an error."""

    def __init__(self) -> None:
        self.go, self.flushes, self.fails = threading.Event(), list[list[int]](), False

    def append_groups(self, groups: Mapping[int, Sequence[Trajectory]]) -> None:
        self.flushes.append(list(groups))
        self.go.wait()
        if self.fails:
            raise StoreError("the disk is full")


def test_what_comes_while_a_flush_is_under_way_shares_the_next() -> None:
    async def run() -> None:
        writer = SlowFlushes()
        appending = SharedFlush(cast(ShardWriter, writer))
        tasks = [asyncio.create_task(appending.append(task, [])) for task in range(50)]
        while not writer.flushes:
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(appending.append(task, [])) for task in range(50, 60)]
        # Each new one runs until it waits.
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks), "nobody goes on before its group is on disk"
        tasks[55].cancel()
        writer.go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await appending.rest()
        # The one that was cancelled is written too.
        assert writer.flushes == [[*range(50)], [*range(50, 60)]]

    asyncio.run(run())


def test_a_flush_that_fails_fails_everybody_who_waits() -> None:
    async def run() -> None:
        writer = SlowFlushes()
        writer.fails = True
        writer.go.set()
        appending = SharedFlush(cast(ShardWriter, writer))
        ended = await asyncio.gather(
            *(appending.append(task, []) for task in range(3)), return_exceptions=True
        )
        assert [type(one) for one in ended] == [StoreError] * 3
        with pytest.raises(StoreError):
            await appending.rest()

    asyncio.run(run())


def test_a_group_that_cannot_be_written_takes_no_others_with_it(tmp_path: Path) -> None:
    async def run() -> None:
        with ShardWriter(tmp_path / "part", prefix="p", header=HEADER) as writer:
            appending = SharedFlush(writer)
            groups = [group(0), [{**group(1)[0], "note": object()}], group(2)]
            tasks = [appending.append(task, made) for task, made in enumerate(groups)]
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(one, UsageError) for one in ended)
            with pytest.raises(UsageError, match="note is a object"):
                await appending.rest()

    asyncio.run(run())
    assert [one.task_index for one in scan_shard(tmp_path / "part").groups] == [0, 2]


def test_a_full_disk_leaves_a_valid_file(tmp_path: Path) -> None:
    """A real write that stops half way: the kernel refuses to let the file grow beyond a limit."""
    path = tmp_path / "part"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ShardWriter(path, prefix="p", header=HEADER) as writer:
        first = writer.append_group(0, group(0))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (first.end + 1000, hard))
            with pytest.raises(StoreError, match="cannot append task 1"):
                writer.append_group(1, group(1))
            # What is left behind a shorter finish would hide the directory at the file's end.
            assert path.stat().st_size == writer.valid_bytes == first.end
            with pytest.raises(StoreError, match="cannot finish"):
                writer.finish({})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        scan = scan_shard(path)
        assert scan.torn_bytes == 0 and [entry.task_index for entry in scan.groups] == [0]
        writer.append_group(1, group(1))
        writer.finish({})
    assert len(load(path)["trajectories"]) == 4


def test_after_a_failed_flush_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with ShardWriter(tmp_path / "part", prefix="p", header=HEADER) as writer:
        writer.append_group(0, group(0))
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                writer.append_group(1, group(1))
        with pytest.raises(StoreError, match="unusable after a failed flush"):
            writer.append_group(1, group(1))
        assert [entry.task_index for entry in writer.groups] == [0]


def test_threads_share_a_writer(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "part", prefix="p", header=HEADER) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda task: writer.append_group(task, group(task)), range(20)))
        info = writer.finish({})
    assert (info.groups, info.trajectories, info.bytes) == (20, 40, (tmp_path / "part").stat().st_size)
    assert {item["task_index"] for item in load(tmp_path / "part")["trajectories"]} == set(range(20))


def test_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from trajectory_files import group
        from fsbarrier.trajectories import ShardWriter
        with ShardWriter(Path(sys.argv[1]), prefix="p", header={}) as writer:
            for task in range(100000):
                writer.append_group(task, group(task, tokens=2000))
                print(task, flush=True)
        """
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "part")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert child.stdout is not None
    with child.stdout:
        for _ in range(10):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait()
        rest = child.stdout.read().split()
    acknowledged = max([acknowledged, *(int(line) for line in rest if line)])
    scan = scan_shard(tmp_path / "part")
    assert [entry.task_index for entry in scan.groups][: acknowledged + 1] == list(range(acknowledged + 1))
    for number, item in enumerate(iter_trajectories(tmp_path / "part")):
        assert item == trajectory(number // 2, number % 2, tokens=2000)


KILLED_AT_EACH_BYTE = """
import os, signal, sys
from pathlib import Path
from trajectory_files import group
from fsbarrier.trajectories import ShardWriter, load, scan_shard

path, step, tasks = Path(sys.argv[1]), int(sys.argv[2]), range(3)
wanted = [item for task in tasks for item in group(task, samples=1, tokens=5)]
os.fsync = lambda fd: None  # a killed process loses nothing that it wrote; a killed machine is another test's
pwrite = os.pwrite


def writer():
    return ShardWriter(path, prefix="p", header={})


def write_until(left, acknowledge):
    def stopping(fd, data, at):
        nonlocal left
        if len(data) > left:
            pwrite(fd, bytes(data)[:left], at)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(data)
        return pwrite(fd, data, at)

    os.pwrite = stopping
    with writer() as growing:
        for task in tasks:
            growing.append_group(task, group(task, samples=1, tokens=5))
            os.write(acknowledge, b".")
        growing.finish({})


left, killed, status = 0, 0, None
while status != 0:
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        write_until(left, theirs)
        os._exit(0)
    os.close(theirs)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    acknowledged = len(os.read(mine, 100))
    os.close(mine)
    there = [entry.task_index for entry in scan_shard(path).groups]
    assert acknowledged <= len(there) <= acknowledged + 1 and there == list(tasks)[: len(there)], (left, there)
    with writer() as growing:
        for task in list(tasks)[len(growing.groups) :]:
            growing.append_group(task, group(task, samples=1, tokens=5))
        growing.finish({})
    assert load(path)["trajectories"] == wanted, left
    path.unlink()
    left += step
    killed += status != 0
print(killed)
"""


@pytest.mark.parametrize("step", [17, pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_byte_keeps_what_it_acknowledged_and_can_go_on(
    tmp_path: Path, step: int
) -> None:
    """Real processes, each killed inside a write, a little later than the one before."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_BYTE, str(tmp_path / "part"), str(step)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5000 // step


def test_a_missing_file_and_a_directory_are_clean_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        for read in (scan_shard, load):
            with pytest.raises(StoreError, match="cannot read"):
                read(path)
    with pytest.raises(StoreError, match="cannot start"):
        ShardWriter(tmp_path / "no" / "such", prefix="p", header=HEADER)
