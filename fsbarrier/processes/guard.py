"""The guard between a daemon and a program it started: no process below it outlives the daemon, even after SIGKILL.

    python -I -S fsbarrier/processes/guard.py LIFELINE_FD DAEMON_PID FOLDER FD,FD,... private|- PROGRAM ARGUMENT...

supervisor.py starts it.

    daemon --socket--> guard --PR_SET_PDEATHSIG--> main program --> ...

How the process tree is controlled:

* The guard is a *subreaper* (PR_SET_CHILD_SUBREAPER): when a process below it dies, the orphaned children become the
  guard's, not init's. A program that double-forks or calls setsid is therefore still found below its guard.
* It detects the death of the daemon in two ways: EOF on the socket, and a readable pidfd. EOF alone is not enough,
  because a process forked by the daemon may hold a copy of the other end.
* If somebody kills the guard itself, the kernel kills the main program (PR_SET_PDEATHSIG), and the daemon what is left of
  the tree, which has the guard's name in its environment (orphans.py). If the daemon is killed too, its next start does.
* To kill a tree, the guard stops every process it sees, lists the tree again, and kills only when no new process has
  appeared; otherwise a process could keep forking between listing and kill. It repeats this until `waitpid` reports
  that no child is left. As a subreaper it then knows that the tree is gone.

Socket protocol: the daemon sends lines "stop GRACE_S SIGNAL". The guard sends lines "started PID", "failed ERRNO STAGE",
"ended EXITCODE" (negative: a signal). The socket closes when the guard has exited. A guard writes to no file, so a hung
mount cannot block it.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    import signal
    from collections.abc import Iterable

    from fsbarrier.processes.processes import (
        GUARD_VARIABLE,
        below,
        freeze_and_kill,
        open_pidfd,
        own_name,
        send,
    )
else:
    # Started by path, without importing the package, which would take longer than the whole start of a guard.
    sys.path.append(__file__.rpartition("/")[0])
    from processes import GUARD_VARIABLE, below, freeze_and_kill, open_pidfd, own_name, send, signal

# linux/sched.h, net/if.h, bits/ioctls.h
CLONE_NEWUSER, CLONE_NEWNET, IFF_UP, SIOCSIFFLAGS = 0x10000000, 0x40000000, 1, 0x8914
# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

# The argument that gives the program its own network namespace.
PRIVATE = "private"
# The only argument of a process that checks whether this host allows one.
PROBE = "probe"

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# The program's grace period if a daemon's guard receives a signal from outside instead of a stop from the daemon.
GRACE_S = 5.0
# The grace period of the remaining processes when the main program has ended by itself.
LEFTOVERS_GRACE_S = 0.5
# Pause between rounds of killing: after a round that found new processes, and the maximum.
KILL_PAUSE_S, MAX_KILL_PAUSE_S = 0.002, 0.5


def prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None).prctl(ctypes.c_int(option), *[ctypes.c_ulong(n) for n in (value, 0, 0, 0)]):
        raise OSError(f"prctl({option}) failed")


class Guard:
    """Watches the daemon above and the main program below."""

    def __init__(
        self, lifeline: int, parent: int, grace_s: float = GRACE_S, passes_signals_on: bool = False
    ) -> None:
        """`grace_s`: the program's grace period if this guard receives a signal; `passes_signals_on`: it then gets that signal, not
        SIGTERM."""
        self.lifeline, self.received = lifeline, b""
        self.grace_s, self.passes_signals_on = grace_s, passes_signals_on
        self.child, self.exit_code = 0, -int(signal.SIGKILL)
        self.stop_requested = self.child_ended = self.leftovers_handled = False
        # The time at which to start killing everything below; None: not scheduled.
        self.kill_at: float | None = None
        self.wake, writer = os.pipe()
        for fd in (self.wake, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *ENDING):
            signal.signal(number, lambda *_: None)
        # The daemon thread that started us may have blocked signals.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.poller = select.poll()
        try:
            self.pidfd = open_pidfd(parent)
        except ProcessLookupError:
            self.pidfd = -1
        for fd in (self.wake, lifeline, self.pidfd):
            if fd >= 0:
                self.poller.register(fd, select.POLLIN)
        # Our parent has changed: `parent` died before we opened its pidfd, which may refer to another process.
        if os.getppid() != parent:
            self.kill_within(0)

    def kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)

    def watch(self, child: int) -> int:
        """Wait until no descendant is left; returns the child's exit code (negative: a signal)."""
        self.child, pause_s, hit = child, KILL_PAUSE_S, {0: 0}
        while not self.reap():
            left_s = None if self.kill_at is None else self.kill_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                before, hit = hit, freeze_and_kill(lambda: below(os.getpid()))
                # Schedule another round unless waitpid reports first that all are gone: soon after new forks, rarely if
                # only processes are left that hang in the kernel.
                pause_s = KILL_PAUSE_S if hit.keys() - before.keys() else min(2 * pause_s, MAX_KILL_PAUSE_S)
                self.kill_at = time.monotonic() + pause_s
                continue
            for fd, _ in self.poller.poll(None if left_s is None else left_s * 1000 + 1):
                if fd == self.wake:
                    if ending := [number for number in os.read(fd, 4096) if number in ENDING]:
                        self.stop_child(self.grace_s, ending[0] if self.passes_signals_on else signal.SIGTERM)
                elif fd == self.pidfd or not self.read_commands():
                    self.poller.unregister(fd)
                    self.kill_within(0)
        return self.exit_code

    def reap(self) -> bool:
        """Reap ended processes, our child or adopted orphans; True when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == self.child:
                self.child_ended, self.exit_code = True, os.waitstatus_to_exitcode(status)
            if pid == 0:
                if self.child_ended and not self.leftovers_handled:
                    self.leftovers_handled = True
                    self.end_leftovers()
                return False

    def read_commands(self) -> bool:
        """Execute the daemon's commands; False once it has ended."""
        try:
            data = os.read(self.lifeline, 4096)
        except OSError:
            return False
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            _, grace_s, number = line.split()
            self.stop_child(float(grace_s), int(number))
        return bool(data)

    def stop_child(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Ask the main program to end with this signal, and schedule the kill of everything after `grace_s`."""
        try:
            self.stop_requested = True
            self.kill_within(grace_s)
            # Its pid cannot be reused until we reap it.
            if not self.child_ended:
                os.killpg(self.child, number)
                # A stopped program would not handle the signal.
                os.killpg(self.child, signal.SIGCONT)
        except OSError:
            # Either the child is gone, and `end_leftovers` follows, or it runs as another user.
            pass

    def end_leftovers(self) -> None:
        """The main program has ended: give its remaining processes a short grace period."""
        for pid, start in below(os.getpid()).items():
            send(pid, start, signal.SIGTERM)
        if not self.stop_requested:
            self.kill_within(LEFTOVERS_GRACE_S)


def program_environment() -> dict[bytes, bytes]:
    """The environment that this process was started with (Python may have changed a variable of its own), and the guard's name in it."""
    fd, data = os.open("/proc/self/environ", os.O_RDONLY), b""
    while piece := os.read(fd, 1 << 16):
        data += piece
    os.close(fd)
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    env = {name: value for name, _, value in pairs}
    # Without SPT_NOENV, a process that sets its title, as vLLM's do, would overwrite its environment in /proc.
    return {**env, GUARD_VARIABLE.encode(): own_name().encode(), b"SPT_NOENV": b"1"}


def become_main(guard: int, numbers: Iterable[int]) -> None:
    """The first step of a process that was forked by its guard. `numbers`: the signals that are not to be handled."""
    signal.set_wakeup_fd(-1)
    # Detach from the terminal's Ctrl-C: the daemon decides when its programs end.
    os.setsid()
    # For PDEATHSIG the parent is the thread that forked; the guard has only one thread.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The guard died before prctl took effect.
    if os.getppid() != guard:
        os._exit(1)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def unshare(namespaces: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).unshare(ctypes.c_int(namespaces)):
        raise OSError(ctypes.get_errno(), "unshare failed")


def enter_private_network() -> None:
    """From now on this process, which must have one thread, and its children have a loopback of their own and no other network.

    Who may not make one gets a new user namespace as well, in which it stays the same user. Root keeps its own, because in a new one it
    could not read other users' files. Raises OSError where the kernel or a container does not allow it.
    """
    import fcntl
    import socket
    import struct

    try:
        unshare(CLONE_NEWNET)
    except OSError:
        ids = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), *((name, f"{own} {own} 1") for name, own in ids.items())):
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))


def start_main(cwd: str, private: bool, argv: list[str], env: dict[bytes, bytes]) -> tuple[int, str]:
    """Fork the main program; returns its pid (0 on failure) and the line that reports the result to the daemon."""
    reader, writer = os.pipe()
    me, pid = os.getpid(), os.fork()
    if pid == 0:
        stage = "prepare"
        try:
            if private:
                # If this host does not allow it, the run warned about that at its start (cli/start/node_checks.py).
                try:
                    enter_private_network()
                except OSError as error:
                    os.write(2, f"no network of its own: {error}\n".encode())
            become_main(me, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
            stage = "folder"
            os.chdir(cwd)
            stage = "program"
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(writer, f"failed {error.errno or 0} {stage}".encode())
        finally:
            os._exit(127)
    os.close(writer)
    # Python's pipes are close-on-exec: an empty read means that exec succeeded.
    failure = os.read(reader, 256).decode()
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
        return 0, failure
    return pid, f"started {pid}"


def main() -> int:
    """Guard a program until its process tree is gone; returns the exit code of this process."""
    if sys.argv[1:] == [PROBE]:
        try:
            enter_private_network()
        except OSError as error:
            os.write(2, (error.strerror or str(error)).encode())
            return 1
        return 0
    lifeline, daemon, cwd, passed, network, *argv = sys.argv[1:]

    line = int(lifeline)

    def report(text: str) -> None:
        try:
            os.write(line, text.encode() + b"\n")
        except OSError:
            # The daemon has ended.
            pass

    os.set_inheritable(line, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(line, int(daemon))
    pid, first_report = start_main(cwd, network == PRIVATE, argv, program_environment())
    # Only the program keeps these.
    for text in filter(None, passed.split(",")):
        os.close(int(text))
    for fd in (1, 2):
        # Standard output and error go to the program's log; from here on only the program writes there.
        os.dup2(0, fd)
    report(first_report)
    if pid:
        report(f"ended {guard.watch(pid)}")
    return 0


if __name__ == "__main__":
    os._exit(main())
