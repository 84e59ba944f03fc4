"""Runs each job in a process of its own, forked from one that has loaded the user's code once, and ends it with all that it started.

    our program --control--> fork server --fork--> the job's guard --fork--> the job's process --> what it starts
         |`------------------ lifeline --------------'                            |
         `-------------------- messages -----------------------------------------'

* The fork server has one thread and no event loop, so a fork never copies a lock that another thread holds.
* Each job is below a guard (guard.py), as every program is: it kills all that the job has started when the job ends, when our program
  closes the lifeline, and when our program or the fork server dies.

Our program sends the descriptors of each job's lifeline and messages over the control socket. The server replies once, "ready ABOUT" or
"refused WHY". A guard reports "started" or "failed ERRNO" over its lifeline, and then "ended EXITCODE".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import msgspec

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.processes import failure_reason
from fsbarrier.processes.guard import ENDING, PR_SET_CHILD_SUBREAPER, Guard, become_main, prctl
from fsbarrier.processes.signals import SIGNAL

# Longest message between our program and a job, and longest report of the server.
MAX_MESSAGE, MAX_REPORT = 64 << 20, 16 << 10
# How long a server that has closed its socket may take to end.
END_S = 5.0


class Messages:
    """One end of a job's socket: values of JSON's types, in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Self:
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, value: object) -> None:
        """Send a message, or do nothing if the other end has gone. Raises ValueError if it is too long."""
        try:
            data = msgspec.json.encode(value)
        except UnicodeEncodeError:
            # UTF-8 cannot encode half of a surrogate pair, so it is written as an escape.
            data = json.dumps(msgspec.to_builtins(value)).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of more than {MAX_MESSAGE >> 20} MiB")
        with contextlib.suppress(ConnectionError):
            self._writer.write(len(data).to_bytes(8) + data)
            await self._writer.drain()

    async def receive(self) -> Any:
        """The next message; None once the other end has gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(8))
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            # msgspec refuses the escape of half of a surrogate pair, which `send` may have written.
            return json.loads(data)

    def close(self) -> None:
        """Close this end. Data that has not been sent yet is lost."""
        self._writer.transport.abort()


class Job(Messages):
    """A process that does one job."""

    #: its exit code, once all its processes are gone
    ended: asyncio.Task[int]
    lifeline: asyncio.StreamWriter

    async def how_it_ended(self, within_s: float) -> str:
        """How its process ended, in words; "" if it has not within this time."""
        with contextlib.suppress(TimeoutError):
            return failure_reason.how_it_ended(await asyncio.wait_for(asyncio.shield(self.ended), within_s))
        return ""

    def close(self) -> None:
        """End it."""
        super().close()
        self.lifeline.write_eof()


class ForkServer:
    """Our program's side."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a server, which need not be ready yet. `argv`: a command that calls `serve`; its last argument, added here, is the number
        of its descriptor. Raises OSError."""
        # Each job takes two descriptors. Most systems allow 1024 by default, and more on request.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*argv, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Signals to our program's group must not reach the server, so that our program can end its jobs in order.
                start_new_session=True,
            )
        self._one_at_a_time = asyncio.Lock()
        #: what `load` says about the user's code
        self.about: Any = None

    async def __aenter__(self) -> Self:
        """Wait until it has loaded the user's code. Raises UsageError if that cannot be used, ProgramFailed if the server has died."""
        report = b""
        with contextlib.suppress(ConnectionError):
            report = await asyncio.get_running_loop().sock_recv(self._control, MAX_REPORT)
        outcome, _, text = report.decode().partition(" ")
        if outcome != "ready":
            how = self._how_it_died()
            await self.__aexit__()
            raise UsageError(text) if report else ProgramFailed(how)
        self.about = json.loads(text)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._control.close()
        await asyncio.to_thread(self._process.wait)

    @contextlib.asynccontextmanager
    async def job(self) -> AsyncIterator[Job]:
        """A process for one job; it and its descendants are gone after this block. Raises ProgramFailed if it cannot be started."""
        (messages, its_messages), (lifeline, its_lifeline) = socket.socketpair(), socket.socketpair()
        job = await Job.over(messages)
        reports, job.lifeline = await asyncio.open_unix_connection(sock=lifeline)
        started: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        job.ended = asyncio.create_task(_hear(reports, started))
        try:
            async with self._one_at_a_time:
                # If the server has died, this fails, and the closed lifeline reports it.
                with its_messages, its_lifeline, contextlib.suppress(OSError):
                    fds = [its_lifeline.fileno(), its_messages.fileno()]
                    socket.send_fds(self._control, [b"start"], fds)
                report = (await started).split()
            if not report:
                raise ProgramFailed(self._how_it_died())
            if report[0] == b"failed":
                raise ProgramFailed(f"cannot start a process for a job: {os.strerror(int(report[1]))}")
            yield job
        finally:
            # If the task was cancelled before it sent these, they are still open here, and the lifeline would never end.
            its_messages.close()
            its_lifeline.close()
            job.close()
            await asyncio.wait((job.ended,))
            job.lifeline.close()

    def _how_it_died(self) -> str:
        how = "does not answer"
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = failure_reason.how_it_ended(self._process.wait(END_S))
        return f"the process that starts all jobs {how}"


async def _hear(reports: asyncio.StreamReader, started: asyncio.Future[bytes]) -> int:
    """The reports of a job's guard; returns the job's exit code."""
    first, last = await _line(reports), b""
    # After a cancellation `started` is done already.
    if not started.done():
        started.set_result(first)
    if first.startswith(b"started"):
        last = await _line(reports)
    return int(last.split()[1]) if last else -int(signal.SIGKILL)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The guard's next report; b"" once it has ended."""
    with contextlib.suppress(ConnectionError):
        return await stream.readline()
    return b""


# --- the fork server ----------------------------------------------------------------------------------------------------------


Work = Callable[[socket.socket], None]


def serve(control: socket.socket, load: Callable[[], tuple[Work, object]]) -> None:
    """Fork a process for each job; returns when our program has closed its end of `control`.

    `load` loads the user's code, and returns what does a job, given the job's socket, and what our program has to know about the code (a
    value of JSON's types). This process must have one thread.
    """
    # Calling it here also loads ctypes once, before any fork.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        work, about = load()
    except UsageError as error:
        _report(control.fileno(), f"refused {error}"[:MAX_REPORT])
        return
    _report(control.fileno(), f"ready {json.dumps(about)}")
    # Existing objects are never garbage. Without the freeze, a collection in a job would touch them and copy their pages.
    gc.collect()
    gc.freeze()
    # The kernel reaps the guards.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    me = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 16, 2)
        if not data:
            return
        try:
            pid = os.fork()
        except OSError as error:
            _report(fds[0], f"failed {error.errno}\n")
        else:
            if pid == 0:
                control.close()
                _guard(fds[0], fds[1], me, work)
        for fd in fds:
            os.close(fd)


def _report(fd: int, text: str) -> None:
    # Our program may have died.
    with contextlib.suppress(OSError):
        os.write(fd, text.encode())


def _guard(lifeline: int, messages: int, server: int, work: Work) -> NoReturn:
    """The guard of one job, with the job's process below it."""
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        guard, me = Guard(lifeline, server), os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(lifeline)
            _do(work, messages, me)
        os.close(messages)
        # The guard ignores `fsbarrier debug`, because its stack says nothing about the job.
        signal.signal(SIGNAL, signal.SIG_IGN)
        _report(lifeline, "started\n")
        _report(lifeline, f"ended {guard.watch(pid)}\n")
    except OSError as error:
        _report(lifeline, f"failed {error.errno}\n")
    finally:
        os._exit(0)


def _do(work: Work, messages: int, guard: int) -> NoReturn:
    """One job, in its own process."""
    code = 1
    try:
        become_main(guard, (signal.SIGCHLD, *ENDING))
        # Reseed numpy's generator, which would be the same in every job. Python reseeds its own after a fork.
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        if torch := sys.modules.get("torch"):
            torch.seed()
        os.set_inheritable(messages, False)
        work(socket.socket(fileno=messages))
        sys.stdout.flush()
        code = 0
    except BaseException as error:
        # Print the traceback as Python does, and exit without cleaning up what this process copied from its parent.
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)
