"""Commands and programs of fsbarrier as forks of a process that has imported what they import: what starting Python costs is not paid.

A daemon whose programs are forks has no guards: a fork ends when the daemon does, and only tests that look at neither guards nor command
lines take this way. What it is to start real processes, others show (test_matrix.py, test_chaos.py, test_guard.py).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from waiting import free_port

from fsbarrier.network.listening import LISTENING
from fsbarrier.processes import supervisor
from fsbarrier.rundir import logs
from fsbarrier.store import files

FAKE_VLLM = Path(__file__).parent / "fake_vllm.py"
CASE_S = 120.0
_real_start, _real_run = supervisor.Child.start, subprocess.run


def command(*words: str) -> int:
    """Do what `fsbarrier words` does, with forks as its programs. The patches last as long as this process."""
    from fsbarrier import cli

    supervisor.Child.start = start_by_fork  # type: ignore[method-assign, assignment]
    subprocess.run = run_by_fork  # type: ignore[assignment]
    return cli.main(list(words))


def in_a_fork(do: Callable[[], int], out: int, environ: Mapping[str, str]) -> int:
    """Do something in a fork, in a process group of its own that ends when this process does; returns its process id."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    os.setsid()
    os.environ.update(environ)
    end_with_parent(parent)
    end_with(do, out)


def end_with(do: Callable[[], int], out: int) -> NoReturn:
    """In a fork: do it, with its output to `out`, and end with its exit code."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for given, fd in ((null, 0), (out, 1), (out, 2)):
            os.dup2(given, fd)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        code = do()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 255)


def wait_for(pid: int, deadline_s: float) -> int:
    """The exit code of a fork; all that it has started and left is ended too."""
    fd = os.pidfd_open(pid)
    ended = select.select([fd], [], [], deadline_s)[0]
    os.close(fd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else -999


class Fork:
    """What `Child.start` returns here: the same methods, for a program that is a fork of this process."""

    def __init__(self, pid: int, name: str, log_file: Path) -> None:
        self.pid = self.guard_pid = pid
        self.name, self.log_file = name, log_file
        self._fd, self._code, self._lock = os.pidfd_open(pid), None, threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def wait(self, timeout_s: float) -> int | None:
        if self.poll() is None:
            select.select([self._fd], [], [], timeout_s)
        return self.poll()

    def stop(self, grace_s: float = 5.0) -> int:
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 30.0)):
            if self.poll() is None:
                os.kill(self.pid, number)
                self.wait(patience_s)
        code = self.poll()
        assert code is not None
        return code

    def pids(self) -> frozenset[int]:
        return frozenset() if self._code is not None else frozenset({self.pid})

    def fileno(self) -> int:
        return self._fd if self._code is None else -1

    def last_log_lines(self, lines: int = logs.SHOWN_LINES) -> list[str]:
        return logs.last_lines(self.log_file, lines)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_by_fork(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log_file: Path,
    name: str,
    **rest: Any,
) -> Any:
    """`Child.start`. What is no program of ours is started as ever."""
    if "-m" not in argv or not argv[argv.index("-m") + 1].startswith("fsbarrier."):
        return _real_start(argv, env=env, log_file=log_file, name=name, cwd=rest.get("cwd"))
    files.make_dirs(log_file.parent)
    module, words = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]
    variables = dict(os.environ if env is None else env)
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    parent = os.getpid()
    try:
        if not (pid := os.fork()):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(variables)
            end_with_parent(parent)
            end_with(lambda: be_program(module, list(words)), log)
    finally:
        os.close(log)
    return Fork(pid, name, log_file)


def end_with_parent(pid: int) -> None:
    """In a fork of `pid`: end as soon as it does, as a guard sees to it."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run_by_fork(argv: Sequence[str], **rest: Any) -> Any:
    """`subprocess.run` that captures the output. What is no program of ours is started as ever."""
    if "-m" not in argv or not argv[argv.index("-m") + 1].startswith("fsbarrier."):
        return _real_run(argv, **rest)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        module, words = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]

        def do() -> int:
            os.dup2(err.fileno(), 2)
            sys.stdin = io.StringIO(rest.get("input") or "")
            return be_program(module, list(words))

        code = wait_for(in_a_fork(do, out.fileno(), {}), CASE_S)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def be_program(module: str, words: list[str]) -> int:
    """Do what `python -m module words` does."""
    match module:
        case "fsbarrier.workers.vllm_server":
            sys.argv = [str(FAKE_VLLM), *words]
            runpy.run_path(str(FAKE_VLLM), run_name="__main__")
        case "fsbarrier.workers.torchrun":
            return be_torchrun(words)
        case _:
            sys.argv = [module, *words]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def be_torchrun(words: list[str]) -> int:
    """Do what torchrun does with one program that does not fail."""
    given = {
        name: words[words.index(f"--{name}") + 1]
        for name in ("nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port")
    }
    each, first = int(given["nproc-per-node"]), int(given["node-rank"]) * int(given["nproc-per-node"])
    module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    os.environ |= {
        "WORLD_SIZE": str(int(given["nnodes"]) * each),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": given["master-addr"],
        # 0: the processes of one node choose a port among themselves.
        "MASTER_PORT": str(int(given["master-port"]) or free_port()),
    }
    # The port that was probed: its store is made here without the socket.
    for fd in filter(None, os.environ.pop(LISTENING, "").split(",")):
        os.close(int(fd))
    others = []
    for local in range(1, each):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            end_with(lambda: be_program(module, rest), 2)
        others.append(pid)
    os.environ |= {"RANK": str(first), "LOCAL_RANK": "0"}
    code = 0
    try:
        code = be_program(module, rest)
    finally:
        for pid in others:
            code = code or os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code


# --- forks of one warm process ----------------------------------------------------------------------------------------------

_server = multiprocessing.get_context("forkserver")


def warm_server() -> Any:
    """What starts processes that are forks of one that has imported warm.py. It finds its modules through PYTHONPATH alone."""
    from multiprocessing import forkserver

    here, before = Path(__file__).parent, dict(os.environ)
    _server.set_forkserver_preload(["warm"])
    # Several threads would only wait for each other, with models as small as these.
    os.environ.update(PYTHONPATH=f"{here.parent}{os.pathsep}{here}", OMP_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return _server


def run_warm(argv: Sequence[str], **rest: Any) -> Any:
    """`subprocess.run` that captures the output, with a program of ours as a fork of the warm process."""
    if "-m" not in argv or not argv[argv.index("-m") + 1].startswith("fsbarrier."):
        return _real_run(argv, **rest)
    module, words = argv[argv.index("-m") + 1], list(argv[argv.index("-m") + 2 :])
    env, given = dict(rest.get("env") or os.environ), rest.get("input") or ""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        about = module, words, os.getcwd(), env, given, out.name, err.name
        process = warm_server().Process(target=be_program_here, args=about, daemon=True)
        process.start()
        process.join()
        return subprocess.CompletedProcess(argv, process.exitcode, out.read(), err.read())


def be_program_here(
    module: str, words: list[str], cwd: str, env: dict[str, str], given: str, out: str, err: str
) -> NoReturn:
    def do() -> int:
        os.chdir(cwd)
        os.dup2(os.open(err, os.O_WRONLY | os.O_APPEND), 2)
        sys.stdin = io.StringIO(given)
        return be_program(module, words)

    in_its_own_session(env, out, do)


def in_its_own_session(env: Mapping[str, str], out: str, do: Callable[[], int]) -> NoReturn:
    """In a fork: do something in this environment, with its output to a file."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [folder for folder in env["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    tempfile.tempdir = None
    end_with(do, os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))


class Daemon:
    """A command of fsbarrier that is a fork; as much of `Popen` as tests use."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], out: Path) -> None:
        about = list(words), dict(env), str(out)
        self._process = warm_server().Process(target=be_daemon, args=about, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("fsbarrier", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def be_daemon(words: list[str], env: dict[str, str], out: str) -> NoReturn:
    in_its_own_session(env, out, lambda: command(*words))


def run_script(name: str, *words: object) -> None:
    """Run a script of this folder, which forks the processes of an update. What it prints is shown where it fails."""
    path = Path(__file__).parent / name
    env = {
        **os.environ,
        "PYTHONPATH": str(path.parents[1]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with tempfile.NamedTemporaryFile("r") as out:
        about = str(path), list(map(str, words)), env, out.name
        process = warm_server().Process(target=be_script, args=about, daemon=True)
        process.start()
        try:
            process.join()
        finally:
            # A test that takes too long is interrupted.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.exitcode == 0, f"{name} {' '.join(about[1])}\n{out.read()[-6000:]}"


def be_script(path: str, words: list[str], env: dict[str, str], out: str) -> NoReturn:
    def do() -> int:
        sys.argv = [path, *words]
        runpy.run_path(path, run_name="__main__")
        return 0

    in_its_own_session(env, out, do)
