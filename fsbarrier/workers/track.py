"""Logs each iteration's metrics to trackers (W&B, TensorBoard, MLflow) through accelerate. A separate process beside the leader.

Its daemon sends it the number of each finished iteration (run/tracking.py). It then reads the journals, and logs every iteration that a
tracker does not have yet. The progress is stored in the run directory, so another node's process can continue without gaps; iterations
logged just before a kill are logged again under the same step. A failing tracker is reported and retried at the next iteration; it never
delays the run.

Only this module loads accelerate and the trackers' packages.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from fsbarrier.view.report_samples import of_iteration
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import REPORT_BYTES, status_of

#: low priority, so that training is not slowed down
NICENESS = 10
MESSAGE_BYTES = 64
#: the table of sample answers
COLUMNS = ("iteration", "split", "which", "about", "messages")


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

    def __init__(
        self,
        name: str,
        project: str,
        run_id: str,
        folder: Path,
        config: dict[str, Any],
        run_name: str | None = None,
    ) -> None:
        self.name, self._project, self._run_id, self._run_name = name, project, run_id, run_name or run_id
        self._folder, self._config = folder, config
        self._tracker: Any = None
        self.failed = ""

    def log(
        self,
        values: dict[str, float],
        iteration: int,
        progress: TrackerState,
        answers: Sequence[Sequence[str]] = (),
    ) -> None:
        """Log one iteration, with rows of sample answers. Raises whatever the tracker's package raises."""
        if self._tracker is None:
            self._start(progress)
        if answers:
            self._log_samples(answers, iteration)
        # Without commit, W&B would buffer the values until the next step and lose them if the process dies.
        more = {"commit": True} if self.name == "wandb" else {}
        self._tracker.log(values, step=iteration, **more)

    def _log_samples(self, answers: Sequence[Sequence[str]], iteration: int) -> None:
        rows = [[str(iteration), *row] for row in answers]
        match self.name:
            case "wandb":
                # The metrics, which follow, end this step.
                self._tracker.log_table(
                    "samples", columns=[*COLUMNS], data=rows, step=iteration, commit=False
                )
            case "mlflow":
                mlflow: Any = importlib.import_module("mlflow")
                table = {name: [row[number] for row in rows] for number, name in enumerate(COLUMNS)}
                mlflow.log_table(
                    table, artifact_file="samples.json", run_id=self._tracker.tracker.info.run_id
                )
            case _:
                # TensorBoard shows text as Markdown, in which an indented block is verbatim.
                text = "\n\n".join(
                    f"**{label}** {facts}\n\n{_indented(said)}" for _, _, label, facts, said in rows
                )
                self._tracker.writer.add_text("samples", text, iteration)

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
        own, shown_as = str(self._folder / self.name), self._run_name
        match self.name:
            case "tensorboard":
                # Its name is that of a folder.
                return {"run_name": re.sub(r"[^\w.-]", "_", shown_as).lstrip("."), "logging_dir": own}
            case "wandb":
                about = {"id": self._run_id, "name": shown_as, "resume": "allow", "dir": own}
                return {"run_name": self._project, **about}
            case "mlflow":
                if "MLFLOW_TRACKING_URI" not in os.environ:
                    os.environ |= {"MLFLOW_TRACKING_URI": f"file:{own}", "MLFLOW_ALLOW_FILE_STORE": "true"}
                return {"experiment_name": self._project, "run_name": shown_as, "run_id": known}
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
            OneTracker(name, settings.project, run_id, self._folder, config, settings.run_name)
            for name in settings.names
        ]
        self._sends_samples = settings.samples

    def bring(self, iteration: int) -> None:
        """Log all iterations up to this one to every tracker. Raises OSError, ValueError."""
        self._reader.poll(time.monotonic())
        status = status_of(self._reader, time.monotonic())
        rows = {number: _numbers(row) for number, row in iteration_rows(self._reader, status).items()}
        # The trajectories of earlier iterations may have been removed, so only this one's answers are sent.
        answers = _sample_rows(self._reader, iteration) if self._sends_samples else []
        for tracker in self._trackers:
            known = self._progress.through.get(tracker.name, 0)
            for number in sorted(n for n in rows if known < n <= iteration):
                values = rows[number]
                # There is no reward if no answer could be judged.
                last = rows.get(number + 1, {}).get("test_reward") if self._ends_with(number) else None
                if number == iteration and last is not None:
                    # If the run continues, the next iteration evaluates the same policy again, under the usual name.
                    values |= {"last_policy/test_reward": last}
                if not self._logged(tracker, values, number, answers if number == iteration else []):
                    break
                self._progress.through[tracker.name] = number
                self._progress.write(self._file)
        table = csv_table(self._reader, status)
        files.write_atomic(self._folder / "iterations.csv", table.encode())

    def _ends_with(self, iteration: int) -> bool:
        """Whether a session ended after this iteration and evaluated its last policy; the result is stored with the next iteration."""
        following = self._reader.history.results().get(iteration + 1, ())
        return any(event.fields.get("final") is True for event in following)

    def _logged(
        self, tracker: OneTracker, values: dict[str, float], iteration: int, answers: Sequence[Sequence[str]]
    ) -> bool:
        try:
            tracker.log(values, iteration, self._progress, answers)
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


def _sample_rows(reader: RunReader, iteration: int) -> list[list[str]]:
    """The report's sample answers of this iteration, as rows of `COLUMNS` without the first."""
    rows = []
    for split, (_, samples, _) in of_iteration(reader.paths, iteration).items():
        for label, facts, messages, _ in samples:
            said = "\n".join(f"{role}: {text}" for role, text, _ in messages)
            rows.append([split, label, facts, said])
    return rows


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


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
