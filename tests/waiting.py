"""Waiting for a state: the one loop for it in the tests; and ports that stay free until they are used."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

T = TypeVar("T")

# For a machine under any load; most of what is waited for takes milliseconds.
DEADLINE_S = 240.0
#: what one Python process takes on a quiet machine, generously
QUIET_S = 0.1
# Each process of the tests begins somewhere else.
_ports = itertools.count(131 * os.getpid())


def until(
    holds: Callable[[], T],
    said: Callable[[], object] = str,
    *,
    deadline_s: float = DEADLINE_S,
    lives: Callable[[], object] = lambda: True,
) -> T:
    """What `holds` gives, once that is true. `said`: what is known where it does not come; `lives`: whether it may still come."""
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while True:
        begun = time.thread_time()
        if found := holds():
            return found
        assert time.monotonic() < end and lives(), f"what was waited for does not come\n{said()}"
        # Whoever reads a long journal again and again leaves most of a core to what is to be written there.
        pause.wait(min(0.1, max(0.01, 4 * (time.thread_time() - begun))))


@cache
def slowness() -> float:
    """How many times longer than on a quiet machine a process takes here to start and end; at least 1. Measured when first asked.

    For tests of limits of the product's own: what must be done within such a limit gets so much more time, and so does the limit.
    """
    begun = time.monotonic()
    for _ in range(3):
        subprocess.run([sys.executable, "-I", "-c", "import json"], check=True)
    return max(1.0, (time.monotonic() - begun) / 3 / QUIET_S)


def free_port() -> int:
    """A port of this host that nobody else takes before it is used."""
    while True:
        # Below those that the kernel gives to connections and to whoever asks for any port.
        port = 20_000 + next(_ports) % 12_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
