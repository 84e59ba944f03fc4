"""Another user of this machine, for tests of what such a one can do. Only root may become one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: a number that is nobody's on the systems that the suite runs on
UID = 64123

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user of the machine")

#: This environment may lie in a folder that the other user cannot enter.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


def start_as_other(code: str, *words: str | Path) -> subprocess.Popen[str]:
    """Start Python code (standard library only) as the other user."""
    command = [PYTHON, "-I", "-c", code, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        user=UID,
        group=UID,
        extra_groups=[],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd="/",
    )
