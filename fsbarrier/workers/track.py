"""Logs each iteration's metrics to trackers (W&B, TensorBoard, MLflow) through accelerate. A separate process beside the leader.

Its daemon sends it the number of each finished iteration (run/tracking.py). It then reads the journals, and logs every iteration that a
tracker does not have yet. The progress is stored in the run directory, so another node's process can continue without gaps; iterations
logged just before a kill are logged again under the same step. A failing tracker is reported and retried at the next iteration; it never
delays the run.

Only this module loads accelerate and the trackers' packages.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.secrecy import shown
from fsbarrier.settings.section import leaves
from fsbarrier.settings.sections import Settings, TrackerSettings
from fsbarrier.specs import TrackSpec
from fsbarrier.store import files, reading
from fsbarrier.view.report_formats import csv_table, iteration_rows
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import REPORT_BYTES, status_of

#: low priority, so that training is not slowed down
NICENESS = 10
MESSAGE_BYTES = 64


@dataclass
class TrackerState:
    """`through`: the last logged iteration of each tracker; `ids`: the run ids that services assigned."""

    through: dict[str, int] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> TrackerState:
        """Read the state. Raises ValueError for an invalid file, because logging everything again would be worse than logging nothing."""
        try:
            state = json.loads(reading.read_bytes(path, reading.RECORD_BYTES))
            return cls({str(k): int(v) for k, v in state["through"].items()}, {**state["ids"]})
        except FileNotFoundError:
            return cls()
        except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{path}: {error!r}") from None

    def write(self, path: Path) -> None:
        files.write_atomic(path, json.dumps(asdict(self)).encode())


class OneTracker:
    """A tracker, started when it first receives metrics."""

    def __init__(self, name: str, project: str, run_id: str, folder: Path, config: dict[str, Any]) -> None:
        self.name, self._project, self._run_id = name, project, run_id
        self._folder, self._config = folder, config
        self._tracker: Any = None
        self.failed = ""

    def log(self, values: dict[str, float], iteration: int, progress: TrackerState) -> None:
        """Log one iteration. Raises whatever the tracker's package raises."""
        if self._tracker is None:
            self._start(progress)
        # Without commit, W&B would buffer the values until the next step and lose them if the process dies.
        more = {"commit": True} if self.name == "wandb" else {}
        self._tracker.log(values, step=iteration, **more)

    def _start(self, progress: TrackerState) -> None:
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # Trackers write below their own folder and follow links.
        files.make_dirs_below(self._folder.parent, self._folder / self.name)
        PartialState(cpu=True)
        known = progress.ids.get(self.name)
        tracker = LOGGER_TYPE_TO_CLASS[self.name](**self._arguments(known))
        tracker.start()
        new = self.name not in progress.through
        if new and self.name != "tensorboard":
            # TensorBoard would show the settings as a separate run.
            tracker.store_init_configuration(self._config)
        if self.name == "mlflow":
            progress.ids[self.name] = tracker.tracker.info.run_id
        self._tracker = tracker

    def _arguments(self, known: str | None) -> dict[str, Any]:
        """Arguments that make restarts continue the same run, and keep all files below the run directory."""
        run, own = self._run_id, str(self._folder / self.name)
        match self.name:
            case "tensorboard":
                return {"run_name": run, "logging_dir": own}
            case "wandb":
                return {"run_name": self._project, "id": run, "name": run, "resume": "allow", "dir": own}
            case "mlflow":
                if "MLFLOW_TRACKING_URI" not in os.environ:
                    os.environ |= {"MLFLOW_TRACKING_URI": f"file:{own}", "MLFLOW_ALLOW_FILE_STORE": "true"}
                return {"experiment_name": self._project, "run_name": run, "run_id": known}
            case other:
                raise ValueError(other)

    def finish(self) -> None:
        if self._tracker is not None:
            self._tracker.finish()


class Trackers:
    """All trackers of a run. `say(name, why)` is called once when a tracker starts to fail."""

    def __init__(self, log_path: Path, settings: TrackerSettings, say: Callable[[str, str], None]) -> None:
        self._reader = RunReader(log_path, newest_bytes=REPORT_BYTES)
        self._folder = RunPaths(log_path).trackers
        self._say = say
        files.make_dirs(self._folder)
        self._file = self._folder / "progress.json"
        self._progress = TrackerState.read(self._file)
        run_id = self._reader.record.run_id
        config = dict(leaves(shown(self._reader.record.settings.as_json())))
        self._trackers = [
            OneTracker(name, settings.project, run_id, self._folder, config) for name in settings.names
        ]

    def bring(self, iteration: int) -> None:
        """Log all iterations up to this one to every tracker. Raises OSError, ValueError."""
        self._reader.poll(time.monotonic())
        status = status_of(self._reader, time.monotonic())
        rows = {number: _numbers(row) for number, row in iteration_rows(self._reader, status).items()}
        for tracker in self._trackers:
            known = self._progress.through.get(tracker.name, 0)
            for number in sorted(n for n in rows if known < n <= iteration):
                values = rows[number]
                # There is no reward if no answer could be judged.
                last = rows.get(number + 1, {}).get("test_reward") if self._ends_with(number) else None
                if number == iteration and last is not None:
                    # If the run continues, the next iteration evaluates the same policy again, under the usual name.
                    values |= {"last_policy/test_reward": last}
                if not self._logged(tracker, values, number):
                    break
                self._progress.through[tracker.name] = number
                self._progress.write(self._file)
        table = csv_table(self._reader, status)
        files.write_atomic(self._folder / "iterations.csv", table.encode())

    def _ends_with(self, iteration: int) -> bool:
        """Whether a session ended after this iteration and evaluated its last policy; the result is stored with the next iteration."""
        following = self._reader.history.results().get(iteration + 1, ())
        return any(event.fields.get("final") is True for event in following)

    def _logged(self, tracker: OneTracker, values: dict[str, float], iteration: int) -> bool:
        try:
            tracker.log(values, iteration, self._progress)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if not tracker.failed:
                self._say(tracker.name, why)
            tracker.failed = why
            return False
        tracker.failed = ""
        return True

    def finish(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:
                self._say(tracker.name, f"{type(error).__name__}: {error}")


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The numbers in a row of the table of iterations."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def work(given: JsonObject, settings: Settings, progress: ProgressWriter) -> None:
    """Log the iterations that the daemon sends, until it closes its end of the socket."""
    spec = TrackSpec.from_json(given)
    os.nice(NICENESS)
    daemon = socket.socket(fileno=spec.socket)

    def say(name: str, why: str) -> None:
        daemon.send(json.dumps({"tracker": name, "why": why[:1000]}).encode())

    trackers: Trackers | None = None
    while message := daemon.recv(MESSAGE_BYTES):
        # After a filesystem error, this iteration is logged with the next one.
        try:
            trackers = trackers or Trackers(spec.run_record.parent, settings.tracker, say)
            if iteration := int(message):
                trackers.bring(iteration)
        except OSError as error:
            say("", f"{error.filename or 'a file'}: {error.strerror}")
    if trackers is not None:
        trackers.finish()


if __name__ == "__main__":
    sys.exit(run_worker(work))
