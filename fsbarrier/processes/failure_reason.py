"""Finds in the log of a failed program the line that says why it failed. Pure.

The last line of a log is often not the cause of a failure: below the cause there may be torchrun's summary, errors of processes that only
noticed the end of another one, and a server's shutdown messages.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

# How many of the last lines of a log are searched, and how much of the found line is kept.
SEARCHED_LINES = 400
MOST_CHARACTERS = 300

# vLLM writes its process, level, time and source location before a line; torch the rank of the process.
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_RANK = re.compile(r"^\[(?:rank|default)(\d+)\]: ?")
TRACEBACK = "Traceback (most recent call last):"
# The last line of a traceback, which may name any class. On other lines, the class name must look like an error's.
_RAISED = re.compile(r"^(?:\w+\.)*[A-Za-z_]\w*(?:: |:?$)")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|error)(?:: \S|$)")
# The prefix of the last message of our own programs (worker_contract.py). A traceback above it was handled.
MESSAGE = "error: "
# The line that argparse writes below the usage.
_USAGE = re.compile(r"^[\w.-]+: error: \S")
# The cause as Python's faulthandler and C++ print it when a process dies.
_FATAL = re.compile(r"^(?:Fatal Python error: \S| *what\(\): +\S)")
# Errors that only refer to another one.
_GENERIC = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|ChildFailedError"
)
# torchrun's summary: the lines about the first failure.
_ROOT_CAUSE = "Root Cause (first observed failure):"
_OF_ROOT = re.compile(r"^ +(rank|traceback) +: (.*)$")
_NO_TRACEBACK = "To enable traceback see"
# Errors of a process whose peer on another node has gone.
_PARTNER_GONE = re.compile(
    r"lost contact with the trainer|connection (?:closed|reset) by peer|connection refused|broken pipe|ncclRemoteError"
    r"|remote process exited|DistNetworkError|DistStoreError|RendezvousConnectionError|timed out waiting",
    re.IGNORECASE,
)


def cause(lines: Sequence[str], *, killed: bool = False) -> str:
    """The line that says why the program failed; "" if there is none.

    `killed`: a signal ended it, so an error in the log was perhaps handled.
    """
    plain = [_PREFIX.sub("", line) for line in lines]
    begin = max((i for i, line in enumerate(plain) if _ROOT_CAUSE in line), default=None)
    if begin is not None:
        return _shown(_of_torchrun(plain[:begin], plain[begin:]))
    errors = [line for line in plain if _FATAL.match(line)] if killed else list(_errors(plain))
    specific = [line for line in errors if not _GENERIC.search(line)]
    return _shown((specific or errors or [""])[-1].strip())


def _shown(line: str) -> str:
    return line.removeprefix(MESSAGE)[:MOST_CHARACTERS]


def how_it_ended(code: int) -> str:
    """Describe an exit code, to follow "the program "."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else ""
    why = "; the kernel sends it when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by signal {-code}{f' ({name}{why})' if name else ''}"


def only_noticed(reason: str) -> bool:
    """Whether a program failed only because its peer on another node was gone. The cause is then on that node."""
    return _PARTNER_GONE.search(reason) is not None


def _of_torchrun(before: Sequence[str], summary: Sequence[str]) -> str:
    """The last line of the failing rank's own traceback, or how it ended."""
    root: dict[str, str] = {}
    for line in summary:
        if match := _OF_ROOT.match(line):
            root.setdefault(match[1], match[2].strip())
    traceback, rank = root.get("traceback", ""), root.get("rank", "").partition(" ")[0]
    fatal = [line for line in before if _FATAL.match(line)]
    if traceback.startswith("Signal "):
        return (fatal or [traceback])[-1].strip()
    if traceback and not traceback.startswith((_NO_TRACEBACK, TRACEBACK)):
        return traceback
    own = [line for line in before if (match := _RANK.match(line)) and match[1] == rank]
    return ([*_errors(before), *_errors(own)] or [""])[-1]


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """The last lines of tracebacks, and other lines that name an error."""
    in_traceback = False
    for line in (_RANK.sub("", line) for line in lines):
        if line.startswith(TRACEBACK):
            in_traceback = True
        elif in_traceback and line.strip() and not line.startswith(" "):
            in_traceback = False
            if _RAISED.match(line):
                yield line.strip()
        elif _ERROR.match(line.strip()) or _USAGE.match(line):
            yield line.strip()
