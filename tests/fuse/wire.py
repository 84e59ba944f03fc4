"""The kernel's FUSE protocol (7.31) as bytes: requests taken apart, replies put together. See linux/fuse.h."""

from __future__ import annotations

import os
import stat
import struct

IN_HEADER = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
ATTR_HEAD = struct.Struct("<Q2I")
OPENED = struct.Struct("<Q2I")
SETATTR = struct.Struct("<2I6Q8I")
INIT_OUT = struct.Struct("<4I2H2I2HI7I")
STATFS = struct.Struct("<5Q10I")
DIRENT = struct.Struct("<2Q2I")

OPCODES = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir",
    30: "fsyncdir", 35: "create", 36: "interrupt", 38: "destroy", 42: "batch_forget", 45: "rename2",
}  # fmt: skip
SILENT = frozenset({"forget", "batch_forget", "interrupt"})  # the kernel wants no reply

BIG_WRITES, ATOMIC_TRUNCATE, AUTO_INVALIDATE, PARALLEL_LOOKUPS = 1 << 5, 1 << 3, 1 << 12, 1 << 18
MAX_WRITE = 128 * 1024
BUFFER = MAX_WRITE + 8192

#: bits of setattr's first field
MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256
NOREPLACE, EXCHANGE = 1, 2  # renameat2


def reply(unique: int, error: int, body: bytes = b"") -> bytes:
    """A whole reply; `error` is an errno or 0."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique) + body


def seconds(value: float) -> tuple[int, int]:
    """A time-out as whole seconds and nanoseconds."""
    return int(value), int((value % 1) * 1e9)


def attributes(st: os.stat_result, inode: int = 0, empty: bool = False, forced_mode: int = 0) -> bytes:
    """`inode`, `forced_mode`: shown instead of its own; `empty`: its data is not to be seen yet."""
    mode = (
        stat.S_IFMT(st.st_mode) | forced_mode if forced_mode and not stat.S_ISLNK(st.st_mode) else st.st_mode
    )
    times = [divmod(ns, 10**9) for ns in (st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns)]
    wide = (inode or st.st_ino, 0 if empty else st.st_size, st.st_blocks, *(s for s, _ in times))
    rest = (mode, st.st_nlink, st.st_uid, st.st_gid, st.st_rdev, 4096, 0)
    return ATTR.pack(*wide, *(ns for _, ns in times), *rest)


def entry(node: int, shown: bytes, entry_s: float, attr_s: float) -> bytes:
    """What a lookup found (its attributes), for how long to believe it; node 0 and b"": nothing, and for how long to believe that."""
    (name_s, name_ns), (attr_whole, attr_ns) = seconds(entry_s), seconds(attr_s)
    head = ENTRY.pack(node, 0, name_s, attr_whole, name_ns, attr_ns)
    return head + shown.ljust(ATTR.size, b"\0")


def attribute_reply(shown: bytes, attr_s: float) -> bytes:
    whole, ns = seconds(attr_s)
    return ATTR_HEAD.pack(whole, ns, 0) + shown


def init_reply(readahead: int) -> bytes:
    flags = BIG_WRITES | ATOMIC_TRUNCATE | AUTO_INVALIDATE | PARALLEL_LOOKUPS
    return INIT_OUT.pack(7, 31, readahead, flags, 12, 9, MAX_WRITE, 1, 0, 0, 0, *[0] * 7)


def statfs_reply(st: os.statvfs_result) -> bytes:
    counts = (st.f_blocks, st.f_bfree, st.f_bavail, st.f_files, st.f_ffree)
    return STATFS.pack(*counts, st.f_bsize, st.f_namemax, st.f_frsize, *[0] * 7)


def dirents(listing: list[tuple[bytes, int, int]], offset: int, size: int) -> bytes:
    """As many entries (name, inode, type) from `offset` on as fit into `size` bytes."""
    out = b""
    for number, (name, inode, kind) in enumerate(listing[offset:], offset + 1):
        record = DIRENT.pack(inode, number, len(name), kind) + name
        record += bytes(-len(record) % 8)
        if len(out) + len(record) > size:
            break
        out += record
    return out
