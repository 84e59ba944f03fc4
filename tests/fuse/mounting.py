"""Mounting the tests' own FUSE filesystem: by mount(2) as root, by fusermount3 otherwise; and starting it for a test."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
KIND = "fsbarriertest"
ENDS_S = 10.0


def missing() -> str | None:
    """Why FUSE cannot be used here; None where it can."""
    if sys.platform != "linux" or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "FUSE: no /dev/fuse that this user may open"
    if os.geteuid() != 0:
        return None if shutil.which("fusermount3") else "FUSE: neither root nor fusermount3"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and not int(line.split()[1], 16) >> 21 & 1:
            return "FUSE: root without the right to mount (a container without CAP_SYS_ADMIN)"
    return None


def mount(mountpoint: Path, kind: str = KIND) -> int:
    """Mount on `mountpoint` as type fuse.`kind` and give the descriptor on which the kernel's requests come. Raises OSError."""
    if os.geteuid() != 0:
        return _by_fusermount(mountpoint, kind)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other,default_permissions"
    words = [os.fsencode(word) for word in (kind, str(mountpoint), f"fuse.{kind}")]
    if LIBC.mount(*words, MS_NOSUID | MS_NODEV, options.encode()):
        number = ctypes.get_errno()
        os.close(device)
        raise OSError(number, os.strerror(number), str(mountpoint))
    return device


def _by_fusermount(mountpoint: Path, kind: str) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        env = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
        command = [
            "fusermount3",
            "-o",
            f"default_permissions,fsname={kind},subtype={kind}",
            "--",
            str(mountpoint),
        ]
        subprocess.run(command, env=env, pass_fds=[theirs.fileno()], check=True)
        descriptors = array.array("i")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
        descriptors.frombytes(ancillary[0][2][: descriptors.itemsize])
        return descriptors[0]


def unmount(mountpoint: Path) -> None:
    """Take the mount away at once, whoever uses it. Never raises."""
    if os.geteuid() == 0:
        LIBC.umount2(os.fsencode(mountpoint), MNT_DETACH)
    else:
        subprocess.run(
            ["fusermount3", "-u", "-z", "--", str(mountpoint)], stderr=subprocess.DEVNULL, check=False
        )


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    ready: str,
    errors: Path | None = None,
    before_end: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """A server that says `ready` and lives until its standard input ends; gives its pid. It is gone afterwards, whatever happens."""
    with contextlib.ExitStack() as stack:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(errors.open("wb")) if errors else None,
            text=True,
            start_new_session=True,
        )
    assert server.stdin is not None and server.stdout is not None
    try:
        if server.stdout.readline() != f"{ready}\n":
            raise OSError(
                f"{' '.join(command)[:200]}: it does not come up{': ' + errors.read_text() if errors else ''}"
            )
        yield server.pid
    finally:
        before_end()
        server.stdin.close()
        try:
            server.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        server.stdout.close()


@contextlib.contextmanager
def mounted(backing: Path, mountpoint: Path, flags: Sequence[str] = ()) -> Iterator[Path]:
    """`backing` shown at `mountpoint` while this lasts; nothing is left afterwards, whatever happens."""
    backing.mkdir(exist_ok=True, parents=True)
    mountpoint.mkdir(exist_ok=True, parents=True)
    program = Path(__file__).with_name("passthrough.py")
    command = (sys.executable, str(program), str(backing), str(mountpoint), *flags)
    with serving(command, "mounted", before_end=lambda: unmount(mountpoint)):
        yield mountpoint


@contextlib.contextmanager
def nodes(folder: Path, count: int, flags: Sequence[str] = ()) -> Iterator[list[Path]]:
    """`count` mounts of one backing directory, `folder`/shared: one client each."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                mounted(folder / "shared", folder / f"mount-{number}", [*flags, "--seed", str(number)])
            )
            for number in range(count)
        ]
