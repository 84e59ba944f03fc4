"""A user's own vLLM server (debug mode or `engine.url`), which is only queried, never managed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from fsbarrier.engine.client import CalledOff, EngineClient, Refused, Unreachable, normal_url
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.settings.sections import EngineSettings

# vLLM's default.
DEFAULT_URL = "http://127.0.0.1:8000"


def connect(settings: EngineSettings) -> EngineClient:
    """Raises UsageError if `engine.url` is invalid, or the key's variable is not set."""
    name = settings.api_key_env
    api_key = os.environ.get(name, "") if name is not None else ""
    if name is not None and not api_key:
        raise UsageError(f"engine.api_key_env={name}: this variable is not set on this node")
    return EngineClient(normal_url(settings.url or DEFAULT_URL), api_key)


def what_it_serves(
    client: EngineClient, weights: Path, policy_version: int, cancel: threading.Event
) -> tuple[str, str]:
    """The served model's name, and a note if it is not the one in `weights`. Raises ProgramFailed if the server does not answer."""
    try:
        model = client.model(cancel=cancel)
    except (Refused, Unreachable, CalledOff) as error:
        raise ProgramFailed(
            f"the external server (debug mode or engine.url) does not answer: {error}"
        ) from None
    root = model["root"]
    if root and Path(root).exists() and Path(root).resolve() == weights.resolve():
        note = ""
    else:
        serves = f"{client.url} serves {root or 'another model'}"
        note = f"debug mode: {serves}, not policy version {policy_version} ({weights})"
    return model["id"], note
