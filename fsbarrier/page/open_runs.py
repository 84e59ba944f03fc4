"""The runs that the page shows. Each is read at most once a second, however many browsers look, and not at all while none does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fsbarrier.errors import FsbarrierError
from fsbarrier.page.tokens import TextOf, text_of_tokens
from fsbarrier.rundir import runrecord
from fsbarrier.view.answers import AnswerIndex
from fsbarrier.view.run_list import AT_ONCE, RunLine, line_of, run_folders
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import REPORT_BYTES, RunStatus, status_of, status_reader
from fsbarrier.wording import printable

T = TypeVar("T")
#: what was read is shown again to whoever asks within this many seconds
FRESH_S = 0.8


class Watched:
    """A reader of a run with the status that it last had."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._status: RunStatus | None = None

    def ask(self, what: Callable[[RunReader, RunStatus], T]) -> T:
        """What `what` makes of the reader and its status, which are read again unless they are fresh.

        Call it in a thread: it waits for the filesystem, and for other threads that ask.
        """
        with self._lock:
            now = time.monotonic()
            if self._status is None or now - self._read_at > FRESH_S:
                self._reader.poll(now)
                self._read_at, self._status = time.monotonic(), status_of(self._reader, now)
            return what(self._reader, self._status)

    def status(self) -> RunStatus:
        return self.ask(lambda _, status: status)


class OpenRun:
    """One run. The constructor raises UsageError or StoreError if its record cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.record = runrecord.load(path)
        self.answers = AnswerIndex(self.record.paths)
        #: the state now, and every result of all iterations
        self.newest = Watched(status_reader(path))
        self._whole: Watched | None = None
        self._tokenizer: list[TextOf | None] = []
        self._lock = threading.Lock()

    def whole(self) -> Watched:
        """A reader that also has the times of all iterations, which takes longer to read. Call it in a thread."""
        with self._lock:
            if self._whole is None:
                self._whole = Watched(RunReader(self.path, newest_bytes=REPORT_BYTES))
            return self._whole

    def token_texts(self) -> TextOf | None:
        """The texts of tokens, by the tokenizer of the run's model; None without one. It reads files, so call it in a thread."""
        with self._lock:
            if not self._tokenizer:
                folders = [
                    self.record.paths.served_model,
                    *([Path(self.record.model)] if self.record.model else []),
                ]
                self._tokenizer.append(text_of_tokens(folders))
            return self._tokenizer[0]

    def line(self) -> RunLine:
        return line_of(self.newest.status(), self.record.model)


class OpenRuns:
    """The runs of a folder, or one run. Names that browsers send are looked up here, and never become paths."""

    def __init__(self, folder: Path, only: Path | None = None) -> None:
        self.folder = folder
        self._only = only
        self._runs: dict[str, OpenRun] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenRun | None:
        """A run by the name of its folder. It reads files, so call it in a thread. Raises UsageError, StoreError if its record cannot be
        read."""
        path = next((path for path in self._folders() if path.name == name), None)
        if path is None:
            return None
        with self._lock:
            if name not in self._runs:
                self._runs[name] = OpenRun(path)
            return self._runs[name]

    def lines(self) -> tuple[list[tuple[str, RunLine]], list[str]]:
        """(name, line) of each run, the last active first; and why others cannot be shown. It reads files, so call it in a thread."""
        names = [path.name for path in self._folders()]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            looked = [*pool.map(self._line, names)]
        shown = [(name, each) for name, each in zip(names, looked, strict=True) if isinstance(each, RunLine)]
        shown.sort(key=lambda item: (item[1].last_activity_s is None, item[1].last_activity_s or 0.0))
        return shown, [each for each in looked if isinstance(each, str)]

    def _folders(self) -> Sequence[Path]:
        return [self._only] if self._only is not None else run_folders(self.folder)

    def _line(self, name: str) -> RunLine | str | None:
        try:
            run = self.get(name)
            return None if run is None else run.line()
        except (FsbarrierError, OSError) as error:
            return f"{printable(name)}: {printable(str(error))}"
