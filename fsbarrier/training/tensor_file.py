"""Reads torch files that somebody else may have written: plain tensors and containers, nothing that runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsbarrier.errors import ProgramFailed, first_line


def load_tensors(path: Path, what: str) -> dict[str, Any]:
    """The dict in a torch file. Raises ProgramFailed naming `what` it should have been."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ProgramFailed(f"{path} is no {what}: {error.strerror or error}") from None
    except Exception as error:
        # On damaged bytes the unpickler fails in every way there is.
        raise ProgramFailed(f"{path} is no {what}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ProgramFailed(f"{path} is no {what}: it holds a {type(content).__name__}")
    return content
