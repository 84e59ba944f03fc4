"""The command `fsbarrier`: finds the command's module, parses, calls it, and turns every error into a line and an exit code.

A command is a module in fsbarrier/commands with SUMMARY, EXAMPLE, add_arguments(parser) and main(args) -> exit code. Only the one that
is asked for is imported; the summaries of the others stand here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import fsbarrier
from fsbarrier.errors import EXIT_INTERNAL, EXIT_SIGINT, FsbarrierError, UsageError
from fsbarrier.settings.sources import nearest

#: Name -> what it is for, in the order in which a person meets them.
COMMANDS = {
    "run": "run this node (./run.sh is the same, and makes its environment first)",
    "launch": "start several nodes on this machine, with one live view",
    "status": "where a run is, and how each node is doing",
    "top": "the same, live",
    "logs": "the nodes' logs, last lines or as they come",
    "stop": "end a run on all its nodes, from any machine that sees it",
    "recover": "after a disaster: what each rank left, and the way on",
    "aggregate": "merge what the ranks saved, by hand",
    "export": "copy a policy out of a run as a Hugging Face folder, or its trajectories as a table",
    "report": "a run's figures as a file to read and to send",
    "doctor": "whether this filesystem and these nodes can carry a run",
    "bench": "how fast barriers are here, beside a bare directory scan",
    "simulate": "the protocol under faults: many seeds, virtual time",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; gives the exit code (design section 2). Never raises, save for a second Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    args: argparse.Namespace | None = None
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview(), end="", file=sys.stdout if words else sys.stderr)
            return 0 if words else UsageError.exit_code
        if words[0] == "--version":
            print(f"fsbarrier {fsbarrier.__version__}")
            return 0
        module = command_module(words[0])
        args = parse(module, words[0], words[1:])
        code: int = module.main(args)
        sys.stdout.flush()
        return code
    except FsbarrierError as error:
        print(shown(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        where = save_traceback(args)
        what = one_line(f"{type(error).__name__}: {error}")
        print(f"fsbarrier: internal error: {what} (traceback: {where})", file=sys.stderr)
        return EXIT_INTERNAL


def shown(error: FsbarrierError) -> str:
    """An error as people see it. A mistake of the user's is one line; a failed program's may end with its last log lines."""
    lines = [str(error)] if isinstance(error, UsageError) else str(error).splitlines()
    return "\n".join(
        ["fsbarrier: error: " + one_line(lines[0] if lines else "")] + [one_line(line) for line in lines[1:]]
    )


def one_line(message: str) -> str:
    """A message without line breaks or control characters, as it may hold what a user or a file said."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", message).strip()


def overview() -> str:
    """What `fsbarrier --help` shows; imports no command."""
    lines = [
        "usage: fsbarrier COMMAND [flags]",
        "",
        "Synchronous multi-node RL post-training: one command per node and a shared directory.",
        "",
        *(f"  {name:<10} {summary}" for name, summary in COMMANDS.items()),
        "",
        "example: fsbarrier run --demo",
        "`fsbarrier COMMAND --help` explains a command; docs/settings.md lists every setting.",
    ]
    return "\n".join(lines) + "\n"


def command_module(name: str) -> Any:
    """The module of a command. Raises UsageError for an unknown one."""
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UsageError(f"no command {name!r}{hint}")
    if importlib.util.find_spec(f"fsbarrier.commands.{name}") is None:
        raise UsageError(f"{name}: not part of this version ({fsbarrier.__version__})")
    return importlib.import_module(f"fsbarrier.commands.{name}")


def parse(module: Any, name: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command. Raises UsageError."""
    parser = Parser(
        prog=f"fsbarrier {name}",
        description=module.SUMMARY,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a shortened flag could mean another one in the next version
    )
    module.add_arguments(parser)
    return parser.parse(words)


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes as one line that knows the nearest flag."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Flags and plain words in any order. Raises UsageError."""
        args, rest = self.parse_known_intermixed_args(self._joined(words))
        if rest:
            flag = rest[0].partition("=")[0]
            hint = nearest(flag, self._option_string_actions) if flag.startswith("-") else ""
            raise UsageError(f"unknown {'flag' if flag.startswith('-') else 'argument'} {flag}{hint}")
        return args

    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument (-[^:/]*?)(/[^:]*)?: ", r"\1: ", message))

    def _joined(self, words: Sequence[str]) -> list[str]:
        """`--flag -1,2` as `--flag=-1,2`: argparse takes the value for a flag, and its message would be beside the point."""
        joined: list[str] = []
        for word in words:
            before = joined[-1] if joined else ""
            action = self._option_string_actions.get(before)
            if action is not None and action.nargs != 0 and re.match(r"-[\d.,]", word):
                joined[-1] = f"{before}={word}"
            else:
                joined.append(word)
        return joined


def save_traceback(args: argparse.Namespace | None) -> Path | str:
    """Put the current traceback into the run's logs where there is a run, else into a temporary file."""
    text = traceback.format_exc()
    folders = [Path(tempfile.gettempdir())]
    if args is not None and hasattr(args, "log_path"):
        from fsbarrier.commands.flags import find_log_path
        from fsbarrier.rundir.paths import RunPaths

        folders.insert(0, RunPaths(find_log_path(args)).logs)
    for folder in folders:
        with contextlib.suppress(OSError):  # no such run, or not writable: the next one
            fd, name = tempfile.mkstemp(prefix="fsbarrier-error-", suffix=".txt", dir=folder)
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                stream.write(text)
            return name
    return "could not be saved"
