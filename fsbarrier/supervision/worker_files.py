"""What a worker program leaves for its daemon: its progress while it runs, its result when it has ended. Anybody may have written it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsbarrier.errors import ProgramFailed

MAX_PROGRESS_BYTES = 64 * 1024  # every heartbeat carries it
MAX_RESULT_BYTES = 16 * 1024 * 1024  # what every node reads of a decision; a record holds four times as much
MAX_DEPTH = 100  # of nesting; what was read must be written again, further down in a record


def read_progress(path: Path) -> dict[str, Any] | None:
    """What the running program says of itself; None while there is nothing that can be passed on."""
    try:
        return _object(path, MAX_PROGRESS_BYTES)
    except (OSError, ValueError):
        return None


def read_result(path: Path, program: str) -> dict[str, Any]:
    """The result of a program that ended well. Raises ProgramFailed where it is none."""
    try:
        result = _object(path, MAX_RESULT_BYTES)
    except FileNotFoundError:
        raise ProgramFailed(f"{program} ended well but left no result") from None
    except (OSError, ValueError) as error:
        raise ProgramFailed(f"{program} ended well but left a bad result: {error}") from None
    result.pop("events", None)  # the daemon's own name for what goes to the journal
    return result


def _object(path: Path, limit: int) -> dict[str, Any]:
    with path.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes; large data belongs into a file that the result names")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for group in inner for one in group if isinstance(one, dict | list)]
    return depth
