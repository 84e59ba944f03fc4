"""A daemon's answer to `fsbarrier debug`, and to a program that hangs: stacks, memory, open files, accelerators.

Nothing here runs in the node's loop. Each part has its own thread and time limit, so a hanging driver or mount costs only that part. No
part contains environment variables.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fsbarrier
from fsbarrier import files
from fsbarrier.host import accelerators
from fsbarrier.host.identity import host_name
from fsbarrier.host.memory import SHARED_MEMORY, free_bytes, host_memory
from fsbarrier.printable import printable
from fsbarrier.protocol.wording import gib
from fsbarrier.reading import GIB
from fsbarrier.rundir import debug_requests
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.hidden import shown_word
from fsbarrier.supervision import processes
from fsbarrier.supervision.stacks import stacks_of

# The time limit of each part.
PART_S = 20.0
# How much of a command line is read, and how many open files of one process are listed.
ARGV_BYTES, MOST_FILES = 16 * 1024, 200


class DebugReports:
    """Answers the debug requests of one run for one node. `state`: the node's state, for people."""

    def __init__(
        self, paths: RunPaths, rank: int, watch_s: float, known: set[str], state: Callable[[], str]
    ) -> None:
        """`known`: the requests that are older than this node, and concern others."""
        self._paths, self._rank, self._watch_s, self._state = paths, rank, watch_s, state
        self._answered, self._stalled = set(known), False
        self._thread: threading.Thread | None = None

    def look(self, requests: set[str]) -> None:
        """Called from the node's loop with all requests that it has seen: start answering the new ones."""
        new = requests - self._answered
        if new and not (self._thread is not None and self._thread.is_alive()):
            self._answered |= new
            self._thread = threading.Thread(target=self._answer, args=(new,), name="debug", daemon=True)
            self._thread.start()

    def program_hangs(self, generation: int, cancel: threading.Event) -> str:
        """Called from a job's thread before it ends a hanging program. The first time, all nodes write reports into one archive.

        Returns a note for the error message; returns early if the job is cancelled.
        """
        if self._stalled:
            return ""
        self._stalled, key = True, f"stall_{generation:06d}"
        collecting = threading.Thread(target=self._collect, args=(key,), name="debug-archive", daemon=True)
        collecting.start()
        deadline = time.monotonic() + debug_requests.ANSWER_S + PART_S
        while collecting.is_alive() and not cancel.is_set() and time.monotonic() < deadline:
            collecting.join(0.1)
        archive = self._paths.debug_archive(key)
        found = archive.exists()
        return (
            f"; what each node did then is in {archive}"
            if found
            else "; what the nodes did then could not be kept"
        )

    def _collect(self, key: str) -> None:
        # The program is ended even if its stacks could not be written.
        with contextlib.suppress(OSError):
            if debug_requests.request_as(self._paths, key):
                debug_requests.collect(self._paths, key, self._watch_s, self._paths.debug_archive(key))
            else:
                # Another node was first, and makes the archive.
                debug_requests.wait_for_answers(self._paths, key, [self._rank])

    def _answer(self, keys: set[str]) -> None:
        text = self._text().encode(errors="replace")
        # Without an answer the operator knows that this node cannot write.
        with contextlib.suppress(OSError):
            files.make_dirs_below(self._paths.root, self._paths.debug)
            for key in sorted(keys):
                files.write_atomic(self._paths.debug_answer(key, self._rank), text)

    def _text(self) -> str:
        tree = {os.getpid(): processes.Stat(os.getpid()).start, **processes.below(os.getpid())}
        parts: Mapping[str, Callable[[], Iterator[str]]] = {
            "node": lambda: iter([f"fsbarrier {fsbarrier.__version__} on {host_name()}", self._state()]),
            "processes": lambda: _processes(tree),
            "stacks": lambda: (f"--- {pid}\n{text}" for pid, text in stacks_of(tree).items()),
            "memory": lambda: _memory(self._paths.root),
            "open files": lambda: _open_files(tree, self._paths.root),
            "accelerators": lambda: iter(accelerators.in_use()),
        }
        return "".join(f"=== {name}\n{text}\n" for name, text in _within(PART_S, parts).items())


def _within(seconds: float, parts: Mapping[str, Callable[[], Iterator[str]]]) -> dict[str, str]:
    """The lines of each part, collected concurrently; a part that exceeds the limit gives the lines that it has by then."""
    found: dict[str, list[str]] = {name: [] for name in parts}

    def collect(name: str) -> None:
        try:
            found[name].extend(line for line in parts[name]())
        except Exception as error:
            found[name].append(f"({type(error).__name__}: {error})")

    threads = {name: threading.Thread(target=collect, args=(name,), daemon=True) for name in parts}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            found[name] = [*found[name], f"(not done within {seconds:g} s)"]
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in found.items()}


def _processes(tree: Mapping[int, int]) -> Iterator[str]:
    for pid in sorted(tree):
        with contextlib.suppress(OSError):
            stat, folder = processes.Stat(pid), Path("/proc", str(pid))
            with (folder / "cmdline").open("rb") as stream:
                words = stream.read(ARGV_BYTES).decode(errors="replace").rstrip("\0").split("\0")
            # A typed setting may be a secret.
            argv = printable(" ".join(map(shown_word, words)))
            yield f"{pid}: parent {stat.ppid}, state {stat.state}: {argv}"


def _memory(log_path: Path) -> Iterator[str]:
    total, free = host_memory()
    yield f"memory: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    for folder in (SHARED_MEMORY, Path("/tmp"), log_path):
        yield f"{folder}: {gib(free_bytes(folder))} may be written"


def _open_files(tree: Mapping[int, int], log_path: Path) -> Iterator[str]:
    """The number of open files of each process, and those in the run directory."""
    root = os.path.realpath(log_path)
    for pid in sorted(tree):
        with contextlib.suppress(OSError):
            targets, folder = list[str](), f"/proc/{pid}/fd"
            names = os.listdir(folder)
            for name in names:
                with contextlib.suppress(OSError):
                    targets.append(os.readlink(f"{folder}/{name}"))
            inside = Counter(target for target in targets if target.startswith(f"{root}/"))
            yield f"{pid}: {len(names)} open"
            for target, times in sorted(inside.items())[:MOST_FILES]:
                yield f"  {printable(target)}" + (f" ({times} times)" if times > 1 else "")
