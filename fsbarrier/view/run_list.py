"""One line for each run of a folder: its state, model, program, position and rewards. For `fsbarrier runs` and the page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.view.run_status import RunStatus, read_status
from fsbarrier.wording import one_line

#: Number of runs to inspect concurrently. Most of the time is spent waiting for heartbeats.
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run. The rewards are the latest known; `best_test_reward`: the highest held-out one; `last_activity_s`: seconds since the newest
    heartbeat."""

    path: str
    state: str
    program: str
    model: str | None
    iteration: int
    iterations: int | None
    nodes: int
    train_reward: float | None
    test_reward: float | None
    best_test_reward: float | None
    last_activity_s: float | None

    def to_json(self) -> JsonObject:
        return asdict(self)


def run_folders(folder: Path) -> list[Path]:
    """The run directories in a folder. One that this user may not enter is skipped. Raises UsageError."""
    try:
        return sorted(path for path in folder.iterdir() if os.path.lexists(RunPaths(path).record))
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None


def look_at_runs(folders: Sequence[Path], *, watch: bool = True) -> tuple[list[RunLine], list[str]]:
    """The runs, the last active first, and why others were skipped. `watch`: watch their heartbeats for 1.5 beats."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = [*pool.map(lambda path: _look(path, watch), folders)]
    runs = [each for each in looked if isinstance(each, RunLine)]
    runs.sort(key=lambda run: (run.last_activity_s is None, run.last_activity_s))
    return runs, [each for each in looked if isinstance(each, str)]


def _look(path: Path, watch: bool) -> RunLine | str:
    try:
        return line_of(read_status(path, watch=watch), runrecord.load(path).model)
    except (FsbarrierError, OSError) as error:
        return f"skipped {path.name}: {one_line(str(error))}"


def line_of(status: RunStatus, model: str | None) -> RunLine:
    """The line of a run whose status is known."""
    beats = [node.last_beat_time for node in status.nodes if node.last_beat_time is not None]
    train = [reward.train for reward in status.rewards if reward.train is not None]
    test = [reward.test for reward in status.rewards if reward.test is not None]
    return RunLine(
        path=status.log_path,
        state=status.state,
        program=status.program,
        model=None if model is None else Path(model).name,
        iteration=status.iteration,
        iterations=status.iterations,
        nodes=status.num_nodes,
        train_reward=train[-1] if train else None,
        test_reward=test[-1] if test else None,
        best_test_reward=max(test, default=None),
        last_activity_s=max(0.0, time.time() - max(beats)) if beats else None,
    )
