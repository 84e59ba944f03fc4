"""Runs each job in a process of its own, forked from one that has loaded the user's code once, and ends it with all that it started.

    our program --control--> fork server --fork--> a job's process --> what it starts
         `------------------ the job's socket --------'

* The fork server has one thread and no event loop, so that a fork copies nothing that only another thread could finish.
* A job ends when its process does, or when our program closes the job's socket; it is then killed, however it hangs.
* The fork server and each job are subreapers (guard.py): what a job started is found below it, or, once the job has crashed, below the
  server but below no living job. A job that ends by itself kills it on its own.
* If our program dies, the server sees EOF and kills everything; if the server is killed, the kernel kills the jobs (PR_SET_PDEATHSIG), and
  our program's guard what they had started.

Over the control socket goes "start N" with a descriptor. Back come "ready" or "refused WHY", then "started N" or "failed N ERRNO", and
"ended N EXITCODE".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import msgspec

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.processes import last_words
from fsbarrier.processes.guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from fsbarrier.processes.processes import below, freeze_and_kill, scan

# Longest message between our program and a job, and longest report of the server.
MAX_MESSAGE, MAX_REPORT = 64 << 20, 16 << 10
# The libraries whose random numbers would be the same in every job; Python's own are not.
SEEDED = {"numpy": "random.seed", "torch": "seed"}


class Messages:
    """One end of a job's socket: values of JSON's types, in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Self:
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, value: object) -> None:
        """Does nothing if the other end has gone. Raises ValueError for a message that is too long."""
        data = msgspec.json.encode(value)
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of more than {MAX_MESSAGE >> 20} MiB")
        with contextlib.suppress(ConnectionError):
            self._writer.write(len(data).to_bytes(8) + data)
            await self._writer.drain()

    async def receive(self) -> Any:
        """The next message; None once the other end has gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(8))
            return msgspec.json.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """What has not been sent yet is lost."""
        self._writer.transport.abort()


class Job(Messages):
    """A process that does one job."""

    #: its exit code, once nothing of it is left
    ended: asyncio.Future[int]

    async def how_it_ended(self, within_s: float) -> str:
        """How its process ended, in words; "" if it has not within this time."""
        with contextlib.suppress(TimeoutError):
            return last_words.how_it_ended(await asyncio.wait_for(asyncio.shield(self.ended), within_s))
        return ""


class ForkServer:
    """Our program's side."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a server, which need not be ready yet. `argv`: a command that calls `serve`; its last argument, added here, is the number
        of its descriptor. Raises OSError."""
        # Each job takes a descriptor, here and in the server; most systems allow 1024, until somebody asks for more.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A signal to our program's group is our program's: it may want to end its jobs in order.
                start_new_session=True,
            )
        # How the server has ended.
        self._dead = ""
        self._numbers = itertools.count()
        self._started: dict[int, asyncio.Future[None]] = {}
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Wait until it has loaded the user's code. Raises UsageError if that cannot be used, ProgramFailed if the server has died."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, self._hear)
        await self._ready
        return self

    async def __aexit__(self, *_: object) -> None:
        """Returns when no process is left."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        await asyncio.to_thread(self._process.wait)

    @contextlib.asynccontextmanager
    async def job(self) -> AsyncIterator[Job]:
        """A process for one job; nothing of it is left after this block. Raises ProgramFailed if it cannot be started."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        ours, theirs = socket.socketpair()
        job = await Job.over(ours)
        job.ended, started = loop.create_future(), loop.create_future()
        try:
            with theirs:
                async with self._one_at_a_time:
                    if self._dead:
                        raise ProgramFailed(self._dead)
                    self._started[number], self._ended[number] = started, job.ended
                    # If the server has died, that is heard.
                    with contextlib.suppress(OSError):
                        socket.send_fds(self._control, [b"start %d" % number], [theirs.fileno()])
                    await started
            yield job
        finally:
            job.close()
            if number in self._ended:
                await asyncio.wait((job.ended,))

    def _hear(self) -> None:
        """Read the server's reports."""
        while True:
            try:
                said = self._control.recv(MAX_REPORT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            match said.split():
                case [b"ready"]:
                    self._ready.set_result(None)
                case [b"refused", *_]:
                    self._ready.set_exception(UsageError(said.decode().partition(" ")[2]))
                case [b"started", number]:
                    _settle(self._started.pop(int(number), None), None)
                case [b"ended", number, code]:
                    _settle(self._ended.pop(int(number), None), int(code))
                case [b"failed", number, code]:
                    self._fail(int(number), f"cannot start a process for a job: {os.strerror(int(code))}")
                case _:
                    # The server's end: all its jobs have ended with it.
                    asyncio.get_running_loop().remove_reader(self._control)
                    how = last_words.how_it_ended(self._process.wait())
                    self._dead = f"the process that starts all jobs {how}"
                    if not self._ready.done():
                        self._ready.set_exception(ProgramFailed(self._dead))
                    for one in list(self._ended):
                        self._fail(one, self._dead)
                    return

    def _fail(self, number: int, why: str) -> None:
        """Settle both futures of a job that did not start, or that has lost its server."""
        started, ended = self._started.pop(number, None), self._ended.pop(number)
        if started is not None and not started.done():
            started.set_exception(ProgramFailed(why))
        _settle(ended, -signal.SIGKILL)


def _settle(future: asyncio.Future[Any] | None, value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


# --- the fork server ----------------------------------------------------------------------------------------------------------


Work = Callable[[socket.socket], None]


def serve(control: socket.socket, load: Callable[[], Work]) -> None:
    """Fork a process for each job; returns when our program has closed its end of `control`, and nothing is left of the jobs.

    `load` loads the user's code, and returns what does a job, given the job's socket. This process must have one thread.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        work = load()
    except UsageError as error:
        # Our program may have ended while the code was loaded.
        with contextlib.suppress(OSError):
            control.send(f"refused {error}".encode()[:MAX_REPORT])
        return
    server = _Server(control, work)
    server.report(b"ready")
    # What is there already is never garbage: a collection in a job would only copy the pages on which it lies.
    gc.collect()
    gc.freeze()
    while server.turn():
        pass
    end_below()


class _Server:
    def __init__(self, control: socket.socket, work: Work) -> None:
        self.control, self.work = control, work
        # The living jobs: process -> number, and descriptor of the job's socket -> process.
        self.numbers: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.strays_possible = False
        self.wake, writer = os.pipe()
        for fd in (self.wake, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poller = select.poll()
        for fd in (self.wake, control.fileno()):
            self.poller.register(fd, select.POLLIN)

    def turn(self) -> bool:
        """Do what is due now, after waiting for something; False once our program has gone."""
        ready = {fd for fd, _ in self.poller.poll()}
        if self.wake in ready:
            os.read(self.wake, 4096)
        if hung_up := ready & self.pids.keys():
            self._kill([self._forget(fd) for fd in hung_up])
        if self.control.fileno() in ready and not self._start():
            return False
        self._reap()
        return True

    def _start(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 64, 1)
        except OSError:
            data = b""
        if not data:
            return False
        number, me = int(data.split()[1]), os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fds[0])
            self.report(b"failed %d %d" % (number, error.errno or 0))
            return True
        if pid == 0:
            code = 1
            try:
                self._do(fds[0], me)
                code = 0
            except BaseException as error:
                # As for any program, and nothing of what this process has copied is cleaned up.
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(code)
        self.numbers[pid], self.pids[fds[0]] = number, pid
        # Only that the other end has closed.
        self.poller.register(fds[0], 0)
        self.report(b"started %d" % number)
        return True

    def _do(self, fd: int, parent: int) -> None:
        """One job, in its own process."""
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self.control.fileno(), self.wake, *self.pids):
            os.close(held)
        for name, path in SEEDED.items():
            found: Any = sys.modules.get(name)
            for part in path.split(".") if found is not None else ():
                found = getattr(found, part)
            if found is not None:
                found()
        os.set_inheritable(fd, False)
        try:
            self.work(socket.socket(fileno=fd))
        finally:
            end_below()
            sys.stdout.flush()
            sys.stderr.flush()

    def _kill(self, jobs: Sequence[int]) -> None:
        """Kill these jobs with all that they have started."""

        def trees() -> dict[int, int]:
            found = scan()
            return {
                pid: start
                for job in jobs
                if job in found and job in self.numbers
                for pid, start in {job: found[job].start, **below(job, found)}.items()
            }

        freeze_and_kill(trees)

    def _strays(self) -> dict[int, int]:
        """What dead jobs have left."""
        found = scan()
        left = below(os.getpid(), found)
        for job in self.numbers:
            for pid in (job, *below(job, found)):
                left.pop(pid, None)
        return {pid: start for pid, start in left.items() if not found[pid].ended}

    def _reap(self) -> None:
        ended: list[tuple[int, int]] = []
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self.numbers:
                    code = os.waitstatus_to_exitcode(found[1])
                    ended.append((self.numbers.pop(found[0]), code))
                    # One that ends by itself has ended what it had started.
                    self.strays_possible |= code != 0
                    for fd in [fd for fd, pid in self.pids.items() if pid == found[0]]:
                        self._forget(fd)
        if self.strays_possible:
            # Again at the end of these: they may have forked in the meantime.
            self.strays_possible = bool(freeze_and_kill(self._strays))
        for number, code in ended:
            self.report(b"ended %d %d" % (number, code))

    def report(self, line: bytes) -> None:
        # Our program may have died, which the next turn notices.
        with contextlib.suppress(OSError):
            self.control.send(line)

    def _forget(self, fd: int) -> int:
        self.poller.unregister(fd)
        os.close(fd)
        return self.pids.pop(fd)


def end_below() -> None:
    """Kill everything that this process has started; returns when it has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            freeze_and_kill(lambda: below(os.getpid()))
            os.waitpid(-1, 0)
