"""The settings of a session, which is all generations between a start of the nodes and their end. Pure.

A run's settings change when a session begins: node 0's start names other values, and the session's first generation records them. Every
later generation copies them. So all members have the same settings, whatever their own command lines say. See docs/protocol.md,
"Settings that change".
"""

from __future__ import annotations

from fsbarrier.protocol.facts import Payload

#: the rank whose starts may change settings
MASTER = 0


def contradiction(stated: Payload, now: Payload) -> str:
    """The first setting that a command line contradicts, with both values, for people; "" if there is none."""
    for name, value in stated.items():
        if now.get(name) != value:
            return f"{name}={shown(value)} contradicts this run's settings ({shown(now.get(name))})"
    return ""


def shown(value: object) -> str:
    """A setting's value as people would type it."""
    if isinstance(value, list | tuple):
        return ",".join(shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
