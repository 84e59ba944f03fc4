"""Merges the ranks' files of one iteration at a user's request: `fsbarrier aggregate`, `fsbarrier recover --aggregate`.

In a run the leader knows the parts and builds the request itself. Here the request is derived from the files.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fsbarrier.data import rank_files
from fsbarrier.data.merge import AggregateReport, OnProgress, merge, scan_merged
from fsbarrier.data.merge_plan import MergeRequest, make_plan, missing_text
from fsbarrier.data.rank_files import FileState, FoundFile
from fsbarrier.data.trajectory_scan import scan_shard
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir.paths import RunPaths


@dataclass(frozen=True, slots=True)
class RanksRequest:
    """A merge of one iteration and split; `files`: from `rank_files.find`."""

    log_path: Path
    split: str
    iteration: int
    files: tuple[FoundFile, ...]
    allow_partial: bool = False
    #: Also accept files with pickled Python objects; loading one can run arbitrary code.
    trust_pickle: bool = False
    dry_run: bool = False

    @property
    def out(self) -> Path:
        return RunPaths(self.log_path).merged(self.split, self.iteration)


@dataclass(frozen=True, slots=True)
class RanksMerged:
    """The result of a merge, or (`report=None`) of a dry run."""

    #: number of assigned tasks; None if no file records it
    expected: int | None
    missing: tuple[int, ...]
    report: AggregateReport | None
    would_merge: dict[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        report = None if self.report is None else asdict(self.report)
        would = {} if self.would_merge is None else {"would_merge": self.would_merge}
        return {"report": report, **would, "expected": self.expected, "missing": list(self.missing)}


def merge_ranks(request: RanksRequest, on_progress: OnProgress | None = None) -> RanksMerged:
    """Merge the files. Raises UsageError (missing tasks, unusable files), StoreError, ProgramFailed."""
    _refuse_unusable(request)
    with _with_converted(request) as files:
        wanted = MergeRequest(
            rank_files.parts(files),
            request.out,
            rank_files.common_metadata(files, request.split, request.iteration)
            | {"allow_partial": request.allow_partial},
            rank_files.expected_tasks(files),
            rank_files.groups_to_keep(files),
            request.allow_partial,
        )
        plan = make_plan(wanted)
        expected = None if wanted.expected is None else len(wanted.expected)
        done = _already_there(request.out, set(plan.taken), set(plan.missing), request.allow_partial)
        if done is not None:
            return RanksMerged(expected, plan.missing, done)
        if plan.missing and not request.allow_partial:
            raise UsageError(
                f"{request.out.name}: {missing_text(plan.missing)}. To merge without them: --allow-partial"
            )
        if request.dry_run:
            would = {
                "out": str(request.out),
                "groups": len(plan.taken),
                "duplicates_dropped": plan.duplicates,
            }
            return RanksMerged(expected, plan.missing, None, would)
        return RanksMerged(expected, plan.missing, merge(wanted, on_progress))


def _refuse_unusable(request: RanksRequest) -> None:
    for item in request.files:
        if item.state is FileState.FOREIGN and not request.trust_pickle:
            raise UsageError(
                f"{item.path.name}: {item.note}, and unpickling it could run arbitrary code; if you trust it, add --trust-pickle"
            )
        if item.state is FileState.UNREADABLE and not request.allow_partial:
            raise UsageError(
                f"{item.path.name}: {item.note}; move it away, or merge without it: --allow-partial"
            )


@contextlib.contextmanager
def _with_converted(request: RanksRequest) -> Iterator[list[FoundFile]]:
    """The input files; trusted foreign files are converted to temporary files during the merge."""
    usable = [item for item in request.files if item.mergeable]
    foreign = [item for item in request.files if item.state is FileState.FOREIGN]
    if not foreign:
        yield usable
        return
    with tempfile.TemporaryDirectory(prefix=".trusted-", dir=foreign[0].path.parent) as folder:
        for item in foreign:
            target = Path(folder) / item.path.name
            # In a separate process, because loading such a file runs arbitrary code.
            program = "fsbarrier.workers.trusted_pickle"
            command = [sys.executable, "-m", program, str(item.path), str(target), str(item.node_rank)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ProgramFailed(f"{item.path.name}: cannot load the file: {last}")
            scan = scan_shard(target, verify=False)
            usable.append(
                FoundFile(target, request.split, item.node_rank, FileState.FINISHED, "from a pickle", scan)
            )
        yield usable


def _already_there(
    out: Path, tasks: set[int], missing: set[int], allow_partial: bool
) -> AggregateReport | None:
    """The report of an existing intact merged file with all of `tasks`, whose run itself dropped the `missing` ones."""
    scan = scan_merged(out, verify=True)
    if scan is None or not scan.merged or not tasks <= {group.task_index for group in scan.groups}:
        return None
    cut_off = scan.header.get("cut_off")
    if (
        missing
        and not allow_partial
        and not (isinstance(cut_off, list) and all(task in cut_off for task in missing))
    ):
        return None
    absent = scan.header.get("missing")
    return AggregateReport(
        out=str(out),
        trajectories=scan.trajectories,
        groups=len(scan.groups),
        missing=tuple(absent) if isinstance(absent, list) else (),
        duplicates_dropped=0,
        bytes=scan.valid_bytes,
        reward_mean=scan.reward_mean,
        already_done=True,
        fingerprint=scan.fingerprint,
    )
