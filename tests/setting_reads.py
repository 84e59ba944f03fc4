"""Notes which settings the programs of a complete run act on, with their values: in each fork of the warm process (complete_runs.py)."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from fsbarrier.settings.section import Section
from fsbarrier.settings.sections import NAMED, Settings, sections

#: the environment variable with the path of the notes
NOTES = "FSBARRIER_TEST_READS"
#: who reads settings without acting on them: what parses, checks, records and changes them
NOT_ACTING = ("fsbarrier.settings.", "fsbarrier.cli.", "fsbarrier.rundir.", "dataclasses")


def owners() -> dict[str, type]:
    """The classes of the settings, by the beginning of their names."""
    named = {name.rstrip("."): section for own in NAMED.values() for name, section in own.items()}
    return {"": Settings, **sections(), **named}


@functools.cache
def note_reads() -> None:
    """From now on this process and its forks note each setting that is read to be acted on."""
    for owner, section in owners().items():
        _note(f"{owner}." if owner else "", section)


def _note(prefix: str, section: type) -> None:
    noted = set[tuple[str, str]]()

    def read(self: object, leaf: str) -> object:
        value = object.__getattribute__(self, leaf)
        if leaf[0] == "_" or callable(value) or isinstance(value, Section | dict):
            return value
        one, reader = (leaf, repr(value)), sys._getframe(1).f_globals.get("__name__", "")
        if one not in noted and not reader.startswith(NOT_ACTING) and NOTES in os.environ:
            noted.add(one)
            fd = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(fd, json.dumps([prefix + leaf, value]).encode() + b"\n")
            os.close(fd)
        return value

    section.__getattribute__ = read  # type: ignore[method-assign, assignment]


def reads(path: Path) -> dict[str, list[Any]]:
    """The noted settings and their values."""
    found: dict[str, list[Any]] = {}
    for line in path.read_text().splitlines():
        name, value = json.loads(line)
        found.setdefault(name, []).append(value)
    return found
