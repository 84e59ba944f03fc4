"""Parses a command line, runs the command, and turns every error into a message and an exit code."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from fsbarrier.errors import EXIT_INTERNAL, EXIT_SIGINT, FsbarrierError, StoreError, UsageError
from fsbarrier.settings.sources import nearest
from fsbarrier.store.retry import fails, is_of_the_mount
from fsbarrier.wording import printable, without_passwords


class CommandModule(Protocol):
    """The interface of a module in fsbarrier/cli/commands. --help shows its docstring and EXAMPLE."""

    EXAMPLE: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None: ...

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Run the command and return its exit code."""


def run(name: str, arguments: Sequence[str], find_command: Callable[[str], CommandModule]) -> int:
    """Run the command `name` and return its exit code. Never raises, except for a second Ctrl-C."""
    _open_missing_streams()
    try:
        command = find_command(name)
        code = command.main(parse(command, name, arguments))
        sys.stdout.flush()
        return code
    except FsbarrierError as error:
        print(error_text(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except BrokenPipeError:
        return reader_left()
    except SystemExit as error:
        # rich ends the program like this when the reader of our output has exited, and argparse after --help.
        if isinstance(error.__context__, BrokenPipeError):
            return reader_left()
        raise
    except Exception as error:
        if isinstance(error, PermissionError):
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            print(error_text(UsageError(message)), file=sys.stderr)
            return UsageError.exit_code
        if isinstance(error, OSError) and (fails(error) or is_of_the_mount(error)):
            print(error_text(StoreError(f"the filesystem failed: {error}")), file=sys.stderr)
            return StoreError.exit_code
        where = save_traceback()
        what = one_line(f"{type(error).__name__}: {error}")
        print(f"fsbarrier: internal error: {what} (traceback: {where})", file=sys.stderr)
        return EXIT_INTERNAL


def show(text: str) -> int:
    """Print what the user asked for, and return the exit code."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        return reader_left()
    return 0


def reader_left() -> int:
    """The exit code when the reader of our output (head, less) has exited. Nothing more is written to it, at the exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _open_missing_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if they are closed. Otherwise the next file opened would get that file descriptor and
    receive our output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def error_text(error: FsbarrierError) -> str:
    """The text shown for an error: one line for a usage error; a failed program's last log lines may follow other errors."""
    lines = [str(error)] if isinstance(error, UsageError) else str(error).splitlines()
    return "\n".join(
        ["fsbarrier: error: " + one_line(lines[0] if lines else "")] + [one_line(line) for line in lines[1:]]
    )


def one_line(message: str) -> str:
    """`message` as one printable line. It may contain arbitrary text from a user or a file."""
    return printable(re.sub(r"\s+", " ", message)).strip()


def parse(command: CommandModule, name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one command. Raises UsageError."""
    parser = Parser(
        prog=f"fsbarrier {name}",
        description=command.__doc__,
        epilog=f"example:\n  {command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviated flag could become ambiguous in the next version.
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if not getattr(command, "TAKES_A_COMMAND", False):
        return parser.parse(arguments)
    # The words after "--" are another program's.
    own = [*itertools.takewhile(lambda word: word != "--", arguments)]
    args = parser.parse(own)
    args.command = [*arguments[len(own) + 1 :]]
    return args


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest flag."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positional arguments in any order. Raises UsageError."""
        flags = self._option_string_actions
        for before, argument in zip(["", *arguments], arguments, strict=False):
            flag, equals, value = argument.partition("=")
            if not argument or (equals and not value and flag in flags):
                # An empty value is often an unset shell variable. A default in its place could name somebody else's run.
                raise UsageError(
                    f"{flag or (before if before in flags else 'an argument')}: must not be empty"
                )
        args, rest = self.parse_known_intermixed_args(arguments)
        if rest:
            flag = rest[0].partition("=")[0]
            hint = (self._setting_hint(flag) or nearest(flag, flags)) if flag.startswith("-") else ""
            raise UsageError(f"unknown {'flag' if flag.startswith('-') else 'argument'} {flag}{hint}")
        return args

    def _setting_hint(self, flag: str) -> str:
        """How to write a setting that was typed as a flag; "" if it is no setting, or this command takes none."""
        from fsbarrier.settings.sections import known_names

        if not any(action.dest == "settings" for action in self._actions):
            return ""
        typed, names = re.sub("[._]", "-", flag.lstrip("-")).lower(), list(known_names())
        as_flags = {re.sub("[._]", "-", name): name for name in names}
        # The user may have typed the name without its section, or only its initials, as in --lr.
        leaves = {name: name.rpartition(".")[2].replace("_", "-") for name in names if ".NAME." not in name}
        called = [name for name, leaf in leaves.items() if typed in (leaf, _initials(leaf))]
        fits = [as_flags[typed]] if typed in as_flags else called[:3]
        return f"; settings are written {' or '.join(f'{name}=VALUE' for name in fits)}" if fits else ""

    def error(self, message: str) -> NoReturn:
        # argparse's words for a flag with a value that takes none, and for words that need not be there.
        message = message.replace("ignored explicit argument ", "takes no value, got ").replace(
            ", key=value", ""
        )
        message = re.sub(r"^argument (-[^:/]*?)(/[^:]*)?: ", r"\1: ", message)
        for kind, meaning in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value: ", f"must be {meaning}, got ")
        raise UsageError(message)


def _initials(name: str) -> str:
    """The initials of a name of several words; "" for a single word."""
    words = name.split("-")
    return "".join(word[0] for word in words) if len(words) > 1 else ""


def save_traceback() -> str:
    """Save the current traceback in a temporary file that only this user may read, and return its path."""
    text = without_passwords(traceback.format_exc())
    try:
        fd, path = tempfile.mkstemp(prefix="fsbarrier-error-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
        return path
    except OSError as error:
        return f"could not be saved: {error.strerror}"
