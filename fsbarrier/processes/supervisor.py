"""Starts programs for the daemon, each under a guard, so that none outlives the daemon or a call of `stop()`.

    child = Child.start(["torchrun", ...], log_file=Path("update.log"), name="update")
    code = child.wait(60.0)      # None while any of its processes lives; -15: killed by SIGTERM
    child.stop(grace_s=5.0)      # returns when its process tree is gone

guard.py describes how the process tree is controlled, and the socket protocol between a `Child` and its guard. A `Child`
that is dropped without `stop()` is killed too, because the guard sees EOF on the socket. Only descendants of this process
are ever signalled, each identified by (pid, start time).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import fsbarrier
from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes import guard, orphans, processes, signals
from fsbarrier.rundir import logs
from fsbarrier.store import files
from fsbarrier.store.retry import HIDDEN_S, fails_or_hides, patiently
from fsbarrier.wording import without_passwords

GUARD = Path(guard.__file__)
# How long a start may take. It takes 20 ms, but the machine may swap, or Python lie on a slow mount.
START_S = 60.0
# How long SIGKILL may take. It takes milliseconds, unless a process hangs in the kernel (NFS, a driver).
KILL_S = 30.0


class StartFailed(ProgramFailed):
    """The program could not be started; `returncode` is 127 (not found) or 126, as a shell has it."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


class Child:
    """A running program with its process tree; its methods are thread-safe.

    `pid` belongs to the main program, which leads its own session and process group. `guard_pid` belongs to the guard, a
    child of this process.
    """

    def __init__(self, name: str, log_file: Path, log_start: int) -> None:
        """Only `start` calls this."""
        self.name = name
        self.log_file = log_file
        self.pid = 0
        self.guard_pid = 0
        # Where in the log this start's output begins.
        self._log_start = log_start
        self._lock = threading.RLock()
        # The guard, our end of the socket to it, and the received part of an incomplete line.
        self._guard: subprocess.Popen[bytes]
        self._socket: socket.socket
        self._received = b""
        # The guard's report: the exit code, or errno and stage of a failed start.
        self._reported_code: int | None = None
        self._start_failure: tuple[int, str] | None = None
        # The exit code once the whole process tree is gone.
        self._exit_code: int | None = None

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        log_file: Path,
        name: str,
        pass_fds: Sequence[int] = (),
        private_network: bool = False,
    ) -> Self:
        """Start `argv` with `env` (None: ours) and its guard's name in `cwd` (None: ours), appending its output to `log_file`.

        `private_network`: it has a loopback of its own that nobody else reaches, and no other network, where this host allows that.
        The program inherits the descriptors `pass_fds` under their numbers, which must be above 2.

        Raises StartFailed (no such program or folder), StoreError (the log cannot be written), ValueError (a NUL
        byte or no argv).
        """
        if not argv or not argv[0]:
            raise ValueError(f"empty command: {list(argv)!r}")
        log_fd, log_start = _open_log(log_file, name, argv)
        child = cls(name, log_file, log_start)
        # Both are close-on-exec: if another program had a copy of our end, the guard would not notice our death.
        child._socket, theirs = socket.socketpair()
        try:
            child._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(GUARD),
                    *map(str, (theirs.fileno(), os.getpid(), os.path.abspath(cwd or "."))),
                    ",".join(map(str, pass_fds)),
                    guard.PRIVATE if private_network else "-",
                    *argv,
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                cwd="/",
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,
            )
        except ValueError:
            child._socket.close()
            raise
        except OSError as error:
            child._socket.close()
            message = f"{name}: cannot start a guard with {sys.executable!r}: {error.strerror}"
            raise StartFailed(message, 126) from None
        finally:
            os.close(log_fd)
            theirs.close()
        child.guard_pid = child._guard.pid
        child._await_start(argv[0])
        return child

    def poll(self) -> int | None:
        """The main program's exit code (-N: killed by signal N) once its *whole* process tree is gone, else None."""
        with self._lock:
            if self._exit_code is None:
                self._read_reports()
            return self._exit_code

    def wait(self, timeout_s: float) -> int | None:
        """`poll()`, waiting up to `timeout_s` for a code."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            _wait_readable(self._socket, left_s)
        return code

    def stop(self, grace_s: float = 5.0, number: int = signal.SIGTERM) -> int:
        """Send a signal to the program's group, and SIGKILL to the remaining processes after `grace_s`; returns the exit code.

        Returns when the process tree is gone; raises ProgramFailed if that takes KILL_S longer than the grace period: something hangs
        in the kernel, or is another user's.
        """
        with self._lock:
            if self.poll() is None:
                # An error means that the guard is already exiting.
                with contextlib.suppress(OSError):
                    self._socket.sendall(b"stop %f %d\n" % (max(grace_s, 0.0), number))
                # Someone may have sent SIGSTOP to the guard.
                self._guard.send_signal(signal.SIGCONT)
        code = self.wait(grace_s + KILL_S)
        if code is None:
            raise ProgramFailed(
                f"{self.name}: processes {sorted(self.pids())} survived SIGKILL; they probably hang in the kernel (a mount or a driver)"
            )
        return code

    def pids(self) -> frozenset[int]:
        """The current processes: the main program and its descendants."""
        return frozenset(self.tree())

    def tree(self) -> dict[int, int]:
        """The current processes as pid -> start time."""
        if self._exit_code is not None:
            return {}
        processes_now = processes.scan()
        tree = processes.below(self.guard_pid, processes_now)
        return {pid: start for pid, start in tree.items() if not processes_now[pid].ended}

    def fileno(self) -> int:
        """For `selectors`: readable when `poll()` may have a new result. -1 after the end."""
        return self._socket.fileno()

    def last_log_lines(self, lines: int = logs.SHOWN_LINES) -> list[str]:
        """The last lines of its log since this start, from at most the last 64 KiB, made printable."""
        return logs.last_lines(self.log_file, lines, self._log_start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_start(self, argv0: str) -> None:
        """Wait until the program runs. Raises StartFailed."""
        deadline = time.monotonic() + START_S
        self._socket.setblocking(False)
        while not self.pid and self._start_failure is None and self._exit_code is None:
            if time.monotonic() >= deadline:
                # If the guard has started the program already, the kernel ends it with the guard.
                self._socket.close()
                self._guard.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._guard.wait(KILL_S)
                raise StartFailed(f"{self.name}: the guard did not answer for {START_S:.0f} s", 126)
            _wait_readable(self._socket, deadline - time.monotonic())
            self._read_reports()
        if self.pid:
            return
        if self._start_failure is None:
            raise StartFailed(
                f"{self.name}: the guard ended at once: {' | '.join(self.last_log_lines(3))}", 126
            )
        self.wait(KILL_S)
        number, stage = self._start_failure
        missing = number == errno.ENOENT and stage == "program"
        what = "enter the folder to start" if stage == "folder" else "start"
        message = f"{self.name}: cannot {what} {argv0!r}: {os.strerror(number)}"
        raise StartFailed(message, 127 if missing else 126)

    def _read_reports(self) -> None:
        """Read the guard's new reports."""
        while True:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                match line.decode().split():
                    case ["started", pid]:
                        self.pid = int(pid)
                    case ["failed", number, stage]:
                        self._start_failure, self._reported_code = (int(number), stage), 127
                    case ["ended", code] if self._reported_code is None:
                        self._reported_code = int(code)
            if not data:
                self._settle()
                return

    def _settle(self) -> None:
        """Called when the guard has ended. The process tree is gone too, unless the guard was killed."""
        # The guard has closed its end of the socket, so it is about to exit.
        self._guard.wait()
        if self._reported_code is None:
            # The guard was killed, and the kernel has killed the main program with it.
            orphans.end_orphans()
        self._exit_code = -int(signal.SIGKILL) if self._reported_code is None else self._reported_code
        self._socket.close()


def own_program(*words: str) -> list[str]:
    """The command line that runs a module of this package with these arguments. -P: a user's file in the current directory, for example
    random.py, must not shadow a library."""
    return [sys.executable, "-P", "-m", *words]


def with_this_package(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a Python program that must import this fsbarrier, with unbuffered output and stack dumps on request."""
    package = Path(fsbarrier.__file__).resolve().parents[1]
    search_path = (str(package), *environ.get("PYTHONPATH", "").split(os.pathsep))
    joined = os.pathsep.join(dict.fromkeys(folder for folder in search_path if folder))
    return {**environ, "PYTHONPATH": joined, "PYTHONUNBUFFERED": "1", signals.ASKED: "1"}


def _open_log(path: Path, name: str, argv: Sequence[str]) -> tuple[int, int]:
    """Open the log for appending and write a header line with the command (without the environment, which may contain keys).

    Returns the descriptor and the offset after that line. Raises StoreError.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = f"--- {now} start {name}: {without_passwords(shlex.join(argv))}\n"
    if ended := orphans.end_earlier_orphans():
        line = f"--- {now} ended what a killed daemon had left: {', '.join(map(str, ended))}\n{line}"
    try:
        files.make_dirs(path.parent)
        fd = patiently(lambda: files.open_append(path), HIDDEN_S, passes=fails_or_hides)
        try:
            os.write(fd, line.encode(errors="surrogateescape"))
            return fd, os.lseek(fd, 0, os.SEEK_CUR)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise StoreError(f"{name}: cannot write its log {path}: {error.strerror}") from None


def _wait_readable(connection: socket.socket, timeout_s: float) -> None:
    poller = select.poll()
    if connection.fileno() >= 0:
        poller.register(connection, select.POLLIN)
        poller.poll(max(timeout_s, 0.0) * 1000 + 1)
