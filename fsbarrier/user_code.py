"""Loads what a user names as `path/file.py:name`: a reward function, an agent's class."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.loader import load_file


def code_file(function: Callable[..., object]) -> str | None:
    """The file in which a function is written, where that is known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else None


def described_failure(error: BaseException, file: str | None) -> str:
    """What a user's code raised, and where: the innermost line of the user's `file`, else of any.

    The whole traceback goes to this program's log, once for each place.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    if place not in _shown:
        _shown.add(place)
        traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}{place}"


#: the places whose traceback the log has
_shown: set[str] = set()


def load_named(setting: str, value: str) -> object:
    """What `value` ("path/file.py:name") names; it can import files beside it and below the current directory. `setting` is for messages.

    Raises UsageError where the file is missing, fails while it is loaded, or does not define the name.
    """
    path, _, name = value.rpartition(":")
    file, said = Path(path), f"{setting}={value}"
    if not path or not file.is_file():
        raise UsageError(f"{said}: there is no file {path or value}")
    # Behind the libraries: a random.py of the user's must not pass for theirs.
    sys.path += [folder for folder in (str(file.resolve().parent), os.getcwd()) if folder not in sys.path]
    try:
        module = load_file(file, f"fsbarrier_user_{setting.replace('.', '_')}")
    # Whatever the user's code raises.
    except Exception as error:
        raise UsageError(f"{said}: {file} cannot be loaded: {described_failure(error, str(file))}") from None
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"{said}: {file} defines no {name}")
    return found
