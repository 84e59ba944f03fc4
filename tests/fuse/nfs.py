"""NFS with the kernel's own server and clients: a server and several hosts in network namespaces of their own, one mount for each host.

Needs root, the kernel's modules and Debian's nfs-kernel-server. A host in a network namespace is a client of its own to the server, with
its own caches; nothing of the machine's own NFS is touched, and nothing listens outside these namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fuse import mounting

READY_S = 60.0
MODULES = ("nfsd", "nfsv4", "veth", "bridge")
SUBNET = "10.213.0"
#: the server keeps its state in file systems of its own, and lives until its standard input ends
SERVER = """
set -e
mount --make-rprivate /
for folder in /run /var/lib/nfs; do mount -t tmpfs none $folder; done
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /run/rpcbind /run/sendsigs.omit.d
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
mount -t nfsd none /proc/fs/nfsd
ip link set lo up
ip link add name hosts type bridge
ip address add {subnet}.1/24 dev hosts
ip link set hosts up
rpcbind
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
exportfs -o rw,sync,insecure,no_root_squash,no_subtree_check,fsid=0 '{subnet}.0/24:{backing}'
rpc.nfsd 8
rpc.mountd --port 20048
echo ready
cat > /dev/null
rpc.nfsd 0
"""


def missing() -> str | None:
    """Why NFS cannot be used here; None where it can."""
    if os.geteuid() != 0:
        return "NFS mounts need root"
    absent = [
        name for name in ("ip", "nsenter", "rpc.nfsd", "exportfs", "mount.nfs") if not shutil.which(name)
    ]
    if absent:
        return f"{', '.join(absent)}: not installed (Debian: nfs-kernel-server, iproute2)"
    for module in MODULES:
        found = (
            shutil.which("modprobe")
            and subprocess.run(("modprobe", "--dry-run", "--quiet", module)).returncode == 0
        )
        if not found:
            return f"this kernel has no module {module}"
    return None


@contextlib.contextmanager
def nodes(folder: Path, count: int, options: str) -> Iterator[list[Path]]:
    """`count` NFS mounts of one directory, `folder`/shared, each by a host of its own, with mount `options`. Nothing is left afterwards."""
    backing = folder / "shared"
    backing.mkdir()
    _run("modprobe", "--all", *MODULES)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            _host(SERVER.format(subnet=SUBNET, backing=backing), folder / "server.log")
        )
        mounts = []
        for number in range(count):
            host = stack.enter_context(_host("echo ready; cat > /dev/null", folder / f"host-{number}.log"))
            _connect(server, host, number)
            mount = folder / f"mount-{number}"
            mount.mkdir()
            _mount(host, mount, options, backing)
            stack.callback(mounting.unmount, mount)
            mounts.append(mount)
        yield mounts


def _host(script: str, log: Path) -> contextlib.AbstractContextManager[int]:
    """A process in network and mount namespaces of its own; gives its number once it says that it is ready."""
    return mounting.serving(("unshare", "--net", "--mount", "sh", "-c", script), "ready", log)


def _connect(server: int, host: int, number: int) -> None:
    """A cable from a host to the server's bridge."""
    ends = ("type", "veth", "peer", "name", "eth0", "netns", str(host))
    _run("ip", "link", "add", "name", f"host{number}", "netns", str(server), *ends)
    at_server, at_host = (("nsenter", f"--target={pid}", "--net", "ip") for pid in (server, host))
    _run(*at_server, "link", "set", f"host{number}", "master", "hosts", "up")
    _run(*at_host, "address", "add", f"{SUBNET}.{10 + number}/24", "dev", "eth0")
    _run(*at_host, "link", "set", "eth0", "up")


def _mount(host: int, mount: Path, options: str, backing: Path) -> None:
    source = f"{SUBNET}.1:/" if "vers=3" not in options else f"{SUBNET}.1:{backing}"
    words = ("nsenter", f"--target={host}", "--net", "mount", "-t", "nfs", "-o", options, source, str(mount))
    end, pause = time.monotonic() + READY_S, threading.Event()
    while True:  # the bridge takes a moment to pass packets on
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if time.monotonic() > end:
            raise OSError(f"{' '.join(words)}: {done.stderr}")
        pause.wait(0.5)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr}")
