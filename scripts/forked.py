"""Runs Python commands in forks of a process that has imported what they all need: pytest and its plugins.

Each command of scripts/mutants.py lasts a few seconds, of which importing would be three. Nothing of fsbarrier is imported before the
fork, so a command sees the source as it is then.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

# What no test changes, and no mutant is in. Without torch, which has threads.
IMPORTED = (
    "pytest",
    "_pytest.unittest",
    "pytest_timeout",
    "xdist.plugin",
    "anyio.pytest_plugin",
    "hypothesis.stateful",
)


class Forks:
    """Runs commands in `folder`, one at a time."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env={**os.environ, **environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, words: Sequence[str], within_s: float | None) -> subprocess.CompletedProcess[str]:
        """What `python *words` prints, and its exit code: -SIGKILL after `within_s`."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with tempfile.NamedTemporaryFile("r") as said:
            print(json.dumps([said.name, within_s, *words]), file=self._child.stdin, flush=True)
            return subprocess.CompletedProcess(words, int(self._child.stdout.readline()), said.read(), "")

    def close(self) -> None:
        """End the process, and wait for it."""
        self._child.communicate()


def serve() -> None:
    """Fork for each line of stdin, and print how the fork ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        said, within_s, *words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(Path(said), words)
        print(_ended(pid, within_s), flush=True)


def _become(said: Path, words: list[str]) -> None:
    """Be `python *words`: a program, or a module after -m."""
    os.setsid()
    code: object = 1
    with said.open("w") as output, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            sys.argv = words
            if words[0] == "-m":
                sys.argv = words[1:]
                sys.path[0] = os.getcwd()
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)


def _ended(pid: int, within_s: float | None) -> int:
    def kill(*_: object) -> None:
        os.killpg(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, within_s or 0)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    serve()
