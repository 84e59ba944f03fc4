"""Limits of time and memory for checks of what others have made: a chat template is a program, and a picture may be made to do harm."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

#: how long a check may compute for one prompt or picture; most take milliseconds
SECONDS = 3.0
#: what a check may use in addition to what this process has
MEMORY_BYTES = 4 << 30


class Exceeded(Exception):
    """The check needs more time or memory than it may have."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """In this block Python's code takes at most SECONDS, and memory is limited. Raises Exceeded. Only the main thread has a limit of
    time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    in_main = threading.current_thread() is threading.main_thread()

    def end(_: int, __: FrameType | None) -> NoReturn:
        raise Exceeded(f"it takes more than {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, end) if in_main else None
    try:
        if soft == resource.RLIM_INFINITY or wanted < soft:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
        if in_main:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
        yield
    except MemoryError:
        raise Exceeded(f"it takes more than {MEMORY_BYTES >> 30} GiB of memory") from None
    finally:
        if in_main:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
