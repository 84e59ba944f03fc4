"""Loads what a user names as `path/file.py:name`: a reward function, an agent's class."""

from __future__ import annotations

import sys
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.loader import load_file


def load_named(setting: str, value: str) -> object:
    """What `value` ("path/file.py:name") names; files beside it can be imported by it. `setting` is for messages.

    Raises UsageError where the file is missing, fails while it is loaded, or does not define the name.
    """
    path, _, name = value.rpartition(":")
    file, said = Path(path), f"{setting}={value}"
    if not path or not file.is_file():
        raise UsageError(f"{said}: there is no file {path or value}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = load_file(file, f"fsbarrier_user_{setting.replace('.', '_')}")
    # Whatever the user's code raises.
    except Exception as error:
        raise UsageError(f"{said}: {file} cannot be loaded: {type(error).__name__}: {error}") from None
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"{said}: {file} defines no {name}")
    return found
