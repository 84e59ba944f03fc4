"""A process beside a daemon that, when the daemon is killed, renames its heartbeat, so that the others learn of the death at once.

    python -I -S fsbarrier/processes/epitaph.py < a pipe from the daemon          (`Epitaph` starts it)

The kernel closes the pipe when the daemon has ended, also by SIGKILL, and not while it is stopped or hangs in a call. Before each heartbeat
the daemon writes a line: the heartbeat's name, and its name if the daemon should die now. Nobody waits for this process, so a mount that
hangs holds up nothing.
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


class Epitaph:
    """The daemon's side. Without the process, the others learn of a death by its silence."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # A Ctrl-C in the terminal is the daemon's.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def note(self, name: Path, if_killed: Path) -> None:
        """Called before the heartbeat `name` is written."""
        # ValueError: this daemon ends.
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(b"%b\0%b\n" % (os.fsencode(name), os.fsencode(if_killed)))

    def close(self) -> None:
        """The daemon has said itself how it ended."""
        self._process.kill()
        self._process.communicate()


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A guard above the daemon asks all that a killed daemon left to end, and gives it a moment.
        signal.signal(number, signal.SIG_IGN)
    lines: list[bytes] = []
    while data := os.read(0, 1 << 16):
        lines = [*lines, *data.splitlines()][-2:]
    # The last heartbeat may not have been written any more, and then the one before is there.
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
