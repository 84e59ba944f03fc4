"""Runs the program of an answer once for each test, each time in a process of its own that may do little: compute, read and print.

    python -I answer_program.py      within a sandbox (code_sandbox.py); imports nothing of this package

It gets a line of JSON on standard input: {"program", "function", "inputs", "cpu_s", "wall_s", "memory", "output"}. It prints a line
"ready", and then for each test one line of JSON: {"got": what it printed or returned}, or {"failed": why}. What is expected it never
learns, so that a program that takes hold of this process gains nothing.

A test's process cannot start another one or a program, open a socket, send a signal to another process or look into one: a filter on its
system calls refuses that (seccomp). So its memory is limited as a whole, also for root, and nothing of it is left when it has ended.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import platform
import resource
import select
import signal
import stat
import struct
import sys
import traceback
from typing import Any

Asked = dict[str, Any]

# What solutions take for granted that were written for LeetCode's editor.
PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys, time
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
# Threads count as processes. A solution with deep recursion often runs in a thread with a large stack.
THREADS, FILES = 64, 64
# Nobody has an account with a user id from here on; lower ids may be those of people.
FIRST_USER = 0x70000000
SHOWN, READY = 200, "ready"

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 1, 4, 38, 22, 2
KILL, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
# Operations of the filter's machine: load a word, return, jump if equal, jump if any of these bits is set.
LOAD, RETURN, EQUAL, HAS = 0x20, 0x06, 0x15, 0x45
# Offsets in what the filter sees: the number of the call, the architecture, the lower halves of the arguments.
NUMBER, ARCHITECTURE, FIRST = 0, 4, 16

# System calls that are refused, with their numbers on x86_64 and aarch64, from the kernel's tables. Those after the empty line are allowed
# for this process or its threads alone.
CALLS = """
fork 57 -
vfork 58 -
execve 59 221
execveat 322 281
socket 41 198
tkill 200 130
rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424
pidfd_open 434 434
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
memfd_create 319 279
memfd_secret 447 447
shmget 29 194
msgget 68 186
io_uring_setup 425 425
userfaultfd 323 282
bpf 321 280
perf_event_open 298 241
add_key 248 217
request_key 249 218
keyctl 250 219
unshare 272 97
setns 308 268

clone 56 220
clone3 435 435
kill 62 129
tgkill 234 131
rt_sigqueueinfo 129 138
prlimit64 302 261
prctl 157 167
"""
# Each machine's architecture for the kernel.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def numbers(table: str) -> dict[str, int]:
    """The numbers of these calls on this machine."""
    column = 1 + list(MACHINES).index(platform.machine())
    rows = [row.split() for row in table.strip().splitlines()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def restrict() -> None:
    """From now on this process makes no other one and reaches none. Raises OSError where the kernel has no such filter."""
    if platform.machine() not in MACHINES:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    refused, calls = map(numbers, CALLS.split("\n\n"))
    own = os.getpid()

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def result(number: int, *steps: bytes) -> list[bytes]:
        """If the call has this number, these steps decide; they end with a return."""
        return [step(LOAD, NUMBER), step(EQUAL, number, 0, len(steps)), *steps]

    refuse, allow = step(RETURN, ERRNO | EPERM), step(RETURN, ALLOW)
    only_own = [step(LOAD, FIRST), step(EQUAL, own, 0, 1), allow, refuse]
    program = [
        *(step(LOAD, ARCHITECTURE), step(EQUAL, MACHINES[platform.machine()], 1, 0), step(RETURN, KILL)),
        # Another set of numbers, for programs of 32 bits.
        *(step(LOAD, NUMBER), step(HAS, 0x40000000, 0, 1), step(RETURN, KILL)),
        *result(calls["clone"], step(LOAD, FIRST), step(HAS, CLONE_THREAD, 0, 1), allow, refuse),
        # libc then calls clone, whose flags can be seen.
        *result(calls["clone3"], step(RETURN, ERRNO | ENOSYS)),
        *result(calls["kill"], *only_own),
        *result(calls["tgkill"], *only_own),
        *result(calls["rt_sigqueueinfo"], *only_own),
        *result(
            calls["prlimit64"], step(LOAD, FIRST), step(EQUAL, 0, 1, 0), step(EQUAL, own, 0, 1), allow, refuse
        ),
    ]
    # It must not outlive the process that started it.
    program += result(calls["prctl"], step(LOAD, FIRST), step(EQUAL, PR_SET_PDEATHSIG, 0, 1), refuse, allow)
    for number in refused.values():
        program += result(number, refuse)
    program.append(allow)
    code = ctypes.create_string_buffer(b"".join(program))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for option, *values in (
        (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (PR_SET_SECCOMP, ctypes.c_ulong(FILTER), described),
    ):
        if libc.prctl(option, *values, zero, zero):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def why_not() -> str:
    """Why tests' processes cannot be restricted here; "" if they can."""
    reason, answer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            restrict()
        except OSError as error:
            os.write(answer, str(error).encode())
        finally:
            os._exit(0)
    os.close(answer)
    os.waitpid(pid, 0)
    return os.read(reason, SHOWN).decode()


def become_nobody() -> None:
    """If this is root, become a user that owns nothing and has no process, unless that user could not read the interpreter's library."""
    folders = pathlib.Path(os.__file__).resolve().parents
    if os.geteuid() == 0 and all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
        user = FIRST_USER + os.getpid()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def limit(asked: Asked) -> None:
    limits = {
        resource.RLIMIT_AS: asked["memory"],
        resource.RLIMIT_FSIZE: asked["output"],
        resource.RLIMIT_NPROC: asked["threads"],
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = (
            wanted
            if hard == resource.RLIM_INFINITY
            else hard
            if wanted == resource.RLIM_INFINITY
            else min(wanted, hard)
        )
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"] + 1))


def do_test(asked: Asked, given: Any, printed: int, result: int) -> None:
    """In a test's process: run the program. `said`, `result`: files for what it prints, and for what its function returns."""
    function, files = asked["function"], list[int]()
    os.setsid()
    for data in ("" if function else given, None):
        fd = os.memfd_create("test")
        os.write(fd, (data or "").encode("utf-8", "surrogatepass"))
        os.lseek(fd, 0, os.SEEK_SET)
        files.append(fd)
    for fd, number in (
        (files[0], 0),
        (files[1] if function else printed, 1),
        (printed if function else files[1], 2),
    ):
        os.dup2(fd, number)
    os.closerange(3, result)
    os.closerange(result + 1, 1 << 16)
    limit(asked)
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, *[ctypes.c_ulong(number) for number in (signal.SIGKILL, 0, 0, 0)]
    )
    restrict()
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogatepass", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)
    names: dict[str, Any] = {"__name__": "__main__" if function is None else "answer"}
    if function:
        exec(PRELUDE, names)
    exec(compile(asked["program"], "answer.py", "exec"), names)
    if function:
        call = names.get(function)
        if call is None and "Solution" in names:
            call = getattr(names["Solution"](), function, None)
        if call is None:
            raise NameError(f"the program has no function {function}")
        os.write(result, json.dumps(call(*given)).encode())


def run_test(asked: Asked, given: Any) -> dict[str, str]:
    """One test in a process of its own; returns its line."""
    printed, result = (os.memfd_create(name) for name in ("said", "result"))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            do_test(asked, given, printed, result)
            code = 0
        except SystemExit as error:
            # As in any program, None and 0 are success, and a text says what failed.
            code = 0 if error.code is None or error.code == 0 else 1
            explain(result, f"exit: {error.code}")
        except BaseException:
            explain(result, traceback.format_exc(0))
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            os._exit(code)
    try:
        status = ended_within(pid, asked["wall_s"])
        if status is None:
            return {"failed": "it took too long"}
        if (code := os.waitstatus_to_exitcode(status)) < 0:
            named = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return {"failed": "it took too long" if -code == signal.SIGXCPU else f"it was ended by {named}"}
        text = contents(result if code or asked["function"] else printed, asked["output"])
        if code:
            return {"failed": (text.strip().splitlines() or ["it ended with an error"])[-1][:SHOWN]}
        return {"got": text}
    finally:
        os.close(printed)
        os.close(result)


def explain(result: int, text: str) -> None:
    with contextlib.suppress(BaseException):
        os.ftruncate(result, 0)
        os.pwrite(result, text[-SHOWN:].encode("utf-8", "replace"), 0)


def ended_within(pid: int, wall_s: float) -> int | None:
    """The status of a test's process; None if it had to be killed."""
    pidfd = os.pidfd_open(pid)
    try:
        late = not select.select([pidfd], [], [], wall_s)[0]
        if late:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    finally:
        os.close(pidfd)
    return None if late else status


def contents(fd: int, most: int) -> str:
    return os.pread(fd, most, 0).decode("utf-8", "replace")


def counts_apart() -> bool:
    """Whether the kernel counts this user's processes here apart from all its others on this host."""
    version = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])
    own_namespace = int(pathlib.Path("/proc/self/uid_map").read_text().split()[2]) < 1 << 16
    return os.geteuid() >= FIRST_USER or (own_namespace and version >= (5, 14))


def main() -> int:
    asked = json.loads(sys.stdin.readline())
    become_nobody()
    # The tests' processes are this user's, and must not write into the memory of this one.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, *[ctypes.c_ulong(0)] * 4)
    asked["threads"] = THREADS if counts_apart() else resource.RLIM_INFINITY
    print(why_not() or READY, flush=True)
    for given in asked["inputs"]:
        print(json.dumps(run_test(asked, given)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
