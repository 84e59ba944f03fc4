"""Commands of fsbarrier as a user types them, carried out in this process."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
from dataclasses import dataclass

from fsbarrier import cli


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


def typed(*words: object, code: int | None = 0) -> Said:
    """`fsbarrier WORDS`, which must end with `code` (None: with any)."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            ended = cli.main([str(word) for word in words])
        except SystemExit as end:
            # argparse, after --help.
            ended = int(end.code or 0)
    said = Said(ended, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
    assert code in (None, ended), said
    return said


def starts(python: str) -> bool:
    """Whether this Python runs. A name on the path may lead to a version manager that has no such version."""
    return (
        shutil.which(python) is not None
        and subprocess.run([python, "--version"], capture_output=True).returncode == 0
    )
