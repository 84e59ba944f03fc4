"""What every worker program does around its work: read the spec, show progress, leave a result, fail in one line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.errors import FsbarrierError
from fsbarrier.supervision import signals

SHOW_S = 0.2


class Progress:
    """The progress file: rewritten as a whole, at most five times a second; it is also the program's sign of life."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._shown_at = path, 0.0

    def show(self, done: int, total: int, unit: str, *, last: bool = False, **fields: Any) -> None:
        """Say how far the work is. `fields`: reward_mean, tokens_per_s, note."""
        now = time.monotonic()
        if self._path is None or (now - self._shown_at < SHOW_S and not last):
            return
        self._shown_at = now
        known = {"reward_mean": None, "tokens_per_s": None, "note": ""}
        files.write_atomic(
            self._path, json.dumps({"done": done, "total": total, "unit": unit, **known, **fields}).encode()
        )


def run_worker(main: Callable[[dict[str, Any], Progress], dict[str, Any] | None]) -> int:
    """Run `main(spec, progress)` and leave its result (None: this process leaves none); gives the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True, help="the JSON file that says what to do")
    spec = json.loads(parser.parse_args().spec.read_text())
    signal.signal(signal.SIGTERM, signals.end)
    shared = bool(spec["settings"].get("shared_group"))
    files.set_shared_group(shared)
    os.umask(0o007 if shared else 0o077)  # for the files that libraries write
    try:
        result = main(spec, Progress(Path(spec["progress"])))
    except FsbarrierError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code if error.exit_code == 2 else 1
    except OSError as error:
        if error.errno is None:  # a library's own, not the system's
            raise
        print(f"{error.filename or 'a file'}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    if result is not None:
        files.write_atomic(Path(spec["result"]), json.dumps(result).encode())
    return 0
