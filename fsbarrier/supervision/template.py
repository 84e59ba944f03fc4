"""A process that has imported the modules that programs need, and forks a program per start: `python -m fsbarrier.supervision.template`.

    daemon -> guards -> template -> outer guard -> inner guard -> program

A forked program behaves like any other: it has its own guards, session, log, environment and process, and no state of earlier programs. It
only saves the start of Python and the imports, which take longer than most of our programs run.

* The template only imports. If an import starts a thread, the template exits without forking, and programs are started with exec: a lock
  held by that thread during the fork would stay locked in the new process.
* The template ends with the daemon, like every guarded program, and its programs end with it. If it is killed, the daemon restarts it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fsbarrier import stack_signal
from fsbarrier.errors import FsbarrierError
from fsbarrier.supervision import private_socket
from fsbarrier.supervision.guard import BecomeProgram, guard_program
from fsbarrier.supervision.supervisor import START_S, Child, own_program, with_this_package

# Give up after this many templates in a row have ended without forking a program.
STARTS = 3

# --- the daemon's side ---


class ForkedGuard:
    """An outer guard forked by a template, with the methods of `subprocess.Popen` that Child uses."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd

    def send_signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended. Raises subprocess.TimeoutExpired."""
        if self._pidfd < 0:
            return
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("guard", timeout or 0.0)
        os.close(self._pidfd)
        self._pidfd = -1


class Template:
    """The template of one daemon. Thread-safe."""

    def __init__(self, modules: Sequence[str], *, work_dir: Path, log_file: Path) -> None:
        """`modules`: the modules it can fork, as in `python -m MODULE`. If empty, no template is started."""
        self._modules, self._path, self._log_file = tuple(modules), work_dir / "template", log_file
        self._environ = with_this_package(os.environ)
        self._lock = threading.Lock()
        self._starts = 0
        self._child: Child | None = None
        self._listener: socket.socket | None = None
        # None until the template has finished its imports.
        self._connection: socket.socket | None = None

    def load(self) -> None:
        """Start the template ahead of time, if it is not running. A failure only appears in its log; programs then start more slowly."""
        with self._lock:
            self._load()

    def fork_guard(
        self, argv: Sequence[str], env: Mapping[str, str], lifeline: socket.socket, log_fd: int
    ) -> ForkedGuard | None:
        """The outer guard of a program that will be sent over `lifeline`; None if the template cannot fork it."""
        known = [*argv[:3]] == own_program() and argv[3] in self._modules
        # Libraries read some variables during import, so the environment must match the template's.
        if not known or env != self._environ:
            return None
        with self._lock:
            self._load()
            try:
                return self._ask(lifeline, log_fd)
            except (OSError, ValueError):
                # The template has ended or hangs. A guard that it may have forked ends with it.
                self._stop()
                return None

    def stop(self) -> None:
        """Stop the template and everything it has forked; returns when its process tree is gone."""
        with self._lock:
            self._starts = STARTS
            self._stop()

    def _load(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._stop()
        if self._child is not None or self._starts >= STARTS or not self._modules:
            return
        self._starts += 1
        command = own_program(__name__, str(self._path), *self._modules)
        try:
            self._path.unlink(missing_ok=True)
            self._listener = private_socket.listen(self._path)
            self._child = Child.start(command, env=self._environ, log_file=self._log_file, name="template")
        except (OSError, FsbarrierError):
            self._stop()

    def _ask(self, lifeline: socket.socket, log_fd: int) -> ForkedGuard | None:
        """Raises OSError, ValueError."""
        if self._connection is None and self._listener is not None:
            # The template imports for some seconds. A program that is needed sooner is started without it.
            with contextlib.suppress(BlockingIOError):
                self._connection, _ = self._listener.accept()
        if self._connection is None:
            return None
        self._connection.settimeout(START_S)
        socket.send_fds(self._connection, [b"fork"], [lifeline.fileno(), log_fd])
        answer, fds, _, _ = socket.recv_fds(self._connection, 64, 1)
        guard = ForkedGuard(int(answer), fds[0]) if fds else None
        self._starts = 0
        return guard

    def _stop(self) -> None:
        for end in (self._connection, self._listener):
            if end is not None:
                end.close()
        child, self._child, self._connection, self._listener = self._child, None, None, None
        if child is not None:
            with contextlib.suppress(FsbarrierError):
                child.stop(0.0)


# --- the template's side ---


def main(path: Path, modules: Sequence[str]) -> None:
    """Import the modules, then fork on request until the daemon ends. Raises BecomeProgram in each new program."""
    for module in modules:
        importlib.import_module(module)
    for module in modules:
        # The program runs this module again as its main module.
        del sys.modules[module]
    end_pools()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{threads} threads after the imports: cannot fork, programs are started with exec")
    # Freeze the imported objects: otherwise the garbage collector would write to them in each new process and copy shared memory.
    gc.collect()
    gc.freeze()
    with private_socket.connect(path) as connection:
        serve(connection)


def end_pools() -> None:
    """The number of threads, without those of numpy's OpenBLAS, which stops them before each fork and restarts them on demand."""
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        os._exit(0)


def serve(connection: socket.socket) -> None:
    """Fork a guard for each request, until the daemon ends."""
    me, guards, poller = os.getpid(), dict[int, int](), select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if pid := guards.pop(fd, 0):
                poller.unregister(fd)
                os.close(fd)
                os.waitpid(pid, 0)
                continue
            try:
                request, fds, _, _ = socket.recv_fds(connection, 64, 2)
            except ConnectionResetError:
                # The daemon closed its end before it read our last answer.
                return
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                connection.close()
                be_guard(me, *fds)
            for given in fds:
                os.close(given)
            # The child's pid cannot be reused until we reap it, so the pidfd is valid even if the child has ended.
            pidfd = os.pidfd_open(pid)
            socket.send_fds(connection, [b"%d" % pid], [pidfd])
            guards[pidfd] = pid
            poller.register(pidfd, select.POLLIN)


def be_guard(template: int, lifeline: int, log: int) -> NoReturn:
    """In a new process: run the guards; in the program process below them, raise BecomeProgram."""
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
        code = guard_program(lifeline, template, by_fork=True)
    except BecomeProgram:
        raise
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def run(argv: Sequence[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    """Do what `python -P -m MODULE ...` does after startup: this process is now the program."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            # The listing contains its own descriptor, which is already closed.
            with contextlib.suppress(OSError):
                os.close(int(name))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    # The guard has restored all signal handlers, and the template's memfd is closed.
    stack_signal.register()
    os.environb.clear()
    os.environb.update(env)
    if numpy := sys.modules.get("numpy"):
        # Otherwise all programs would draw the same numbers. Python reseeds its own generator at each fork.
        numpy.random.seed()
    _, _, _, module, *words = map(os.fsdecode, argv)
    sys.argv = ["-m", *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    end(code)


def exit_code(ended: SystemExit) -> int:
    """Interpret an exit value as Python does: anything but a number is an error message."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def end(code: int) -> NoReturn:
    """Do what Python does at exit, except freeing memory, which would copy the shared pages."""
    # Join threads and close pools, as multiprocessing does in a forked process.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
        program = None
    except BecomeProgram as forked:
        program = (forked.argv, forked.env)
    if program is not None:
        run(*program)
