"""`python inside.py MOUNT AT COMMAND...`: run a command that sees MOUNT under the name AT, as on a node of its own. Needs root.

In a mount namespace of its own: several nodes on one machine have one path and each its own client of the filesystem behind it.
"""

from __future__ import annotations

import ctypes
import os
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def must(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    mount, at, *command = sys.argv[1:]
    must(LIBC.unshare(CLONE_NEWNS))
    must(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    must(LIBC.mount(os.fsencode(mount), os.fsencode(at), None, MS_BIND, None))
    os.execvp(command[0], command)
