"""The guard between a daemon and a program it started: nothing below outlives the daemon, also after SIGKILL.

    python -I -S fsbarrier/supervision/guard.py LIFELINE_FD DAEMON_PID     (`fsbarrier.supervision.supervisor.Child` starts it)

    daemon --socket--> outer guard --pipe--> inner guard --PR_SET_PDEATHSIG--> main program --> ...

Both guards are subreapers: a descendant that double-forks or calls setsid comes back to the inner one, or to
the outer one where somebody killed the inner. Each watches the process above it by the pipe's end and by a
pidfd (a copy of the pipe's other end may live on in a process that the daemon forked). When it is gone, all
below is frozen and killed, again and again until `waitpid` says that no child is left.

The daemon sends the program (see `read_program`), then lines "stop GRACE_S". The guards answer with lines
"started PID START", "failed ERRNO STAGE", "ended EXITCODE" (negative: a signal); the line ends with both.
They write to no file: a hung mount must not hold them up.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    import signal

    from fsbarrier.supervision.processes import Stat, below, freeze_and_kill, open_pidfd, send
else:
    sys.path.append(__file__.rpartition("/")[0])  # started by path, apart from the package
    from processes import Stat, below, freeze_and_kill, open_pidfd, send, signal

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
GRACE_S = 5.0  # for a signal that comes from outside
FIRST_PAUSE_S = 0.002  # between two rounds of killing
SETTLE_S = 0.5  # what is left when the main program ended by itself gets SIGTERM, then this long


def prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None).prctl(ctypes.c_int(option), *[ctypes.c_ulong(n) for n in (value, 0, 0, 0)]):
        raise OSError(f"prctl({option}) failed")


class Guard:
    """A watch over the process above and the one child below; the outer one has a `relay` to the inner."""

    def __init__(self, lifeline: int, parent: int, relay: int | None = None) -> None:
        self.lifeline, self.relay, self.commands = lifeline, relay, b""
        self.child, self.code = 0, -int(signal.SIGKILL)
        self.asked = self.ended = self.noticed = False
        self.kill_at: float | None = None
        self.wake, writer = os.pipe()
        for fd in (self.wake, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *ENDING):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the daemon's thread may have blocked some
        self.poller = select.poll()
        try:
            self.pidfd = open_pidfd(parent)
        except ProcessLookupError:
            self.pidfd = -1
        for fd in (self.wake, lifeline, self.pidfd):
            if fd >= 0:
                self.poller.register(fd, select.POLLIN)
        if os.getppid() != parent:  # it died before we had its pidfd
            self.kill_within(0)

    def kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    def watch(self, child: int) -> int:
        """Wait until no descendant is left; gives the child's exit code (negative: a signal)."""
        self.child, pause_s, hit = child, FIRST_PAUSE_S, {0: 0}
        while not self.reap():
            left_s = None if self.kill_at is None else self.kill_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                before, hit = hit, freeze_and_kill(lambda: below(os.getpid()))
                # Once more, unless waitpid says first that all is gone: at once after new forks, rarely where
                # something hangs in the kernel.
                pause_s = FIRST_PAUSE_S if hit.keys() - before.keys() else min(2 * pause_s, 0.5)
                self.kill_at = time.monotonic() + pause_s
                continue
            for fd, _ in self.poller.poll(None if left_s is None else left_s * 1000 + 1):
                if fd == self.wake:
                    if any(number in ENDING for number in os.read(fd, 4096)):
                        self.ask(GRACE_S)
                elif fd == self.pidfd or not self.obey():
                    self.poller.unregister(fd)
                    self.kill_within(0)
        return self.code

    def reap(self) -> bool:
        """Collect what ended; True when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == self.child:
                self.ended, self.code = True, os.waitstatus_to_exitcode(status)
            if pid == 0:
                if self.ended and not self.noticed:
                    self.noticed = True
                    self.end_rest()
                return False

    def obey(self) -> bool:
        """Read commands from above; False at the end of the line."""
        try:
            data = os.read(self.lifeline, 4096)
        except OSError:
            return False
        *lines, self.commands = (self.commands + data).split(b"\n")
        for line in lines:
            self.ask(float(line.split()[1]))
        return bool(data)

    def ask(self, grace_s: float) -> None:
        """Ask the child to end, and end everything by force after `grace_s`."""
        try:
            if self.relay is not None:
                os.write(self.relay, f"stop {grace_s}\n".encode())
                os.kill(self.child, signal.SIGCONT)
                return
            self.asked = True
            self.kill_within(grace_s)
            if not self.ended:  # not reaped, so the number is still its own
                os.killpg(self.child, signal.SIGTERM)
                os.killpg(self.child, signal.SIGCONT)  # a stopped program would not see the first
        except OSError:
            pass  # gone (then `end_rest` comes), or another user's

    def end_rest(self) -> None:
        """The child has ended, others are left: by a killed inner guard, or by the main program."""
        if self.relay is not None:
            return self.kill_within(0)
        for pid, start in below(os.getpid()).items():
            send(pid, start, signal.SIGTERM)
        if not self.asked:
            self.kill_within(SETTLE_S)


def read_program(fd: int) -> tuple[bytes, list[bytes], dict[bytes, bytes]]:
    """Folder, argv, environment: 8 bytes of length, then by NUL: folder, number of arguments, these, NAME=VALUE."""
    size, data = 8, b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError
        data += piece
        if len(data) == size == 8:
            size += int.from_bytes(data, "little")
    cwd, count, *rest = data[8:].split(b"\0")
    pairs = (entry.partition(b"=") for entry in rest[int(count) :])
    return cwd, rest[: int(count)], {name: value for name, _, value in pairs}


def start_main(cwd: bytes, argv: list[bytes], env: dict[bytes, bytes]) -> tuple[int, str]:
    """Fork the main program; gives its pid, or 0, and the line that says how it went."""
    reader, writer = os.pipe()
    me, pid = os.getpid(), os.fork()
    if pid == 0:
        stage = "prepare"
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()  # out of reach of the terminal's Ctrl-C
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # tied to the thread that forks: the guard has only one
            if os.getppid() != me:
                os._exit(1)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            stage = "folder"
            os.chdir(cwd)
            stage = "program"
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(writer, f"failed {error.errno or 0} {stage}".encode())
        finally:
            os._exit(127)
    os.close(writer)
    failure = os.read(reader, 256).decode()
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
        return 0, failure
    return pid, f"started {pid} {Stat(pid).start}"


def main() -> int:
    lifeline, daemon, me = int(sys.argv[1]), int(sys.argv[2]), os.getpid()

    def report(line: str) -> None:
        try:
            os.write(lifeline, line.encode() + b"\n")
        except OSError:
            pass  # nobody is listening any more

    os.set_inheritable(lifeline, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        program = read_program(lifeline)
    except (OSError, EOFError):
        return 1  # the daemon died first
    reader, writer = os.pipe()
    if inner := os.fork():
        os.close(reader)
        for fd in (1, 2):  # the log belongs to the program
            os.dup2(0, fd)
        code = Guard(lifeline, daemon, relay=writer).watch(inner)
        if code < 0:
            report(f"ended {code}")  # the inner guard was killed, and with it the main program
        return code & 255
    os.close(writer)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(reader, me)
    pid, line = start_main(*program)
    for fd in (1, 2):
        os.dup2(0, fd)
    report(line)
    if pid:
        report(f"ended {guard.watch(pid)}")
    return 0


if __name__ == "__main__":
    os._exit(main())
