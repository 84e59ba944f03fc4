"""A helper process that announces the death of a killed daemon at once, by renaming its last heartbeat.

    python -I -S fsbarrier/processes/death_notice.py < a pipe from the daemon          (`DeathNotice` starts it)

The kernel closes the pipe when the daemon has ended, also by SIGKILL, but not while the daemon is stopped or hangs in a call. Before each
heartbeat the daemon writes a line: the heartbeat's name, and the name it gets if the daemon dies now. The daemon never waits for this
process, so a hanging mount does not block it.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    import contextlib
    import subprocess
    import sys
    from pathlib import Path


class DeathNotice:
    """The daemon's side. If the helper is missing, the others detect a death by missing heartbeats."""

    def __init__(self) -> None:
        """Start the helper. Raises OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # A Ctrl-C in the terminal must reach only the daemon.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def note(self, name: Path, if_killed: Path) -> None:
        """Called before the heartbeat `name` is written."""
        # ValueError: the pipe is closed, because this daemon is ending.
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(b"%b\0%b\n" % (os.fsencode(name), os.fsencode(if_killed)))

    def close(self) -> None:
        """Stop the helper, because the daemon has reported its own end."""
        self._process.kill()
        self._process.communicate()


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A guard above the daemon sends SIGTERM to the processes that a killed daemon left. This one must finish its work first.
        signal.signal(number, signal.SIG_IGN)
    lines: list[bytes] = []
    while data := os.read(0, 1 << 16):
        lines = [*lines, *data.splitlines()][-2:]
    # If the daemon died before it wrote the last heartbeat, the one before it is there.
    for line in reversed(lines):
        name, _, new = line.partition(b"\0")
        try:
            os.rename(name, new)
            break
        except OSError:
            continue
    return 0


if __name__ == "__main__":
    os._exit(main())
