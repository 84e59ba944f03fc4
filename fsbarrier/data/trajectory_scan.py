"""Lists the groups of a growing, finished or merged trajectory file, without unpickling.

Layout of a rank's file (all entries stored, see torch_zip): `shard.json` (who writes it), `version`, `byteorder`, then for each
group its storages `data/<key>-<type>` and, last, `groups/<key>`: the group's pickled body, a JSON description and 8 bytes
(the description's size and CRC-32). That last entry commits the group: a group without it was never acknowledged. A finished
file ends with `data.pkl` and the central directory. A merged file has no `groups/`; its `merge.json` says where they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fsbarrier.data.tally import Tally
from fsbarrier.data.torch_pickle import FormatError
from fsbarrier.data.torch_zip import HEADER_MAX, ROOT, Entry, parse_header, pread, read_at, read_directory
from fsbarrier.errors import StoreError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.reading import open_plain
from fsbarrier.retry import FAILING, retry

SHARD_JSON = ROOT + "shard.json"
MERGE_JSON = ROOT + "merge.json"
DATA_PKL = ROOT + "data.pkl"
DATA = ROOT + "data/"
GROUPS = ROOT + "groups/"
FORMAT = 1
#: required by torch.load
TORCH_FILES = {ROOT + "version": b"3\n", ROOT + "byteorder": b"little"}
#: end of a group's entry: size and CRC-32 of the preceding JSON
FOOTER = struct.Struct("<2I")
#: bytes to read from the end of a group's entry; nearly always covers the whole description
DESCRIPTION_READ = 512
#: bytes per read when computing a checksum
CHUNK = 1 << 20


class NotOurs(FormatError):
    """A complete file that was not written by fsbarrier."""


class GroupEntry(NamedTuple):
    """One committed group in a file; offsets and lengths in bytes."""

    task_index: int
    task_id: str
    trajectories: int
    #: start of its first entry, aligned to 64 bytes
    offset: int
    #: of all its entries, including padding
    length: int
    key: str = ""
    reward_sum: float = 0.0
    storages: tuple[Entry, ...] = ()
    body_offset: int = 0
    body_length: int = 0
    body_crc: int = 0
    #: whether its rewards differ, i.e. whether it has a training signal
    signal: bool = True
    #: number of trajectories without a score, because the reward or the agent failed
    unjudged: int = 0
    #: None: written by an older version
    tally: Tally | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class ShardScan:
    """The contents of a trajectory file. `valid_bytes` + `torn_bytes` = the file's size (or the given limit)."""

    path: Path
    #: the header given to the ShardWriter, or a merged file's metadata
    header: JsonObject
    groups: tuple[GroupEntry, ...]
    valid_bytes: int
    torn_bytes: int
    finished: bool
    #: groups between valid ones with a checksum mismatch
    damaged: tuple[str, ...] = ()
    prefix: str = ""
    merged: bool = False
    #: of a merged file: digest of the merged groups
    fingerprint: str = ""
    #: the entries before the groups of a rank's file
    entries: tuple[Entry, ...] = field(default=(), repr=False)

    @property
    def trajectories(self) -> int:
        return sum(group.trajectories for group in self.groups)

    @property
    def reward_mean(self) -> float | None:
        return mean_reward(self.groups)


def mean_reward(groups: Iterator[GroupEntry] | tuple[GroupEntry, ...] | list[GroupEntry]) -> float | None:
    """The mean over all trajectories of the groups that were judged, or None without any."""
    count, total = 0, 0.0
    for group in groups:
        count += group.trajectories - group.unjudged
        total += group.reward_sum
    return total / count if count else None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open `path`; errors inside the context name the file. Raises StoreError, FormatError."""
    try:
        fd = retry(lambda: _open(path), errnos=FAILING)
        try:
            yield fd
        finally:
            # The file was only read, so errors on close are irrelevant.
            with contextlib.suppress(OSError):
                os.close(fd)
    except OSError as error:
        raise StoreError(f"{path}: cannot read it: {error.strerror or error}") from error
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from None


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except FileNotFoundError:
        # NFS may cache the absence of the name for 30 s; listing its directory makes it look again.
        os.listdir(path.parent)
        return open_plain(path)


def scan_shard(path: Path, limit_bytes: int | None = None, *, verify: bool = True) -> ShardScan:
    """List the complete groups of a growing, finished or merged trajectory file.

    `limit_bytes`: consider only this many bytes, for example those that were acknowledged. `verify`: check all checksums,
    which reads the whole file; otherwise only headers and descriptions are checked, and readers must verify the rest. A torn
    tail is excluded and counted.
    Raises StoreError (unreadable), NotOurs, FormatError (no valid start of a trajectory file).
    """
    with opened(path) as fd:
        size = retry(lambda: os.fstat(fd), errnos=FAILING).st_size
        limited = size if limit_bytes is None else min(size, limit_bytes)
        if _is_torn_start(fd, limited):
            return ShardScan(path, {}, (), 0, limited, finished=False)
        if _first_name(fd, size) != SHARD_JSON:
            return _scan_merged(path, fd, size, verify)
        scanner = _Scanner(fd, limited, verify)
        scanner.run()
        finished = scanner.saw_pickle and limited == size and _is_finished(fd, size)
        valid = size if finished else scanner.valid
        return ShardScan(
            path,
            scanner.header["header"],
            tuple(scanner.groups),
            valid,
            limited - valid,
            finished,
            tuple(scanner.damaged),
            scanner.header["prefix"],
            entries=tuple(scanner.start),
        )


def _is_torn_start(fd: int, size: int) -> bool:
    """Whether the writer was killed, or lost power, before the first entry was complete."""
    start = pread(fd, HEADER_MAX, 0)[:size]
    if not any(start):
        return True
    if not b"PK\3\4".startswith(start[:4]) or not SHARD_JSON.encode().startswith(
        start[30 : 30 + len(SHARD_JSON)]
    ):
        return False
    try:
        parse_header_at(fd, 0, size)
    except FormatError:
        return True
    return False


def parse_header_at(fd: int, offset: int, size: int) -> Entry:
    """The entry at `offset` of a file of `size` bytes. Raises FormatError if there is none, OSError."""
    entry = parse_header(read_at(fd, offset, min(HEADER_MAX, max(size - offset, 0))), offset)
    if entry.end > size:
        raise FormatError(f"the entry at byte {offset} is cut off")
    return entry


def read_checked(fd: int, offset: int, size: int, crc: int, what: str) -> bytes:
    """The bytes of an entry. Raises FormatError on a checksum mismatch."""
    data = read_at(fd, offset, size)
    if zlib.crc32(data) != crc:
        raise FormatError(f"{what} is damaged (checksum)")
    return data


def group_intact(fd: int, group: GroupEntry) -> bool:
    """Whether all bytes of a group match their checksums; reads in chunks. Raises FormatError, OSError."""
    ranges = [(entry.data_offset, entry.size, entry.crc) for entry in group.storages]
    ranges.append((group.body_offset, group.body_length, group.body_crc))
    for offset, size, crc in ranges:
        found = 0
        for start in range(offset, offset + size, CHUNK):
            found = zlib.crc32(read_at(fd, start, min(CHUNK, offset + size - start)), found)
        if found != crc:
            return False
    return True


def _is_finished(fd: int, size: int) -> bool:
    try:
        return any(entry.name == DATA_PKL for entry in read_directory(fd, size))
    except FormatError:
        return False


class _Scanner:
    """Walks the entries of a rank's file from its start."""

    def __init__(self, fd: int, size: int, verify: bool) -> None:
        self.fd, self.size, self.verify = fd, size, verify
        self.header: JsonObject = {}
        self.start: list[Entry] = []
        self.groups: list[GroupEntry] = []
        self.damaged: list[str] = []
        self.saw_pickle = False
        self.valid = 0
        self._storages: list[Entry] = []
        self._bad: list[tuple[int, str]] = []

    def run(self) -> None:
        first = parse_header_at(self.fd, 0, self.size)
        self.header = parse_shard_json(
            read_checked(self.fd, first.data_offset, first.size, first.crc, "its first entry")
        )
        at = self.valid = first.end
        self.start.append(first)
        while at < self.size and not self.saw_pickle:
            try:
                entry = parse_header_at(self.fd, at, self.size)
                self._take(entry)
            except FormatError:
                # The rest cannot be parsed: the torn tail.
                break
            at = entry.end
        # Damage is only between complete groups; after the last one it is a torn tail.
        self.damaged = [what for where, what in self._bad if where < self.valid]

    def _take(self, entry: Entry) -> None:
        if entry.name.startswith(DATA):
            self._storages.append(entry)
        elif entry.name.startswith(GROUPS):
            self._commit(entry)
            self._storages = []
        elif entry.name == DATA_PKL:
            self.saw_pickle = True
        elif self.groups or self._storages:
            raise FormatError(f"an unknown entry {entry.name}")
        else:
            self.start.append(entry)
            self.valid = entry.end

    def _commit(self, entry: Entry) -> None:
        try:
            group = read_group(self.fd, entry, tuple(self._storages))
            if self.verify and not group_intact(self.fd, group):
                raise FormatError(f"the group of task {group.task_index} is damaged (checksum)")
        except FormatError as error:
            self._bad.append((entry.offset, str(error)))
            return
        self.groups.append(group)
        self.valid = group.end


def read_group(fd: int, entry: Entry, storages: tuple[Entry, ...]) -> GroupEntry:
    """The group committed by `entry`, from its description. Raises FormatError if they do not match."""
    key = entry.name.removeprefix(GROUPS)
    if entry.size < FOOTER.size:
        raise FormatError(f"group {key} has no description")
    size = min(entry.size, DESCRIPTION_READ)
    last = read_at(fd, entry.end - size, size)
    length, crc = FOOTER.unpack_from(last, size - FOOTER.size)
    body_length = entry.size - FOOTER.size - length
    if body_length < 0:
        raise FormatError(f"group {key} has no whole description")
    if length > size - FOOTER.size:
        text = read_at(fd, entry.data_offset + body_length, length)
    else:
        text = last[size - FOOTER.size - length : size - FOOTER.size]
    if zlib.crc32(text) != crc:
        raise FormatError(f"the description of group {key} is damaged (checksum)")
    described = parse_json(text, f"the description of group {key}")
    found = [[item.name.removeprefix(DATA), item.size, item.crc] for item in storages]
    try:
        if described["storages"] != found:
            raise FormatError(f"group {key} has other storages than it was written with")
        body = (entry.data_offset, body_length, int(described["body_crc"]))
        return _group_entry(described, key, storages, body, entry.offset, entry.end)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"the description of group {key} lacks {error}") from None


def _first_name(fd: int, size: int) -> str:
    """The name of the first entry. Raises NotOurs if it does not have our format, OSError."""
    start = pread(fd, HEADER_MAX, 0)[:size]
    try:
        return parse_header(start, 0).name
    except FormatError:
        if start[30 : 30 + len(SHARD_JSON)] == SHARD_JSON.encode():
            raise
        raise NotOurs("it was not written by fsbarrier") from None


def _scan_merged(path: Path, fd: int, size: int, verify: bool) -> ShardScan:
    entries = {entry.name: entry for entry in read_directory(fd, size)}
    if MERGE_JSON not in entries:
        raise NotOurs("it was not written by fsbarrier")
    entry = entries[MERGE_JSON]
    index = parse_json(read_checked(fd, entry.data_offset, entry.size, entry.crc, "merge.json"), "merge.json")
    try:
        groups = tuple(_merged_group(record, entries) for record in index["groups"])
        metadata, fingerprint = dict(index["metadata"]), str(index["fingerprint"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"merge.json is malformed: {error!r}") from None
    bad = tuple(f"task {group.task_index}" for group in groups if verify and not group_intact(fd, group))
    return ShardScan(path, metadata, groups, size, 0, True, bad, merged=True, fingerprint=fingerprint)


def _merged_group(record: JsonObject, entries: dict[str, Entry]) -> GroupEntry:
    storages = tuple(entries[DATA + name] for name in record["storages"])
    body_offset, body_length, body_crc = (int(number) for number in record["body"])
    pickle = entries[DATA_PKL]
    if body_offset < pickle.data_offset or body_length < 0 or body_offset + body_length > pickle.end:
        raise ValueError("a group outside data.pkl")
    return _group_entry(
        record,
        str(record["key"]),
        storages,
        (body_offset, body_length, body_crc),
        body_offset,
        storages[-1].end if storages else body_offset + body_length,
    )


def _group_entry(
    described: JsonObject,
    key: str,
    storages: tuple[Entry, ...],
    body: tuple[int, int, int],
    start: int,
    end: int,
) -> GroupEntry:
    """A group from its description, which a rank's file and a merged one write alike; it begins at `start` where it has no storages.

    `body`: offset, length and CRC-32 of its pickled body. Raises KeyError, ValueError and the like for a bad description.
    """
    offset = storages[0].offset if storages else start
    return GroupEntry(
        int(described["task_index"]),
        str(described["task_id"]),
        int(described["trajectories"]),
        offset,
        end - offset,
        key,
        float(described["reward_sum"]),
        storages,
        *body,
        bool(described.get("signal", True)),
        int(described.get("unjudged", 0)),
        Tally.from_json(described["tally"]) if "tally" in described else None,
    )


def parse_shard_json(data: bytes) -> JsonObject:
    """The first entry of a rank's file: format, prefix, header. Raises FormatError."""
    record = parse_json(data, "shard.json")
    if record.get("format") != FORMAT:
        raise FormatError(f"written in format {record.get('format')!r}; this version reads format {FORMAT}")
    if not isinstance(record.get("header"), dict) or not isinstance(record.get("prefix"), str):
        raise FormatError("shard.json is malformed")
    return record


def parse_json(data: bytes, what: str) -> JsonObject:
    """A JSON object. Raises FormatError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise FormatError(f"{what} is not JSON") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object")
    return value
