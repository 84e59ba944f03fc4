"""One command line: parses it, calls the command, and turns every error into a line and an exit code.

A command is a module with SUMMARY, EXAMPLE, add_arguments(parser) and main(args) -> exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsbarrier.errors import EXIT_INTERNAL, EXIT_SIGINT, FsbarrierError, UsageError
from fsbarrier.settings.sources import nearest


def run(name: str, words: Sequence[str], find_module: Callable[[str], Any]) -> int:
    """Run the command `name`; gives the exit code (design section 2). Never raises, save for a second Ctrl-C."""
    args: argparse.Namespace | None = None
    try:
        module = find_module(name)
        args = parse(module, name, words)
        code: int = module.main(args)
        sys.stdout.flush()
        return code
    except FsbarrierError as error:
        print(shown(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
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
        from fsbarrier.rundir.paths import RunPaths
        from fsbarrier.start import preflight

        said = args.log_path
        log_path = preflight.absolute(said) if said else preflight.default_log_path(os.environ)
        folders.insert(0, RunPaths(log_path).logs)
    for folder in folders:
        # No such run, or not writable: the next one.
        with contextlib.suppress(OSError):
            fd, name = tempfile.mkstemp(prefix="fsbarrier-error-", suffix=".txt", dir=folder)
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                stream.write(text)
            return name
    return "could not be saved"
