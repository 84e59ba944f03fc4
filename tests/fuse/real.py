"""sshfs and GlusterFS over loopback: one mount for each node, of servers that live as long as the test. Both are user-space programs.

Needs root, /dev/fuse, and Debian's sshfs with openssh-server, or glusterfs-server. The servers listen on loopback only, and keep all their
files in the test's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from waiting import until

NEEDED = {
    "sshfs": ("sshfs", "/usr/sbin/sshd", "ssh-keygen"),
    "glusterfs": ("/usr/sbin/glusterfsd", "glusterfs"),
}

#: a brick and its server, without glusterd: `glusterfsd -f`
BRICK = """
volume brick
  type storage/posix
  option directory {backing}
end-volume
volume locks
  type features/locks
  subvolumes brick
end-volume
volume served
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.locks.allow 127.0.0.1
  subvolumes locks
end-volume
"""
CLIENT = """
volume remote
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume locks
end-volume
"""


def missing(kind: str) -> str:
    """Why there can be no such mounts here; "" if there can."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        return "needs root and /dev/fuse"
    lacking = [name for name in NEEDED[kind] if shutil.which(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


@contextlib.contextmanager
def nodes(kind: str, folder: Path, count: int, options: Sequence[str] = ()) -> Iterator[list[Path]]:
    """`count` mounts of `folder`/shared, each by a client of its own."""
    backing, mounts = folder / "shared", [folder / f"mount-{number}" for number in range(count)]
    for made in (backing, *mounts):
        made.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve, mount = {"sshfs": (sshd, sshfs), "glusterfs": (glusterfsd, glusterfs)}[kind]
    argv = serve(folder, backing, port)
    with (folder / "server.log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as server:
        try:
            until(
                lambda: _answers(port), (folder / "server.log").read_text, lives=lambda: server.poll() is None
            )
            for one in mounts:
                subprocess.run([*mount(folder, backing, port, one), *options], check=True, timeout=60)
                until(lambda one=one: os.path.ismount(one))  # type: ignore[misc]
            yield mounts
        finally:
            for one in mounts:
                subprocess.run(["umount", "--lazy", str(one)], capture_output=True)
            server.terminate()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def sshd(folder: Path, backing: Path, port: int) -> list[str]:
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "prohibit-password",
        "Subsystem": "sftp internal-sftp",
        "MaxStartups": "100",
    }
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-o", f"ListenAddress=127.0.0.1:{port}", *words]


def sshfs(folder: Path, backing: Path, port: int, mount: Path) -> list[str]:
    options = f"IdentityFile={folder / 'user'},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null"
    return ["sshfs", f"root@127.0.0.1:{backing}", str(mount), "-p", str(port), "-o", options]


def glusterfsd(folder: Path, backing: Path, port: int) -> list[str]:
    (folder / "brick.vol").write_text(BRICK.format(backing=backing, port=port))
    files = [
        "-f",
        str(folder / "brick.vol"),
        "-l",
        str(folder / "brick.log"),
        "-p",
        str(folder / "brick.pid"),
    ]
    return ["/usr/sbin/glusterfsd", "-N", *files]


def glusterfs(folder: Path, backing: Path, port: int, mount: Path) -> list[str]:
    (folder / "client.vol").write_text(CLIENT.format(port=port))
    return [
        "glusterfs",
        "-f",
        str(folder / "client.vol"),
        "-l",
        str(folder / f"{mount.name}.log"),
        str(mount),
    ]
