"""Redacts settings before they are displayed or written to files: values marked secret, and passwords in URLs."""

from __future__ import annotations

from collections.abc import Mapping

from fsbarrier.wording import without_passwords

HIDDEN = "***"
#: `custom.secret.NAME=value`, or `custom.secret_name=value`
MARK = "secret"


def shown(settings: Mapping[str, object]) -> dict[str, object]:
    """The nested settings of `Settings.as_json`, redacted."""
    custom = settings.get("custom")
    marked = {name: HIDDEN for name in custom if name.startswith(MARK)} if isinstance(custom, Mapping) else {}
    safe = {name: _safe(value) for name, value in settings.items()}
    if isinstance(custom, Mapping):
        safe["custom"] = {name: _safe(value) for name, value in custom.items()} | marked
    return safe


def shown_word(word: str) -> str:
    """A command-line setting (`custom.secret.NAME=value`), redacted."""
    name, equals, _ = word.partition("=")
    marked = equals and name.removeprefix("custom.").startswith(MARK) and name.startswith("custom.")
    return f"{name}={HIDDEN}" if marked else without_passwords(word)


def _safe(value: object) -> object:
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, Mapping):
        return {name: _safe(inner) for name, inner in value.items()}
    return [_safe(inner) for inner in value] if isinstance(value, list | tuple) else value
