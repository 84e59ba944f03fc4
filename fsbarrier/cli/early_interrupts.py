"""A Ctrl-C while the command is still importing its modules ends it without a traceback.

Imported before all else. A program that only imports the command keeps its own handler.
"""

from __future__ import annotations

import signal
import sys

_IS_COMMAND = sys.argv[0].rpartition("/")[2] in ("fsbarrier", "__main__.py", "-m")
_QUIET = _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _QUIET:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def imported() -> None:
    """From here on the command handles it."""
    if _QUIET:
        signal.signal(signal.SIGINT, signal.default_int_handler)
