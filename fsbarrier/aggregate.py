"""Merges trajectory files; started by a phase or by a user.

`python -m fsbarrier.aggregate --spec SPEC.json` is the worker that a phase starts. `python -m fsbarrier.aggregate --log-path D
--iteration 5` (the same as `fsbarrier aggregate`) finds the ranks' files, finished or not, lists and merges them. Python API: `aggregate`,
`load` and `iter_trajectories`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from fsbarrier.data.merge import AggregateReport, MergeRequest, Part, collect, merge, publish
from fsbarrier.data.reader import iter_trajectories, load
from fsbarrier.processes import worker_contract
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rewards.evaluation import figures
from fsbarrier.settings.sections import Settings
from fsbarrier.store.typed import from_spec

__all__ = ["AggregateReport", "Part", "aggregate", "iter_trajectories", "load"]


def aggregate(
    parts: Sequence[Part],
    out: Path,
    *,
    metadata: dict[str, object],
    expected: Collection[int] | None,
    keep: int | None = None,
    allow_partial: bool = False,
) -> AggregateReport:
    """Merge the groups of `parts` into `out`, atomically (by rename); see `MergeRequest` and `merge`.

    Raises UsageError (missing tasks, a part that is no rank's file), StoreError.
    """
    wanted = None if expected is None else tuple(expected)
    request = MergeRequest(tuple(parts), out, metadata, wanted, keep, allow_partial)
    return merge(request)


# --- the worker -------------------------------------------------------------------------------------------------------


def work(spec: JsonObject, settings: Settings, progress: worker_contract.ProgressWriter) -> dict[str, object]:
    """Merge according to the spec and return the report."""
    collected = collect(from_spec(spec, MergeRequest))
    success = spec.get("success")
    evaluated = {} if success is None else figures(collected.trajectories, success)
    # Of all that was rolled out, also of groups that are not merged.
    means = {task: mean for task, one in collected.stats.items() if (mean := one.reward_mean) is not None}
    report = publish(collected)
    progress.show(report.trajectories, report.trajectories, "trajectories", last=True)
    result = {**asdict(report), **report.figures, **evaluated}
    for name, tasks in spec.get("sets", {}).items():
        if own := [means[task] for task in tasks if task in means]:
            result[f"train_reward/{name}"] = fmean(own)
    if (last := spec.get("last_rewards")) is not None:
        result["last_rewards"] = {**last, **{str(task): round(mean, 4) for task, mean in means.items()}}
    # The phase already knows the file name.
    return {name: value for name, value in result.items() if name not in ("figures", "out")}


def command_line(words: Sequence[str]) -> int:
    """`python -m fsbarrier.aggregate` as worker or command; returns the exit code."""
    if words and words[0] == "--spec":
        return worker_contract.run_worker(work)
    from fsbarrier.cli import main

    return main(["aggregate", *words])


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
