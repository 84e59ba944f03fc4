"""One builder at a time over a shared filesystem, without locks: used by setup_env.py.

The rules:
1. The directory PREFIX-N, made exclusively, *is* the claim: who made it builds in it, everybody else waits for it.
2. `.ready` in it publishes it, `.failed` in it says why there will be nothing. Nothing is renamed or replaced.
3. The builder counts up in `.owner`. A waiter ages that counter on its own clock; when it stands still (or the process is
   gone, where that can be seen) the waiter claims PREFIX-(N+1). A builder that was only asleep does no harm: it writes in
   its own directory, and two finished ones are as good as one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEAT_S = 2.0
# Longer than an NFS client may keep showing what it has cached (60 s at most by default).
DEAD_S = float(os.environ.get("FSBARRIER_SETUP_DEAD_S", "75"))
WAIT_S = float(os.environ.get("FSBARRIER_SETUP_TIMEOUT_S", "7200"))
POLL_S = 0.5


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


def process_start(pid: int) -> str | None:
    """When process `pid` of this machine started, in clock ticks: tells it from a later one with its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def machine() -> str:
    """Equal for processes that can see each other's pids: this boot, this pid namespace. Empty where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def attempts(prefix: Path) -> list[Path]:
    """The claims that exist, in order. The parent is listed: a name looked up too early may stay missing on NFS."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(prefix.parent):
            number = name.removeprefix(f"{prefix.name}-")
            if name != number and number.isdecimal():
                found.append((int(number), prefix.parent / name))
    return [path for _, path in sorted(found)]


def failure(folder: Path) -> str | None:
    """Why the attempt in `folder` ended without a result; None where it did not."""
    try:
        return (folder / ".failed").read_text().strip()
    except OSError:
        return None


def owner_of(folder: Path) -> dict[str, Any]:
    """Who builds in `folder` and the state of its counter; empty where that cannot be read (yet)."""
    try:
        owner = json.loads((folder / ".owner").read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


class Watch:
    """Ages one builder's counter on this process's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: tuple[Path, dict[str, Any]] | None = None
        self.since = clock()

    def look(self, folder: Path) -> tuple[bool, str]:
        """Whether the builder may still be alive, and who it is and what it does, for people."""
        owner = owner_of(folder)
        if self.seen != (folder, owner):
            self.seen, self.since = (folder, owner), self.clock()
        age = self.clock() - self.since
        here = bool(machine()) and owner.get("machine") == machine()
        gone = here and process_start(int(owner["pid"])) != owner["start"]
        who = f"pid {owner['pid']} on {owner['host']}" if owner else f"unknown maker of {folder}"
        return (
            not gone and age < DEAD_S,
            f"{who}, {owner.get('step', 'no word yet')}, last sign of life {age:.0f} s ago",
        )


def claim(prefix: Path, usable: Callable[[Path], bool], progress: Progress) -> tuple[Path, bool]:
    """Come to a finished attempt, (folder, False), or to the right to build a new one, (folder, True).

    Waits while another process builds. Raises SetupError where that one fails, or lives on beyond WAIT_S.
    """
    deadline, pause, waiting = time.monotonic() + WAIT_S, 0.01, False
    failed_before = {path for path in attempts(prefix) if failure(path) is not None}
    watch = Watch()
    while True:
        there = attempts(prefix)
        finished = next((path for path in there if (path / ".ready").is_file() and usable(path)), None)
        if finished:
            if waiting:
                progress.done("it is ready")
            return finished, False
        newest = there[-1] if there else None
        if newest is None or newest in failed_before or (newest / ".ready").is_file():
            folder = _next(prefix, newest)
        else:
            why = failure(newest)
            if why is not None:
                raise SetupError(f"the setup that this one waited for failed: {why}")
            alive, who = watch.look(newest)
            if alive:
                if not waiting:
                    progress.step("waiting for the setup that is under way")
                waiting = True
                progress.note(who)
                folder = None
            else:
                progress.say(f"the other setup stopped ({who}): starting afresh beside it")
                folder = _next(prefix, newest)
        if folder:
            return folder, True
        if time.monotonic() > deadline:
            raise SetupError(
                f"gave up after {WAIT_S:.0f} s of waiting for {newest}: end its maker, remove it, start again"
            )
        pause = min(pause * 1.5, POLL_S)
        time.sleep(pause)


def _next(prefix: Path, newest: Path | None) -> Path | None:
    """Make the next claim; None where somebody was faster."""
    number = int(newest.name.rpartition("-")[2]) + 1 if newest else 1
    folder = prefix.parent / f"{prefix.name}-{number}"
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        return None
    except OSError as error:
        raise SetupError(
            f"cannot make {folder}: {error.strerror}; FSBARRIER_VENV=DIR puts it elsewhere"
        ) from None
    return folder


class Owner:
    """The builder's sign of life: `.owner`, rewritten in place so that an NFS reader's open() finds the new content."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".owner"
        self.step = "starting"
        pid = os.getpid()
        self.record = {
            "host": socket.gethostname(),
            "pid": pid,
            "start": process_start(pid),
            "machine": machine(),
        }
        self.beat = 0
        self.ended = threading.Event()
        self.write()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def write(self) -> None:
        """Say where it is."""
        text = json.dumps({**self.record, "step": self.step, "beat": self.beat}).ljust(600) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def _run(self) -> None:
        while not self.ended.wait(BEAT_S):
            self.beat += 1
            # On a full disk the step that fills it fails, and says so.
            with contextlib.suppress(OSError):
                self.write()

    def end(self) -> None:
        """No more signs of life."""
        self.ended.set()
        self.thread.join()


@contextlib.contextmanager
def building(folder: Path, content: str) -> Iterator[Owner]:
    """Hold the claim while the body builds, then publish it: `.ready` with `content`. Failing leaves word of why."""
    owner = Owner(folder)
    try:
        yield owner
        _flush(folder)
        temporary = folder / ".ready.tmp"
        temporary.write_text(content)
        temporary.replace(folder / ".ready")
    except SetupError as error:
        owner.end()
        (folder / ".failed").write_text(f"on {socket.gethostname()}: {error}\n")
        _empty(folder, keep={".failed", "setup.log"})
        raise
    # The build was interrupted. Without the folder, whoever waits for it can go on at once.
    except BaseException:
        owner.end()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        owner.end()


def _flush(folder: Path) -> None:
    """Everything on this filesystem reaches the disk first: a marker that outlives its files would mislead for ever."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def _empty(folder: Path, keep: set[str]) -> None:
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name in keep:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def remove_others(prefix: Path, finished: Path, progress: Progress) -> None:
    """Remove what interrupted and failed attempts left; a finished one may be in use and stays."""
    for path in attempts(prefix):
        if path != finished and not (path / ".ready").is_file():
            progress.step(f"removing {path.name}, which an earlier setup left unfinished")
            shutil.rmtree(path, ignore_errors=True)
            progress.done()
