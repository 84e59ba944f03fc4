"""Makes a Ctrl-C end the command without a traceback while it is still importing its modules.

This is imported before all other modules. A program that only imports the command keeps its own handler.
"""

from __future__ import annotations

import signal
import sys

_IS_COMMAND = sys.argv[0].rpartition("/")[2] in ("fsbarrier", "__main__.py", "-m")
_QUIET = _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _QUIET:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def imported() -> None:
    """Restore Python's handler, because the command handles a Ctrl-C from here on."""
    if _QUIET:
        signal.signal(signal.SIGINT, signal.default_int_handler)
