"""One command line: parses it, calls the command, and turns every error into a line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from fsbarrier import reading
from fsbarrier.errors import EXIT_INTERNAL, EXIT_SIGINT, FsbarrierError, StoreError, UsageError
from fsbarrier.printable import printable, without_passwords
from fsbarrier.retry import FAILING
from fsbarrier.settings.sources import nearest


class Command(Protocol):
    """What a command's module has. SUMMARY and EXAMPLE are what its --help shows."""

    SUMMARY: str
    EXAMPLE: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None: ...

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Do it; gives the exit code."""


def run(name: str, arguments: Sequence[str], find_command: Callable[[str], Command]) -> int:
    """Run the command `name`; gives the exit code. Never raises, save for a second Ctrl-C."""
    args: argparse.Namespace | None = None
    _open_missing_streams()
    try:
        command = find_command(name)
        args = parse(command, name, arguments)
        code = command.main(args)
        sys.stdout.flush()
        return code
    except FsbarrierError as error:
        print(error_text(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except BrokenPipeError:
        # The reader of our output (head, less) has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (*FAILING, errno.ENOSPC, errno.EDQUOT):
            print(error_text(StoreError(f"the filesystem failed: {error}")), file=sys.stderr)
            return StoreError.exit_code
        where = save_traceback(args)
        what = one_line(f"{type(error).__name__}: {error}")
        print(f"fsbarrier: internal error: {what} (traceback: {where})", file=sys.stderr)
        return EXIT_INTERNAL


def _open_missing_streams() -> None:
    """Where this process was started with stdin, stdout or stderr closed, the next file that it opens would have that number, and get
    what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def error_text(error: FsbarrierError) -> str:
    """An error as people see it. A mistake of the user's is one line; a failed program's may end with its last log lines."""
    lines = [str(error)] if isinstance(error, UsageError) else str(error).splitlines()
    return "\n".join(
        ["fsbarrier: error: " + one_line(lines[0] if lines else "")] + [one_line(line) for line in lines[1:]]
    )


def one_line(message: str) -> str:
    """A message in one line, as it may hold what a user or a file said."""
    return printable(re.sub(r"\s+", " ", message)).strip()


def parse(command: Command, name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command. Raises UsageError."""
    parser = Parser(
        prog=f"fsbarrier {name}",
        description=command.SUMMARY,
        epilog=f"example:\n  {command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # A shortened flag could mean another flag in the next version.
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser.parse(arguments)


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes as one line that knows the nearest flag."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Flags and plain words in any order. Raises UsageError."""
        args, rest = self.parse_known_intermixed_args(self._with_values_joined(arguments))
        if rest:
            flag = rest[0].partition("=")[0]
            hint = nearest(flag, self._option_string_actions) if flag.startswith("-") else ""
            raise UsageError(f"unknown {'flag' if flag.startswith('-') else 'argument'} {flag}{hint}")
        return args

    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument (-[^:/]*?)(/[^:]*)?: ", r"\1: ", message))

    def _with_values_joined(self, arguments: Sequence[str]) -> list[str]:
        """`--flag -1,2` as `--flag=-1,2`: else argparse takes the value for a flag, and its message misleads."""
        joined: list[str] = []
        for argument in arguments:
            before = joined[-1] if joined else ""
            action = self._option_string_actions.get(before)
            if action is not None and action.nargs != 0 and re.match(r"-[\d.,]", argument):
                joined[-1] = f"{before}={argument}"
            else:
                joined.append(argument)
        return joined


def save_traceback(args: argparse.Namespace | None) -> Path | str:
    """Put the current traceback into the run's logs where there is a run, else into a temporary file. No link of the run is followed."""
    text = without_passwords(traceback.format_exc()).encode(errors="replace")
    # A folder, and from where on no link may lead to it.
    temporary = Path(tempfile.gettempdir())
    folders = [(temporary, temporary)]
    if args is not None and hasattr(args, "log_path"):
        from fsbarrier.rundir.paths import RunPaths
        from fsbarrier.start import preflight

        said = args.log_path
        log_path = preflight.absolute(said) if said else preflight.default_log_path(os.environ)
        folders.insert(0, (RunPaths(log_path).logs, log_path))
    name = f"fsbarrier-error-{secrets.token_hex(6)}.txt"
    for folder, root in folders:
        # This folder has no such run, or cannot be written to: try the next one.
        with contextlib.suppress(OSError), reading.folder_below(root, folder) as fd:
            new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
            with os.fdopen(new, "wb") as stream:
                stream.write(text)
            return folder / name
    return "could not be saved"
