"""Loads user code given as `path/file.py:name`: a reward function or an agent class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.loader import failure, load_file
from fsbarrier.settings.sources import nearest


def code_file(function: Callable[..., object]) -> str | None:
    """The file that defines a function, if known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else None


def described_failure(error: BaseException, file: str | None) -> str:
    """Describe an exception from user code with its location. Logs the full traceback once per location."""
    text, place, trace = failure(error, file)
    log_once(place, trace)
    return text


def log_once(place: str, trace: str) -> None:
    """Log a text, such as a traceback, once per location."""
    if place not in _shown:
        _shown.add(place)
        print(trace, end="", file=sys.stderr)


#: locations whose text was logged
_shown: set[str] = set()


def load_named(setting: str, value: str) -> object:
    """Load the object `value` ("path/file.py:name"). Its file may import modules beside it and in the current directory. `setting`: for
    messages.

    Raises UsageError if the file is missing, fails to load, or does not define the name.
    """
    path, _, name = value.rpartition(":")
    file, named = Path(path), f"{setting}={value}"
    if not path:
        raise UsageError(f"{named}: must be path/file.py:name")
    if not file.is_file():
        raise UsageError(f"{named}: no such file: {path}")
    try:
        module = load_file(file)
    # The user's code may raise any exception.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{named}: cannot load {file}: {described_failure(error, str(file.resolve()))}"
        ) from None
    loaded = getattr(module, name, None)
    if loaded is None:
        raise UsageError(f"{named}: {file} does not define {name}{nearest(name, vars(module))}")
    return loaded
