"""A program whose processes stay alive between jobs: the trainer, with its weights and process group, and a node's helper process.

    daemon                                             each of its processes
      starts the program with its first job              does the job and writes its result as usual
                                            <-- done     connects to the socket in FSBARRIER_JOBS
      the next job                          spec -->     does the job, ...
      closes the socket, or ends                         ends

A failed job ends its process, and thereby the program, so a process never continues with state from a failed job. A process that does not
want to stay exits with code 0 instead of reporting done.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsbarrier.network.listening import on_path
from fsbarrier.processes.supervisor import Child
from fsbarrier.rundir.logs import SHOWN_LINES

# Environment variable with the socket's path. Without it a program ends after its first job.
JOBS = "FSBARRIER_JOBS"
DONE = b"done\n"


class KeptProgram:
    """The daemon's side. `name`: identifies the program across nodes. `processes`: number of processes per job."""

    def __init__(self, name: str, processes: int, path: Path) -> None:
        """`path`: path of the socket, in a private folder. Raises OSError."""
        self.name, self.processes, self._path = name, processes, path
        path.unlink(missing_ok=True)
        with _short(path) as short:
            self._listener = on_path(Path(short))
        self._listener.setblocking(False)
        self._connections: list[socket.socket] = []
        self._heard = b""
        self.child: Child

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: Path,
        name: str,
        pass_fds: Sequence[int] = (),
        private_network: bool = False,
    ) -> None:
        """Start the program with its first job. Raises the errors of Child.start."""
        env = {**env, JOBS: str(self._path)}
        try:
            self.child = Child.start(
                argv,
                env=env,
                log_file=log_file,
                name=name,
                pass_fds=pass_fds,
                private_network=private_network,
            )
        except BaseException:
            self._listener.close()
            raise

    def give(self, spec: Path) -> None:
        """Send the next job. All processes must have finished the last one. If the program has ended, `wait` reports that."""
        self._heard = b""
        for connection in self._connections:
            try:
                connection.sendall(os.fsencode(spec) + b"\n")
            except OSError:
                return

    def wait(self, timeout_s: float) -> int | None:
        """0 once all processes have finished their job; the exit code if the program has ended; None after `timeout_s`."""
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

    def tree(self) -> dict[int, int]:
        return self.child.tree()

    def last_log_lines(self, lines: int = SHOWN_LINES) -> list[str]:
        return self.child.last_log_lines(lines)

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def stop(self, grace_s: float) -> None:
        """Stop the program; returns when its process tree is gone. Raises ProgramFailed."""
        for end in (self._listener, *self._connections):
            end.close()
        self.child.stop(grace_s)

    def _listen(self, timeout_s: float) -> None:
        poller = select.poll()
        for fd in (
            self._listener.fileno(),
            self.child.fileno(),
            *(connection.fileno() for connection in self._connections),
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
    """The side of a worker process: receives the jobs after its first one."""

    def __init__(self, path: Path) -> None:
        """Connect to the daemon's socket at `path`. Raises OSError."""
        self._connection = socket.socket(socket.AF_UNIX)
        with _short(path) as short:
            self._connection.connect(short)
        self._lines = self._connection.makefile("rb")

    def next(self) -> Path | None:
        """Report the last job as done and wait for the next; None if there are no more jobs."""
        try:
            self._connection.sendall(DONE)
            line = self._lines.readline()
        except OSError:
            return None
        return Path(os.fsdecode(line[:-1])) if line.endswith(b"\n") else None


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short alias for `path`, because a socket path is limited to 107 bytes and the temporary folder may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
