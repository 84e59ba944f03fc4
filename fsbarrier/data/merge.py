"""Merges trajectory files: plans from the headers, copies in parallel while verifying all checksums, and publishes with one rename.

The plan determines the position of every byte in the result: first `data.pkl` with the groups in task order, then the storages in
part order. Parts are therefore read once, sequentially, in chunks, and nothing is unpickled. The order of the trajectories does
not depend on timing. `aggregate.py` is the command.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.data.merge_copy import Piece, copy_pieces
from fsbarrier.data.merge_plan import (
    GroupPlace,
    MergePlan,
    MergeRequest,
    make_plan,
    merged_metadata,
    missing_text,
)
from fsbarrier.data.torch_pickle import ALIGNMENT, FormatError
from fsbarrier.data.torch_zip import Entry, first_entries, header_bytes, make_entry, write_at, write_directory
from fsbarrier.data.trajectory_scan import (
    DATA,
    MERGE_JSON,
    TORCH_FILES,
    NotOurs,
    ShardScan,
    mean_reward,
    scan_shard,
)
from fsbarrier.data.trajectory_writer import pickle_entry
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.files import fsync_dir, make_dirs, open_new, rename
from fsbarrier.host.identity import host_name
from fsbarrier.retry import FAILING, retry


@dataclass(frozen=True, slots=True)
class AggregateReport:
    """The result of a merge; `dataclasses.asdict` converts it to JSON."""

    out: str
    trajectories: int
    groups: int
    #: task indices
    missing: tuple[int, ...]
    duplicates_dropped: int
    #: size of the merged file
    bytes: int
    reward_mean: float | None
    already_done: bool
    #: groups dropped because of a checksum mismatch
    damaged: tuple[str, ...] = ()
    #: groups dropped because their task is not expected
    unexpected: int = 0
    #: digest of the merged groups' contents
    fingerprint: str = ""
    #: groups dropped because enough others were kept: without signal, or surplus
    left_out: int = 0
    #: mean over all groups, including dropped ones
    rolled_out_reward_mean: float | None = None
    #: trajectories without a score, because the reward or the agent failed; the means ignore them
    unjudged: int = 0
    #: metrics over all groups, including dropped ones (data/tally.py)
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a merge."""

    trajectories: int
    trajectories_total: int
    bytes: int
    bytes_total: int


OnProgress = Callable[[Progress], None]


def merge(request: MergeRequest, on_progress: OnProgress | None = None) -> AggregateReport:
    """Merge the groups of the parts into `request.out`, atomically (by rename).

    If the file already contains exactly these groups and is intact, it is not changed, even if the metadata differs.
    Raises UsageError (missing tasks, incompatible parts, a foreign file at `out`), StoreError.
    """
    try:
        # The rename is the last step, so the whole merge can be retried. A temporary file with a random name exists only because this
        # process made it although its mount said otherwise.
        return retry(lambda: _merge(request, on_progress), errnos=FAILING | {errno.EEXIST})
    except OSError as error:
        raise StoreError(f"{request.out}: cannot merge: {error.strerror or error}") from error


def _merge(request: MergeRequest, on_progress: OnProgress | None) -> AggregateReport:
    out = request.out
    excluded: set[GroupPlace] = set()
    damaged: list[str] = []
    # Only copying reads every byte; groups found damaged are excluded from the next plan.
    while True:
        plan = make_plan(request, excluded)
        if plan.missing and not request.allow_partial:
            why = f"; damaged: {', '.join(damaged)}" if damaged else ""
            raise UsageError(
                f"{out.name}: {missing_text(plan.missing)}{why}. To merge without them: --allow-partial"
            )
        if not plan.taken:
            raise UsageError(f"{out.name}: the parts contain no groups to merge")
        if (size := _size_if_done(out, plan.fingerprint)) is not None:
            return _report(plan, out, size, damaged, already_done=True)
        bad = _Merge(request, plan, merged_metadata(request, plan, damaged), on_progress).run()
        if not bad:
            return _report(plan, out, out.stat().st_size, damaged, already_done=False)
        excluded |= bad
        damaged += [f"{key} of {request.parts[position].path.name}" for position, key in sorted(bad)]


def scan_merged(out: Path, *, verify: bool) -> ShardScan | None:
    """The merged file at `out`; None if it does not exist, or if it is a damaged one of ours, which is recreated.

    Raises UsageError if the file was not written by fsbarrier, StoreError.
    """
    # List the folder first, because NFS may cache the absence of a name for 30 s.
    if not out.parent.is_dir() or out.name not in os.listdir(out.parent):
        return None
    try:
        scan = scan_shard(out, verify=verify)
    except NotOurs as error:
        raise UsageError(f"{error}; not overwriting it, move it away") from None
    except FormatError:
        return None
    return None if scan.damaged else scan


def _size_if_done(out: Path, fingerprint: str) -> int | None:
    """The size of `out` if it is intact and contains exactly the groups of `fingerprint`."""
    there = scan_merged(out, verify=False)
    if there is None or there.fingerprint != fingerprint:
        return None
    there = scan_merged(out, verify=True)
    return None if there is None else there.valid_bytes


def _report(
    plan: MergePlan, out: Path, size: int, damaged: list[str], *, already_done: bool
) -> AggregateReport:
    groups = plan.by_task
    return AggregateReport(
        out=str(out),
        trajectories=sum(group.trajectories for group in groups),
        groups=len(groups),
        missing=plan.missing,
        duplicates_dropped=plan.duplicates,
        bytes=size,
        reward_mean=mean_reward(groups),
        already_done=already_done,
        damaged=tuple(damaged),
        unexpected=plan.unexpected,
        fingerprint=plan.fingerprint,
        left_out=len(plan.without_signal) + len(plan.surplus),
        rolled_out_reward_mean=plan.rolled_out_reward_mean,
        unjudged=sum(group.unjudged for group in groups),
        figures=plan.figures,
    )


class _Merge:
    """Writes one planned result. `run` returns the damaged groups; if there are any, nothing was published."""

    def __init__(
        self,
        request: MergeRequest,
        plan: MergePlan,
        metadata: dict[str, object],
        on_progress: OnProgress | None,
    ) -> None:
        self.plan, self.metadata, self.on_progress = plan, metadata, on_progress
        self.parts, self.out = request.parts, request.out
        self.pieces: list[list[Piece]] = [[] for _ in request.parts]
        self.entries: list[Entry] = []
        self.body_places: dict[int, int] = {}
        self.end = 0

    def run(self) -> set[GroupPlace]:
        make_dirs(self.out.parent)
        remove_leftovers(self.out)
        temporary = self.out.with_name(
            f"{_temporary_start(self.out)}{os.getpid()}.{secrets.token_hex(4)}.tmp"
        )
        try:
            fd = open_new(temporary)
            try:
                bad = self._write(fd)
                if not bad:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not bad:
                rename(temporary, self.out)
                fsync_dir(self.out.parent)
            return bad
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _write(self, fd: int) -> set[GroupPlace]:
        self.entries, start = first_entries(TORCH_FILES)
        self._lay_out_pickle(fd, write_at(fd, 0, start))
        self._lay_out_storages()
        bad = self._copy(fd)
        if not bad:
            self._write_index(fd)
        return bad

    def _lay_out_pickle(self, fd: int, offset: int) -> None:
        """Write data.pkl's header, frame and checksum, which are known before the bodies are copied."""
        groups = self.plan.by_task
        entry, before, after = pickle_entry(self.metadata, groups, offset)
        self.entries.append(entry)
        at = write_at(fd, offset, header_bytes(entry) + before)
        for group in groups:
            self.body_places[group.task_index] = at
            at += group.body_length
        self.end = write_at(fd, at, after)

    def _lay_out_storages(self) -> None:
        self.end += -self.end % ALIGNMENT
        for position, group in self.plan.taken.values():
            where = (position, group.key)
            for storage in group.storages:
                entry = make_entry(storage.name, storage.size, storage.crc, self.end)
                self.entries.append(entry)
                self.end = entry.end
                self.pieces[position].append(
                    Piece(
                        storage.data_offset,
                        storage.size,
                        storage.crc,
                        entry.offset,
                        header_bytes(entry),
                        where,
                    )
                )
            body = Piece(
                group.body_offset,
                group.body_length,
                group.body_crc,
                self.body_places[group.task_index],
                b"",
                where,
            )
            self.pieces[position].append(body)

    def _copy(self, fd: int) -> set[GroupPlace]:
        counts = {(position, group.key): group.trajectories for position, group in self.plan.taken.values()}
        total = sum(piece.size for pieces in self.pieces for piece in pieces)
        progress = Progress(0, sum(counts.values()), 0, total)
        bad: set[GroupPlace] = set()
        for part, pieces in zip(self.parts, self.pieces, strict=True):
            for done in copy_pieces(part.path, fd, pieces, bad):
                finished = sum(counts.pop(piece.group, 0) for piece in done if not piece.header)
                progress = Progress(
                    progress.trajectories + finished,
                    progress.trajectories_total,
                    progress.bytes + sum(piece.size for piece in done),
                    total,
                )
                if self.on_progress:
                    self.on_progress(progress)
        return bad

    def _write_index(self, fd: int) -> None:
        records = [
            {
                "task_index": group.task_index,
                "task_id": group.task_id,
                "trajectories": group.trajectories,
                "reward_sum": group.reward_sum,
                "signal": group.signal,
                "unjudged": group.unjudged,
                **({} if group.tally is None else {"tally": group.tally.as_json()}),
                "key": group.key,
                "storages": [storage.name.removeprefix(DATA) for storage in group.storages],
                "body": [self.body_places[group.task_index], group.body_length, group.body_crc],
            }
            for group in self.plan.by_task
        ]
        index = {"fingerprint": self.plan.fingerprint, "metadata": self.metadata, "groups": records}
        text = json.dumps(index).encode()
        entry = make_entry(MERGE_JSON, len(text), zlib.crc32(text), self.end)
        self.entries.append(entry)
        at = write_at(fd, entry.offset, header_bytes(entry) + text)
        write_directory(fd, self.entries, at)


def remove_leftovers(out: Path) -> None:
    """Remove the temporary files of merges into `out` that were killed on this machine."""
    start = _temporary_start(out)
    for name in os.listdir(out.parent):
        match = re.fullmatch(re.escape(start) + r"(\d+)\.[0-9a-f]{8}\.tmp", name)
        if match and int(match[1]) != os.getpid() and not Path("/proc", match[1]).exists():
            with contextlib.suppress(OSError):
                os.unlink(out.parent / name)


def _temporary_start(out: Path) -> str:
    return f".{out.name}.{re.sub('[^A-Za-z0-9-]', '-', host_name())}."
