"""A program whose processes stay when their work is done, and do the next: the trainer, with its weights and process group in place.

    daemon                                             each of its processes
      starts the program with its first job              does it; leaves its result as ever
                                            <-- done     and connects to the socket that FSBARRIER_JOBS names
      the next job                          spec -->     does it, ...
      closes the socket, or ends                         ends

A job that fails ends the process that met it, and so the program: what is in the memory of those that go on has never failed. Whoever
does not want to stay ends with exit code 0 instead of saying that it is done.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsbarrier.supervision import private_socket
from fsbarrier.supervision.supervisor import Child

# Names the socket. A program that is not told of one ends with its first job.
JOBS = "FSBARRIER_JOBS"
DONE = b"done\n"


class KeptProgram:
    """The daemon's side. `name`: by which the nodes agree that theirs belong together. `processes`: how many do each job."""

    def __init__(self, name: str, processes: int, generation: int, path: Path) -> None:
        """`path`: of the socket, in a folder that nobody else may enter. Raises OSError."""
        self.name, self.processes, self.generation, self._path = name, processes, generation, path
        path.unlink(missing_ok=True)
        self._listener = private_socket.listen(path)
        self._connections: list[socket.socket] = []
        self._heard = b""
        self.child: Child

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], log_file: Path, name: str) -> None:
        """Start it with its first job. Raises what Child.start raises."""
        try:
            self.child = Child.start(argv, env={**env, JOBS: str(self._path)}, log_file=log_file, name=name)
        except BaseException:
            self._listener.close()
            raise

    def give(self, spec: Path) -> None:
        """Its next job, once all its processes are done with the last one. Where it ended meanwhile, `wait` says so."""
        self._heard = b""
        for connection in self._connections:
            try:
                connection.sendall(os.fsencode(spec) + b"\n")
            except OSError:
                return

    def wait(self, timeout_s: float) -> int | None:
        """0 once all processes are done with their job; its exit code where it has ended; None when `timeout_s` have passed."""
        deadline = time.monotonic() + timeout_s
        while (code := self.child.poll()) is None:
            if self._heard == DONE * self.processes:
                return 0
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self._listen(left_s)
        return code

    @property
    def log_file(self) -> Path:
        return self.child.log_file

    def last_log_lines(self) -> list[str]:
        return self.child.last_log_lines()

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def stop(self, grace_s: float) -> None:
        """Returns when nothing of it is left. Raises StillRunning."""
        for end in (self._listener, *self._connections):
            end.close()
        self.child.stop(grace_s)

    def _listen(self, timeout_s: float) -> None:
        poller = select.poll()
        for fd in (
            self._listener.fileno(),
            self.child.fileno(),
            *(one.fileno() for one in self._connections),
        ):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000 + 1)}
        if self._listener.fileno() in ready:
            self._connections.append(self._listener.accept()[0])
        for connection in list(self._connections):
            if connection.fileno() in ready:
                heard = _receive(connection)
                self._heard += heard
                if not heard:
                    connection.close()
                    self._connections.remove(connection)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(len(DONE))
    except OSError:
        return b""


class Jobs:
    """A process's side: the jobs that come after its first one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._connection = private_socket.connect(path)
        self._lines = self._connection.makefile("rb")

    def next(self) -> Path | None:
        """Say that the last job is done, and wait for another; None: there is none any more."""
        try:
            self._connection.sendall(DONE)
            line = self._lines.readline()
        except OSError:
            return None
        return Path(os.fsdecode(line[:-1])) if line.endswith(b"\n") else None
