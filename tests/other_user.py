"""Another user of this machine, for tests of what such a one can do. Only root may become one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

#: a number that is nobody's on the systems that the suite runs on
UID = 64123

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user of the machine")

#: This environment may lie in a folder that the other user cannot enter.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


def start_as_other(code: str, *words: str | Path) -> subprocess.Popen[str]:
    """Start Python code (standard library only) as the other user."""
    command = [PYTHON, "-I", "-c", code, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        user=UID,
        group=UID,
        extra_groups=[],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd="/",
    )


@dataclass(frozen=True)
class Opened:
    """What processes have open that others might reach: addresses they listen on, Unix sockets, and files."""

    addresses: set[tuple[str, int]]
    abstract: set[str]
    files: set[str]

    def __or__(self, other: Opened) -> Opened:
        return Opened(
            self.addresses | other.addresses, self.abstract | other.abstract, self.files | other.files
        )


NOTHING_OPENED = Opened(set(), set(), set())
LISTENS = "0A"
WRITABLE = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")
# What is installed is for everybody, and may lie in a temporary folder too.
INSTALLED = (f"{Path(__file__).resolve().parent.parent}/", f"{Path(sys.prefix).resolve()}/", f"{sys.prefix}/")


def opened_by(pids: Iterable[int]) -> Opened:
    """Read as root. A Unix socket with a name in a folder is among the files that lie there; here are those that lie nowhere."""
    sockets, files = set(), set()
    for pid in pids:
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:["):
                        sockets.add(target[8:-1])
                    elif _left_by_a_run(target):
                        files.add(target.removesuffix(" (deleted)"))
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6 and _left_by_a_run(words[5]):
                    files.add(words[5].removesuffix(" (deleted)"))
    addresses = set()
    for family, size in (("tcp", 8), ("tcp6", 32), ("udp", 8), ("udp6", 32)):
        for words in _table(family):
            host, port = words[1].split(":")
            if words[9] in sockets and (words[3] == LISTENS or family.startswith("udp")):
                addresses.add((_address(host, size), int(port, 16)))
    abstract = {
        words[7] for words in _table("unix") if words[6] in sockets and words[7:] and words[7][0] == "@"
    }
    return Opened(addresses, abstract, files)


def _left_by_a_run(path: str) -> bool:
    return path.startswith(WRITABLE) and not path.startswith(INSTALLED)


def _table(name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def _address(text: str, size: int) -> str:
    """As the kernel's tables have it: words of four bytes in this machine's order."""
    packed = b"".join(
        int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, size, 8)
    )
    return socket.inet_ntop(socket.AF_INET if size == 8 else socket.AF_INET6, packed)


#: As another user, from JSON on stdin: every way in that the other may try, and what was got by each.
ATTACK = r"""
import ctypes, json, os, select, socket, stat, sys, time
asked = json.load(sys.stdin)
got, tried, answers = [], 0, {}
secrets = ("environ", "mem", "maps", "fd", "fdinfo", "cwd", "root", "exe", "io", "auxv", "stack", "syscall", "map_files", "task")
libc = ctypes.CDLL(None, use_errno=True)
for pid in asked["pids"]:
    for name in secrets:
        path = f"/proc/{pid}/{name}"
        tried += 1
        try:
            if name in ("cwd", "root", "exe"):
                os.readlink(path)
            elif name == "task":
                # The list of threads is for everybody; what they have open is not.
                if not open(f"{path}/{pid}/environ", "rb").read(1):
                    continue
            elif name in ("fd", "fdinfo", "map_files"):
                if not os.listdir(path):
                    continue
            else:
                # Of a process that ends, they are empty.
                if not open(path, "rb").read(1):
                    continue
        except OSError:
            continue
        got.append(path)
    for signal in (0, 10):
        try:
            os.kill(pid, signal)
            got.append(f"signal {signal} to {pid}")
        except OSError:
            pass
    if libc.ptrace(16, pid, 0, 0) == 0:
        got.append(f"trace of {pid}")
    try:
        line = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        continue
    got += [f"command line of {pid}" for secret in asked["secrets"] if secret.encode() in line]
def walk(top):
    yield top
    for folder, _, names in os.walk(top):
        yield from (os.path.join(folder, name) for name in names)
for path in [*asked["files"], *(one for top in asked["folders"] for one in walk(top))]:
    tried += 1
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(path)
        elif stat.S_ISREG(mode):
            open(path, "rb").close()
        elif stat.S_ISDIR(mode) and path not in asked["folders"]:
            os.listdir(path)
        else:
            continue
    except OSError:
        pass
    else:
        got.append(path)
for name in asked["abstract"]:
    tried += 1
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            with socket.socket(socket.AF_UNIX, kind) as one:
                one.connect("\0" + name[1:])
                got.append(name)
        except OSError:
            pass
requests = [b"\xff" * 64 + b"\n", b"x" * 100000]
for line in ("GET /", "GET /v1/models", "GET /docs", "POST /episode/0/v1/chat/completions", "POST /collective_rpc"):
    requests.append(f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
opened = []
for host, port in asked["addresses"]:
    said = answers.setdefault(f"{host} {port}", [])
    for request in requests:
        tried += 1
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        one.settimeout(10)
        try:
            one.connect((host, port))
            opened.append((one, said))
            one.sendall(request)
        except OSError as error:
            said.append(type(error).__name__)
# One wait for all: most of what listens says nothing to strangers.
waiting, deadline = {one: said for one, said in opened}, time.monotonic() + 2
while waiting and (left := deadline - time.monotonic()) > 0:
    for one in select.select(list(waiting), [], [], left)[0]:
        try:
            data = one.recv(1 << 16).decode("latin-1")
        except OSError as error:
            data = type(error).__name__
        waiting.pop(one).append(data)
print(json.dumps([tried, got, answers]))
"""


def attacked(
    pids: Iterable[int],
    opened: Opened,
    *,
    folders: Iterable[Path],
    secrets: Iterable[str] = (),
) -> tuple[list[str], dict[str, list[str]]]:
    """What another user got of these processes and of what they opened, and what each address answered to several requests.

    What lies in `folders` is tried by the names that root sees there, since names can be known or guessed.
    """
    seen = [str(path) for top in folders for path in (top, *top.rglob("*")) if not path.is_symlink()]
    asked = {
        "pids": list(pids),
        "files": sorted({*opened.files, *seen} - {str(top) for top in folders}),
        "folders": [str(top) for top in folders],
        "abstract": sorted(opened.abstract),
        "addresses": sorted(opened.addresses),
        "secrets": list(secrets),
    }
    other = start_as_other(ATTACK)
    said, failed = other.communicate(json.dumps(asked))
    assert other.returncode == 0, failed
    tried, got, answers = json.loads(said)
    assert tried > len(asked["pids"])
    return got, answers
