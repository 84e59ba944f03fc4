"""`ShardWriter`: writes the growing trajectory file of one rank. trajectory_scan.py describes the layout.

A group (all samples of one task) is appended as complete zip entries and fsynced before `append_group` returns; several groups can share an
fsync. Existing contents are never rewritten, not even by `finish`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier import __version__
from fsbarrier.data.tally import Tally
from fsbarrier.data.torch_pickle import GroupPickler, file_pickle
from fsbarrier.data.torch_zip import (
    Entry,
    crc32_combine,
    first_entries,
    header_bytes,
    make_entry,
    read_at,
    write_at,
    write_directory,
)
from fsbarrier.data.trajectory import REQUIRED, is_judged
from fsbarrier.data.trajectory_scan import (
    CHUNK,
    DATA,
    DATA_PKL,
    FOOTER,
    FORMAT,
    GROUPS,
    SHARD_JSON,
    TORCH_FILES,
    GroupEntry,
    mean_reward,
    parse_header_at,
    scan_shard,
)
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.files import fsync_dir, open_new, open_own
from fsbarrier.protocol.facts import Payload
from fsbarrier.reading import open_stream
from fsbarrier.retry import FAILING, retry

CREATED_BY = f"fsbarrier {__version__}"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A finished file; `bytes` is its size."""

    path: Path
    groups: int
    trajectories: int
    bytes: int
    reward_mean: float | None


class ShardWriter:
    """Appends groups of trajectories to one rank's file. One writer per file; threads may share a writer.

    `prefix` must be unique among all files that may be merged together, such as "g0003n0002i0004" (generation, node rank,
    incarnation). `header` is a JSON object at the start of the file; a merge by hand reads from it `run_id node_rank
    generation iteration split policy_version policy` and `assigned` (this file's tasks) or `expected` (all tasks).

    An existing file is resumed if its prefix and header match: its torn tail is truncated, `groups` lists its contents, and
    new groups are appended. Any other existing file is an error.
    Raises UsageError (other file, invalid prefix or header), StoreError (filesystem failure).
    """

    def __init__(self, path: Path, *, prefix: str, header: dict[str, object]) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise UsageError(f"{path}: the prefix {prefix!r} is not 1 to 64 letters, digits, dots, dashes")
        self.path = path
        self.prefix = prefix
        self.finished = False
        self._lock = threading.Lock()
        self._groups: list[GroupEntry] = []
        self._number = 0
        self._broken = ""
        self._fd = -1
        self._end = 0
        try:
            text = json.dumps(
                {"format": FORMAT, "prefix": prefix, "created_by": CREATED_BY, "header": header}
            )
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path}: the header is not plain JSON: {error}") from None
        self._header: dict[str, object] = json.loads(text)["header"]
        self._start, start = first_entries({SHARD_JSON: text.encode(), **TORCH_FILES})
        try:
            try:
                os.close(retry(lambda: open_new(path), errnos=FAILING))
                self._begin(start)
            except FileExistsError:
                self._resume(start)
        except OSError as error:
            self.close()
            raise StoreError(f"{path}: cannot start writing: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> tuple[GroupEntry, ...]:
        """The groups in the file, including those of an earlier start."""
        return tuple(self._groups)

    @property
    def valid_bytes(self) -> int:
        """The acknowledged size, which other nodes may rely on."""
        return self._end

    @property
    def trajectories(self) -> int:
        return sum(group.trajectories for group in self._groups)

    @property
    def reward_mean(self) -> float | None:
        return mean_reward(self._groups)

    def append_group(self, task_index: int, trajectories: Sequence[Payload]) -> GroupEntry:
        """Write all trajectories of one task (see data/trajectory.py); durable on return. Raises the errors of `append_groups`."""
        return self.append_groups({task_index: trajectories})[0]

    def append_groups(self, trajectories_of: Mapping[int, Sequence[Payload]]) -> list[GroupEntry]:
        """Write several tasks with one fsync.

        Raises UsageError (a field is missing or not a plain value; nothing is written), StoreError (filesystem failure; the file
        remains valid without these groups).
        """
        for task_index, trajectories in trajectories_of.items():
            if not trajectories:
                raise UsageError(f"{self.path}: the group of task {task_index} is empty")
            for trajectory in trajectories:
                if lacking := [name for name in REQUIRED if name not in trajectory]:
                    raise UsageError(
                        f"{self.path}: a trajectory of task {task_index} lacks {', '.join(lacking)}"
                    )
        with self._lock:
            self._check_open()
            # Build all groups before writing, so that an invalid one leaves the file unchanged.
            groups, data = list[GroupEntry](), bytearray()
            for number, (task_index, trajectories) in enumerate(trajectories_of.items(), self._number):
                key = f"{self.prefix}-{number:06d}"
                group, its_data = _group_bytes(key, self._end + len(data), task_index, trajectories)
                groups.append(group)
                data += its_data
            self._append(data, f"append task {', '.join(map(str, trajectories_of))}")
            self._number += len(groups)
            self._groups += groups
            return groups

    def finish(self, metadata: dict[str, object]) -> ShardInfo:
        """Complete the file, so that torch.load can open it. A second call does nothing.

        `metadata` (plain values) is stored in the file's "metadata", in addition to counts. Raises UsageError, StoreError.
        """
        with self._lock:
            if not self.finished:
                self._check_open()
                self._finish(metadata)
            return ShardInfo(self.path, len(self._groups), self.trajectories, self._end, self.reward_mean)

    def close(self) -> None:
        """Close the descriptor; everything acknowledged is already on disk."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, start: bytes) -> None:
        self._fd = open_own(self.path)
        self._append(start, "start")
        fsync_dir(self.path.parent)

    def _resume(self, start: bytes) -> None:
        with open_stream(self.path) as stream:
            there = stream.read(len(start) + 1)
        if len(there) <= len(start) and (start.startswith(there) or not any(there)):
            # An earlier start was killed before it had written the start.
            self._begin(start)
            return
        scan = scan_shard(self.path)
        if scan.prefix != self.prefix or scan.header != self._header:
            raise UsageError(
                f"{self.path}: was written by another rollout (prefix {scan.prefix}); use a new part name"
            )
        if scan.finished and not scan.torn_bytes:
            # A finished file must not change, because the rank's checkpoint is usually a hard link to it.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        else:
            self._fd = open_own(self.path)
            if os.fstat(self._fd).st_size < scan.valid_bytes:
                # `open_own` replaced the file by an empty one, because the old one had a second hard link with other permissions.
                self.close()
                self._begin(start)
                return
        if scan.torn_bytes:
            os.ftruncate(self._fd, scan.valid_bytes)
            os.fsync(self._fd)
        self._end = scan.valid_bytes
        self._start, self._groups, self.finished = list(scan.entries), list(scan.groups), scan.finished
        self._number = max((int(group.key.rpartition("-")[2]) + 1 for group in scan.groups), default=0)

    def _check_open(self) -> None:
        if self._broken:
            raise StoreError(self._broken)
        if self._fd < 0 or self.finished:
            raise StoreError(
                f"{self.path}: is {'finished' if self.finished else 'closed'}; nothing more can be written"
            )

    def _append(self, data: bytes | bytearray, what: str) -> None:
        """Write and fsync after the acknowledged part. If that fails, truncate the file to the acknowledged part."""
        try:
            end = write_at(self._fd, self._end, data)
        except OSError as error:
            try:
                os.ftruncate(self._fd, self._end)
            except OSError:
                self._broken = f"{self.path}: unusable after a failed write"
            raise StoreError(f"{self.path}: cannot {what}: {error.strerror or error}") from error
        self._flush(what)
        self._end = end

    def _flush(self, what: str) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            # After a failed fsync it is unknown which bytes were written, and a second fsync may report success. Never continue.
            self._broken = f"{self.path}: unusable after a failed flush ({error.strerror})"
            raise StoreError(f"{self.path}: cannot {what}: {error.strerror or error}") from error

    def _finish(self, metadata: dict[str, object]) -> None:
        full = {
            **self._header,
            **metadata,
            "trajectories": self.trajectories,
            "groups": len(self._groups),
            "reward_mean": self.reward_mean,
            "created_by": CREATED_BY,
        }
        entry, before, after = pickle_entry(full, self._groups, self._end)
        at = self._end
        try:
            at = write_at(self._fd, at, header_bytes(entry) + before)
            for group in self._groups:
                for start in range(0, group.body_length, CHUNK):
                    count = min(CHUNK, group.body_length - start)
                    at = write_at(self._fd, at, read_at(self._fd, group.body_offset + start, count))
            at = write_at(self._fd, at, after)
            at = write_directory(self._fd, [*self._entries(), entry], at)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise StoreError(f"{self.path}: cannot finish: {error.strerror or error}") from error
        self._flush("finish")
        self._end = at
        self.finished = True

    def _entries(self) -> Iterator[Entry]:
        yield from self._start
        for group in self._groups:
            yield from group.storages
            yield commit_entry(self._fd, group)


def pickle_entry(
    metadata: dict[str, object], groups: Iterable[GroupEntry], offset: int
) -> tuple[Entry, bytes, bytes]:
    """data.pkl for position `offset`: the parts before and after the groups' bodies.

    Its checksum is computed from those of the bodies, without reading them.
    """
    before, after = file_pickle(metadata)
    crc, size = zlib.crc32(before), len(before)
    for group in groups:
        crc = crc32_combine(crc, group.body_crc, group.body_length)
        size += group.body_length
    return make_entry(DATA_PKL, size + len(after), zlib.crc32(after, crc), offset), before, after


def commit_entry(fd: int, group: GroupEntry) -> Entry:
    """The entry of a rank's file that commits `group`."""
    return parse_header_at(fd, group.storages[-1].end if group.storages else group.offset, group.end)


def _group_bytes(
    key: str, offset: int, task_index: int, trajectories: Sequence[Payload]
) -> tuple[GroupEntry, bytearray]:
    """The entries of one group, for position `offset` of the file."""
    pickler = GroupPickler(key)
    for trajectory in trajectories:
        pickler.add(trajectory)
    body = pickler.body()
    data, storages = bytearray(), []
    for code, content in pickler.storages.items():
        entry = make_entry(f"{DATA}{key}-{code}", len(content), zlib.crc32(content), offset + len(data))
        data += header_bytes(entry) + content
        storages.append(entry)
    # An unscored trajectory has no reward, whatever its field contains.
    rewards = [float(trajectory["reward"]) for trajectory in trajectories if is_judged(trajectory)]
    unjudged = len(trajectories) - len(rewards)
    reward_sum = float(sum(rewards))
    signal = len(set(rewards)) > 1
    tally = Tally.of(trajectories)
    body_crc = zlib.crc32(body)
    described = {
        "task_index": task_index,
        "task_id": str(trajectories[0]["task_id"]),
        "trajectories": len(trajectories),
        "reward_sum": reward_sum,
        "signal": signal,
        "unjudged": unjudged,
        "tally": tally.as_json(),
        "body_crc": body_crc,
        "storages": [[entry.name.removeprefix(DATA), entry.size, entry.crc] for entry in storages],
    }
    text = json.dumps(described).encode()
    tail = text + FOOTER.pack(len(text), zlib.crc32(text))
    commit = make_entry(
        GROUPS + key, len(body) + len(tail), zlib.crc32(tail, body_crc), offset + len(data), align_end=True
    )
    data += header_bytes(commit) + body + tail
    group = GroupEntry(
        task_index=task_index,
        task_id=str(described["task_id"]),
        trajectories=len(trajectories),
        offset=offset,
        length=len(data),
        key=key,
        reward_sum=reward_sum,
        storages=tuple(storages),
        body_offset=commit.data_offset,
        body_length=len(body),
        body_crc=body_crc,
        signal=signal,
        unjudged=unjudged,
        tally=tally,
    )
    return group, data
