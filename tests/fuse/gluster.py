"""GlusterFS with the packages' own server and clients, on loopback, without its management daemon: one brick, several mounts."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fuse import mounting

READY_S = 30.0
SERVER = """
volume posix
  type storage/posix
  option directory {backing}
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume brick
  type performance/io-threads
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.brick.allow 127.0.0.1
  subvolumes brick
end-volume
"""
CLIENT = """
volume remote
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume brick
end-volume
volume write-behind
  type performance/write-behind
  subvolumes remote
end-volume
volume readdir-ahead
  type performance/readdir-ahead
  subvolumes write-behind
end-volume
volume md-cache
  type performance/md-cache
  subvolumes readdir-ahead
end-volume
"""


def missing() -> str | None:
    """Why GlusterFS cannot be used here; None where it can."""
    if shutil.which("glusterfs") is None or shutil.which("glusterfsd") is None:
        return "GlusterFS is not installed (Debian: glusterfs-server)"
    return mounting.missing()


@contextlib.contextmanager
def nodes(folder: Path, count: int) -> Iterator[list[Path]]:
    """`count` GlusterFS mounts of one brick, `folder`/shared, with the client's usual caches. Nothing is left afterwards."""
    backing = folder / "shared"
    backing.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        (folder / "server.vol").write_text(SERVER.format(backing=backing, port=port))
        (folder / "client.vol").write_text(CLIENT.format(port=port))
        stack.enter_context(_running(folder, "glusterfsd", "server"))
        _until(lambda: _answers(port), folder / "server.log")
        mounts = []
        for number in range(count):
            mount = folder / f"mount-{number}"
            mount.mkdir()
            stack.enter_context(_running(folder, "glusterfs", "client", mount))
            _until(mount.is_mount, folder / f"{mount.name}.log")
            mounts.append(mount)
        yield mounts


@contextlib.contextmanager
def _running(folder: Path, program: str, volume: str, mount: Path | None = None) -> Iterator[None]:
    log = folder / f"{mount.name if mount else volume}.log"
    words = [program, "--no-daemon", "-f", str(folder / f"{volume}.vol"), "-l", str(log)]
    process = subprocess.Popen([*words, *([str(mount)] if mount else [])], start_new_session=True)
    try:
        yield
    finally:
        if mount is not None:
            mounting.unmount(mount)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _until(what: object, log: Path) -> None:
    assert callable(what)
    end, pause = time.monotonic() + READY_S, threading.Event()
    while not what():
        if time.monotonic() > end:
            raise OSError(
                f"GlusterFS does not come up: {log.read_text()[-2000:] if log.exists() else 'no log'}"
            )
        pause.wait(0.05)
