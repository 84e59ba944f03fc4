"""Trees of real processes for the tests of the guard and the supervisor, and ways to watch them without missing anything."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from waiting import DEADLINE_S

from fsbarrier.processes import supervisor

ROOT = Path(supervisor.__file__).parents[2]
ALL = ("plain", "session", "daemonised", "deaf", "stopped")

# A program that makes a tree. Every process of it writes its pid to a FIFO once it is in place, and its pid again on SIGUSR1.
TREE = r"""
import os, signal, sys
fifo, *kinds = sys.argv[1:]

def tell(*_):
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, b"%d\n" % os.getpid())
    os.close(fd)

def live():
    signal.signal(signal.SIGUSR1, tell)
    tell()
    while True:
        signal.pause()

def bomb(depth):
    tell()
    alive = 0
    while True:  # every process but the last generation replaces what ended, for ever
        while alive < 3:
            if os.fork() == 0:
                os._exit(0) if depth == 0 else bomb(depth - 1)
            alive += 1
        os.wait()
        alive -= 1

for kind in kinds:
    if kind not in ("plain", "session", "daemonised", "deaf", "stopped"):
        continue
    if os.fork() == 0:
        if kind in ("session", "daemonised"):
            os.setsid()
        if kind == "daemonised" and os.fork():
            os._exit(0)
        if kind == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if kind == "stopped":
            tell()
            os.kill(os.getpid(), signal.SIGSTOP)
        live()
if "bomb" in kinds:
    bomb(3)  # 1 + 3 + 9 + 27, the last of which fork without end
if "exit" in kinds:
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    tell()
    while True:
        signal.pause()
live()
"""

# A daemon: starts one tree for each of its arguments, in a thread of its own that ends, says its guards' and programs' pids.
DAEMON = r"""
import os, select, sys, signal, threading
sys.path.insert(0, sys.argv[1])
if sys.stdin.isatty():
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite was started in the background
from pathlib import Path
from fsbarrier.processes.supervisor import Child
children = []
def start(number, command):
    children.append(Child.start(command.split("\t"), log_file=Path(sys.argv[2]) / f"{number}.log", name=f"tree{number}"))
threads = [threading.Thread(target=start, args=pair) for pair in enumerate(sys.argv[3:])]
for thread in threads: thread.start()
for thread in threads: thread.join()
if os.environ.get("LEAK"):  # a copy of everything open, as multiprocessing's fork would make
    leak = os.fork()
    if leak == 0:
        signal.pause()
    print("leak", leak, flush=True)
for child in children: print("child", child.guard_pid, child.pid, flush=True)
print("ready", flush=True)
while True:
    try:
        while not select.select([0], [], [], 0.2)[0]: pass  # a signal just before a read that blocks is noticed only after it
        if not os.read(0, 4096): break
    except KeyboardInterrupt:
        print("interrupted", end=" ")
    print("polled", *[child.poll() for child in children], flush=True)
"""


class Watched:
    """Processes held by pidfd, so that nobody can take their pids unnoticed."""

    def __init__(self) -> None:
        self.pidfds: dict[int, int] = {}

    def add(self, *pids: int) -> None:
        for pid in pids:
            if pid not in self.pidfds:
                self.pidfds[pid] = os.pidfd_open(pid)

    def alive(self) -> list[int]:
        return [pid for pid, pidfd in self.pidfds.items() if not select.select([pidfd], [], [], 0)[0]]

    def wait_gone(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for pid, pidfd in self.pidfds.items():
            ended, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            assert ended, f"{pid} is still there, among {self.alive()}"

    def close(self) -> None:
        for pidfd in self.pidfds.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # a failed test leaves nothing behind
            os.close(pidfd)


class Fifo:
    """Where the processes of a tree tell their pids."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.buffer = b""

    def pids(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            line, newline, rest = self.buffer.partition(b"\n")
            if newline:
                found.append(int(line))
                self.buffer = rest
                continue
            assert select.select([self.fd], [], [], DEADLINE_S)[0], f"only {found} of {count} came"
            self.buffer += os.read(self.fd, 4096)
        return found

    def command(self, *kinds: str) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", TREE, str(self.path), *kinds]

    def assert_alive(self, pids: list[int]) -> None:
        """Each answers, so it was neither killed nor stopped."""
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert sorted(self.pids(len(pids))) == sorted(pids)


class Daemon:
    """A daemon process of its own, and its children's pids."""

    def __init__(self, folder: Path, *commands: list[str], terminal: int | None = None, **env: str) -> None:
        """`terminal`: the descriptor of one to be its controlling terminal, with it in the foreground."""
        argv = [sys.executable, "-c", DAEMON, str(ROOT), str(folder), *("\t".join(c) for c in commands)]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if terminal is None else terminal,
            stdout=subprocess.PIPE,
            start_new_session=terminal is not None,
            text=True,
            env={**os.environ, **env},
        )
        self.guards: list[int] = []
        self.mains: list[int] = []
        self.leak = 0
        while (words := self.line().split()) != ["ready"]:
            if words[0] == "leak":
                self.leak = int(words[1])
            else:
                self.guards.append(int(words[1]))
                self.mains.append(int(words[2]))

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the daemon ended"
        return line

    def ask(self) -> list[str]:
        """What its children's `poll()` gives."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line().split()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def kill_at_once(*pids: int) -> None:
    """So that none of them can act on another's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
