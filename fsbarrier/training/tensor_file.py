"""Safely reads torch files of unknown origin: only plain tensors and containers, no code execution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsbarrier.errors import ProgramFailed, first_line


def load_tensors(path: Path, what: str) -> dict[str, Any]:
    """The dict in a torch file. `what`: the expected kind of file, for messages. Raises ProgramFailed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ProgramFailed(f"{path} is not a {what}: {error.strerror or error}") from None
    except Exception as error:
        # On damaged data the unpickler may raise anything.
        raise ProgramFailed(f"{path} is not a {what}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ProgramFailed(f"{path} is not a {what}: it contains a {type(content).__name__}")
    return content
