"""A FUSE filesystem that shows a backing directory as one client of a shared filesystem would see it. Linux, standard library.

The kernel's own caches are what makes it real: it is told to believe names, attributes and absences for as long as asked. On top of
that it can keep listings, lose hard links and exclusive creation, and fail. `python passthrough.py BACKING MOUNTPOINT [flags]` serves
until its standard input is closed, then unmounts. Several mounts of one backing directory are several nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import random
import select
import signal
import stat
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mounting
import wire

ROOT = 1
LIBC = ctypes.CDLL(None, use_errno=True)
AT_EMPTY_PATH, STATX_INO, STATX_BTIME = 0x1000, 0x100, 0x800


@dataclass
class Inode:
    """A file that the kernel knows: held open by a path-only descriptor, so that it stays this file whatever its name does."""

    fd: int
    key: tuple[int, int | str]
    lookups: int = 0


@dataclass
class Fault:
    """Fail a share of one kind of request; `after`: the request is carried out and then reported as failed (a lost reply)."""

    error: int
    share: float
    after: bool


@dataclass
class Client:
    """One mount. All times in seconds; `generator` draws the faults."""

    backing: Path
    entry_s: float = 0.0
    attr_s: float = 0.0
    negative_s: float = 0.0
    listing_s: float = 0.0
    links: bool = True
    exchange: bool = True
    exclusive: bool = True
    #: so long after their creation by another client, directories are neither listed nor found
    dirs_late_s: float = 0.0
    #: so long after another client wrote to it, a file looks empty
    data_late_s: float = 0.0
    #: every name has an inode number of its own, so that two hard links to one file look like two files (libfuse's default)
    path_inodes: bool = False
    #: the mode that everything shows, whatever is asked for; 0: its own
    forced_mode: int = 0
    #: while this file exists, every request fails with EIO
    dead_while: Path | None = None
    #: how many bytes of files may be read or written in a second; 0: as many as possible
    rate: float = 0.0
    #: the bytes that were read and written
    moved: list[int] = field(default_factory=lambda: [0, 0])
    faults: dict[str, Fault] = field(default_factory=dict)
    generator: random.Random = field(default_factory=lambda: random.Random(0))
    inodes: dict[int, Inode] = field(default_factory=dict)
    numbers: dict[tuple[int, int | str], int] = field(default_factory=dict)
    listings: dict[int, tuple[float, list[tuple[bytes, int, int]]]] = field(default_factory=dict)
    opened: dict[int, list[tuple[bytes, int, int]]] = field(default_factory=dict)
    absent: dict[tuple[int, str], float] = field(default_factory=dict)
    #: the files and directories that this client made or wrote, as `born` names them
    own: set[tuple[int, int]] = field(default_factory=set)
    next_number: int = ROOT

    def __post_init__(self) -> None:
        self._remember(os.open(self.backing, os.O_PATH | os.O_DIRECTORY))

    def answer(self, request: bytes) -> bytes | None:
        """The reply to one request; None where the kernel wants none."""
        _, opcode, unique, node, *_ = wire.IN_HEADER.unpack_from(request)
        body, name = request[wire.IN_HEADER.size :], wire.OPCODES.get(opcode, "")
        if name not in wire.SILENT and self.dead_while is not None and self.dead_while.exists():
            return wire.reply(unique, errno.EIO)
        handler = getattr(self, f"do_{name}", None)
        if name in wire.SILENT:
            if handler is not None:
                handler(node, body)
            return None
        if handler is None:
            return wire.reply(unique, errno.ENOSYS)
        fault = self.faults.get(name)
        hit = fault is not None and node != ROOT and self.generator.random() < fault.share
        if hit and fault is not None and not fault.after:
            return wire.reply(unique, fault.error)
        try:
            answer = handler(node, body)
        except OSError as error:
            return wire.reply(unique, error.errno or errno.EIO)
        return wire.reply(unique, fault.error) if hit and fault is not None else wire.reply(unique, 0, answer)

    # --- names --------------------------------------------------------------------------------------------------------

    def do_init(self, node: int, body: bytes) -> bytes:
        return wire.init_reply(struct.unpack_from("<I", body, 8)[0])

    def do_lookup(self, node: int, body: bytes) -> bytes:
        name = text(body)
        try:
            if not self.exclusive and time.monotonic() < self.absent.get((node, name), 0.0):
                raise FileNotFoundError(errno.ENOENT, "remembered by the client", name)
            return self._entry(node, name)
        except FileNotFoundError:
            self.absent.setdefault((node, name), time.monotonic() + self.negative_s)
            if self.negative_s <= 0:
                raise
            return wire.entry(0, b"", self.negative_s, 0)

    def do_forget(self, node: int, body: bytes) -> None:
        self._forget(node, struct.unpack_from("<Q", body)[0])

    def do_batch_forget(self, node: int, body: bytes) -> None:
        count = struct.unpack_from("<I", body)[0]
        for number in range(count):
            self._forget(*struct.unpack_from("<2Q", body, 8 + 16 * number))

    def do_mkdir(self, node: int, body: bytes) -> bytes:
        mode, name = struct.unpack_from("<I", body)[0], text(body[8:])
        self.absent.pop((node, name), None)
        os.mkdir(name, mode, dir_fd=self._fd(node))
        self._made(node, name)
        return self._entry(node, name)

    def do_mknod(self, node: int, body: bytes) -> bytes:
        mode, name = struct.unpack_from("<I", body)[0], text(body[16:])
        os.mknod(name, mode, dir_fd=self._fd(node))
        self.listings.pop(node, None)
        return self._entry(node, name)

    def do_symlink(self, node: int, body: bytes) -> bytes:
        name, target = (os.fsdecode(part) for part in body.split(b"\0")[:2])
        os.symlink(target, name, dir_fd=self._fd(node))
        self._made(node, name)
        return self._entry(node, name)

    def do_readlink(self, node: int, body: bytes) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._fd(node)))

    def do_unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(text(body), dir_fd=self._fd(node))
        self.listings.pop(node, None)
        return b""

    def do_rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(text(body), dir_fd=self._fd(node))
        self.listings.pop(node, None)
        return b""

    def do_rename(self, node: int, body: bytes, header: int = 8, flags: int = 0) -> bytes:
        target = struct.unpack_from("<Q", body)[0]
        old, new = (part for part in body[header:].split(b"\0")[:2])
        if flags & wire.EXCHANGE and not self.exchange:
            raise OSError(errno.EINVAL, "no exchange here")
        if LIBC.renameat2(self._fd(node), old, self._fd(target), new, flags):
            raise OSError(ctypes.get_errno(), "rename")
        self.listings.pop(node, None)
        self.listings.pop(target, None)
        self.absent.pop((target, os.fsdecode(new)), None)
        if self.path_inodes and (number := self.numbers.pop((node, os.fsdecode(old)), None)) is not None:
            self.numbers[target, os.fsdecode(new)] = number
            self.inodes[number].key = target, os.fsdecode(new)
        return b""

    def do_rename2(self, node: int, body: bytes) -> bytes:
        return self.do_rename(node, body, header=16, flags=struct.unpack_from("<I", body, 8)[0])

    def do_link(self, node: int, body: bytes) -> bytes:
        if not self.links:
            raise OSError(errno.EOPNOTSUPP, "no hard links here")
        source, name = self._proc(struct.unpack_from("<Q", body)[0]), text(body[8:])
        target = self._fd(node)
        if self.exclusive:
            os.link(source, name, dst_dir_fd=target)
        else:  # like an upload: what another client put there is replaced
            between = f".link-{os.getpid()}-{time.monotonic_ns()}"
            os.link(source, between, dst_dir_fd=target)
            os.rename(between, name, src_dir_fd=target, dst_dir_fd=target)
        self.listings.pop(node, None)
        return self._entry(node, name)

    # --- files --------------------------------------------------------------------------------------------------------

    def do_getattr(self, node: int, body: bytes) -> bytes:
        return wire.attribute_reply(self._attributes(node), self.attr_s)

    def do_setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = (
            wire.SETATTR.unpack_from(body)
        )
        path = self._proc(node)
        if valid & wire.MODE and not self.forced_mode:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & (wire.UID | wire.GID):
            os.chown(path, uid if valid & wire.UID else -1, gid if valid & wire.GID else -1)
        if valid & wire.SIZE:
            os.truncate(path, size)
        if valid & (wire.ATIME | wire.MTIME):
            now = time.time_ns()
            before = os.fstat(self._fd(node))
            new = (
                now
                if valid & wire.ATIME_NOW
                else atime * 10**9 + atime_ns
                if valid & wire.ATIME
                else before.st_atime_ns,
                now
                if valid & wire.MTIME_NOW
                else mtime * 10**9 + mtime_ns
                if valid & wire.MTIME
                else before.st_mtime_ns,
            )
            os.utime(path, ns=new)
        return self.do_getattr(node, body)

    def do_create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<2I", body)
        name = text(body[16:])
        if not self.exclusive:
            flags &= ~os.O_EXCL
        fd = os.open(name, flags | os.O_CREAT | os.O_CLOEXEC, mode, dir_fd=self._fd(node))
        self._made(node, name)
        return self._entry(node, name) + wire.OPENED.pack(fd, 0, 0)

    def do_open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL)
        return wire.OPENED.pack(os.open(self._proc(node), flags | os.O_CLOEXEC), 0, 0)

    def do_read(self, node: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", body)
        data = b"" if self._is_late(fd) else os.pread(fd, size, offset)
        self._move(0, len(data))
        return data

    def do_write(self, node: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", body)
        self._move(1, size)
        return struct.pack("<2I", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def _move(self, way: int, size: int) -> None:
        """Note what is moved, and take as long for it as a slow network. Requests are answered one after the other."""
        self.moved[way] += size
        if self.rate:
            time.sleep(size / self.rate)

    def do_fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def do_release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def do_statfs(self, node: int, body: bytes) -> bytes:
        return wire.statfs_reply(os.statvfs(self.backing))

    # --- directories --------------------------------------------------------------------------------------------------

    def do_opendir(self, node: int, body: bytes) -> bytes:
        when, listing = self.listings.get(node, (0.0, []))
        if not listing or time.monotonic() - when >= self.listing_s:
            when, listing = time.monotonic(), self._list(node)
            if self.listing_s > 0:
                self.listings[node] = when, listing
        fd = os.open(self._proc(node), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.opened[fd] = listing
        return wire.OPENED.pack(fd, 0, 0)

    def do_readdir(self, node: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", body)
        return wire.dirents(self.opened[fd], offset, size)

    def do_releasedir(self, node: int, body: bytes) -> bytes:
        self.opened.pop(struct.unpack_from("<Q", body)[0], None)
        return self.do_release(node, body)

    do_fsyncdir = do_fsync

    def _list(self, node: int) -> list[tuple[bytes, int, int]]:
        found = [(b".", node, stat.S_IFDIR >> 12), (b"..", node, stat.S_IFDIR >> 12)]
        with os.scandir(self._proc(node)) as entries:
            for item in entries:
                if self.dirs_late_s and item.is_dir(follow_symlinks=False) and self._is_late_path(item.path):
                    continue
                kind = stat.S_IFDIR if item.is_dir(follow_symlinks=False) else stat.S_IFREG
                kind = stat.S_IFLNK if item.is_symlink() else kind
                found.append((os.fsencode(item.name), item.inode(), kind >> 12))
        return found

    # --- inodes -------------------------------------------------------------------------------------------------------

    def _entry(self, parent: int, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd(parent))
        if stat.S_ISDIR(os.fstat(fd).st_mode) and self._is_late(fd):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "not to be seen yet", name)
        self.absent.pop((parent, name), None)
        number = self._remember(fd, (parent, name))
        return wire.entry(number, self._attributes(number), self.entry_s, self.attr_s)

    def _attributes(self, number: int) -> bytes:
        fd = self._fd(number)
        st = os.fstat(fd)
        hidden = stat.S_ISREG(st.st_mode) and self._is_late(fd)
        return wire.attributes(st, number if self.path_inodes else 0, hidden, self.forced_mode)

    def _made(self, parent: int, name: str) -> None:
        """This client made something: it sees that at once, and lists the directory anew."""
        self.listings.pop(parent, None)
        if self.dirs_late_s or self.data_late_s:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd(parent))
            self.own.add(born(fd))
            os.close(fd)

    def _is_late(self, fd: int) -> bool:
        """Whether another client made this directory, or wrote this file, too short a time ago for this one to see it."""
        if not self.dirs_late_s and not self.data_late_s:
            return False
        st, (inode, since) = os.fstat(fd), born(fd)
        if stat.S_ISDIR(st.st_mode):
            late = time.time_ns() - since < self.dirs_late_s * 1e9
        else:
            late = time.time_ns() - st.st_mtime_ns < self.data_late_s * 1e9
        return late and (inode, since) not in self.own

    def _is_late_path(self, path: str) -> bool:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return self._is_late(fd)
        finally:
            os.close(fd)

    def _remember(self, fd: int, path: tuple[int, str] = (0, "")) -> int:
        st = os.fstat(fd)
        key = path if self.path_inodes else (st.st_dev, st.st_ino)
        number = self.numbers.get(key)
        if number is not None and self.path_inodes and born(self.inodes[number].fd) != born(fd):
            # The name was given to another file; the kernel still knows the old one by its number.
            self.inodes[number].key, number = (0, f"replaced {number}"), None
        if number is None:
            number, self.next_number = self.next_number, self.next_number + 1
            self.numbers[key], self.inodes[number] = number, Inode(fd, key)
        else:
            os.close(fd)
        self.inodes[number].lookups += 1
        return number

    def _forget(self, number: int, count: int) -> None:
        inode = self.inodes.get(number)
        if inode is None or number == ROOT:
            return
        inode.lookups -= count
        if inode.lookups <= 0:
            os.close(inode.fd)
            del self.inodes[number]
            self.numbers.pop(inode.key, None)
            self.listings.pop(number, None)

    def _fd(self, number: int) -> int:
        inode = self.inodes.get(number)
        if inode is None:
            raise OSError(errno.ESTALE, "forgotten")
        return inode.fd

    def _proc(self, number: int) -> str:
        return f"/proc/self/fd/{self._fd(number)}"


def born(fd: int) -> tuple[int, int]:
    """What tells a file from every other, also from a later one with the same number: its number, and when it was made (ns)."""
    found = ctypes.create_string_buffer(256)
    if LIBC.statx(fd, b"", AT_EMPTY_PATH, STATX_BTIME | STATX_INO, found):
        raise OSError(ctypes.get_errno(), "statx")
    (inode,), (seconds, nanoseconds) = (
        struct.unpack_from("<Q", found, 32),
        struct.unpack_from("<qI", found, 80),
    )
    return inode, seconds * 10**9 + nanoseconds


def text(body: bytes) -> str:
    return os.fsdecode(body.partition(b"\0")[0])


def serve(device: int, client: Client) -> None:
    """Answer until unmounted. SIGUSR1 makes the mount hang, and a second one lets it go on.

    A hanging server has read no request that it does not answer, and "flush" is unknown here: for the answers to such a request, and to
    the flush of a file that was open, the kernel waits even when the process that asked is ending.
    """
    answering = threading.Event()
    answering.set()
    signal.signal(signal.SIGUSR1, lambda *_: answering.clear() if answering.is_set() else answering.set())
    while True:
        try:
            select.select([device], [], [])
            answering.wait()
            request = os.read(device, wire.BUFFER)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                continue
            return  # ENODEV: unmounted
        answer = client.answer(request)
        if answer is not None:
            with contextlib.suppress(OSError):  # the asker was killed meanwhile
                os.write(device, answer)


def unmount_when_alone(mountpoint: Path) -> None:
    """Whoever started this process holds its standard input: when that ends, so does the mount, and with it the loop."""
    while os.read(0, 1024):
        pass
    mounting.unmount(mountpoint)
    os._exit(0)  # the loop hangs in its read until the last user of the mount has gone


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backing", type=Path)
    parser.add_argument("mountpoint", type=Path)
    for name in ("entry", "attr", "negative", "listing"):
        parser.add_argument(f"--{name}-s", type=float, default=0.0, help=f"how long a {name} is believed")
    parser.add_argument("--no-links", action="store_true", help="hard links fail with EOPNOTSUPP")
    parser.add_argument("--no-exchange", action="store_true", help="RENAME_EXCHANGE fails with EINVAL")
    parser.add_argument(
        "--two-winners", action="store_true", help="creation is an upload, exclusive for nobody"
    )
    parser.add_argument(
        "--fault", action="append", default=[], help="request:errno:share[:after], e.g. create:EIO:0.01"
    )
    parser.add_argument("--dirs-late-s", type=float, default=0.0, help="how late others' directories appear")
    parser.add_argument("--data-late-s", type=float, default=0.0, help="how long others' files look empty")
    parser.add_argument("--path-inodes", action="store_true", help="each name has an inode number of its own")
    parser.add_argument("--dead-while", type=Path, help="all requests fail with EIO while this file is there")
    parser.add_argument("--kind", default=mounting.KIND, help="the type that the mount shows: fuse.KIND")
    parser.add_argument(
        "--forced-mode", default="0", help="everything shows this mode (octal), and a chmod does nothing"
    )
    parser.add_argument(
        "--mb-per-s",
        type=float,
        default=0.0,
        help="how fast files are read and written; 0: as fast as possible",
    )
    parser.add_argument("--count", type=Path, help="at the end, the bytes read and written are in this file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    faults = {}
    for spec in args.fault:
        request, name, share, *when = spec.split(":")
        faults[request] = Fault(getattr(errno, name), float(share), when == ["after"])
    client = Client(
        args.backing,
        args.entry_s,
        args.attr_s,
        args.negative_s,
        args.listing_s,
        links=not args.no_links,
        exchange=not args.no_exchange,
        exclusive=not args.two_winners,
        dirs_late_s=args.dirs_late_s,
        data_late_s=args.data_late_s,
        path_inodes=args.path_inodes,
        forced_mode=int(args.forced_mode, 8),
        dead_while=args.dead_while,
        rate=args.mb_per_s * 1e6,
        faults=faults,
        generator=random.Random(args.seed),
    )
    device = mounting.mount(args.mountpoint, args.kind)
    threading.Thread(target=unmount_when_alone, args=(args.mountpoint,), daemon=True).start()
    print("mounted", flush=True)
    serve(device, client)
    if args.count is not None:
        args.count.write_text(" ".join(map(str, client.moved)))


if __name__ == "__main__":
    main(sys.argv[1:])
