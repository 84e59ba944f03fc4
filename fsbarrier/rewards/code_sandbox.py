"""Where the programs of answers run: a sandbox of bubblewrap, with an interpreter and nothing else, no network, and no other process.

Without bubblewrap, or where the host forbids what it needs, answer_program.py's own limits remain, but a program can read and write what
the run's user can. `missing` says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

RUNNER = Path(__file__).with_name("answer_program.py")
PROBE_S = 30.0
#: all that a program may leave in files
FILE_BYTES = 64 << 20
#: the host's folders and files that a program may read, as far as they exist: they have the libraries that the interpreter needs
SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/lib32",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
#: numpy and the like must not start a thread for each core
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


@functools.cache
def missing() -> str:
    """Why there is no sandbox on this host; "" if there is one."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    try:
        done = subprocess.run(
            [*_bubblewrap(), sys.executable, "-I", "-S", "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work here: {error}"
    if done.returncode:
        return f"bubblewrap does not work here: {(done.stderr.splitlines() or ['it failed'])[-1]}"
    return ""


def _bubblewrap() -> list[str]:
    words = [
        "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if os.geteuid() == 0:
        # As root it needs no user namespace, and the runner becomes a user that owns nothing.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--cap-drop", "ALL"]
    words += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    words += ["--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM:
        kept = (
            ["--symlink", os.readlink(path), path]
            if Path(path).is_symlink()
            else ["--ro-bind-try", path, path]
        )
        words += kept
    folders = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent]
    for shown in dict.fromkeys((*folders, RUNNER)):
        for parent in reversed(shown.parents):
            # With bubblewrap's default mode only the user who made the folder could enter it.
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(shown), str(shown)]
    words += ["--proc", "/proc"]
    words += ["--perms", "0755", "--tmpfs", "/dev"]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    words += ["--remount-ro", "/dev", "--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", "/tmp"]
    return [*words, "--remount-ro", "/", "--chdir", "/tmp"]


@contextlib.contextmanager
def opened() -> Iterator[subprocess.Popen[bytes]]:
    """A process of answer_program.py, in a sandbox where there is one; ended after this block. Raises OSError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runner = [sys.executable, "-I", str(RUNNER)]
        process = subprocess.Popen(
            runner if missing() else [*_bubblewrap(), *runner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**ENVIRONMENT, "HOME": folder, "PATH": os.environ.get("PATH", os.defpath)},
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            for end in (process.stdin, process.stdout):
                if end is not None:
                    with contextlib.suppress(OSError):
                        end.close()
            process.wait()
