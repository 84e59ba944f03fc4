"""Barriers for your own scripts: `fsbarrier.join`, on the same core as the daemon (docs/group.md)."""

from fsbarrier.coordination.group.group import Group, join
from fsbarrier.coordination.group.json_objects import MAX_OBJECT_BYTES

__all__ = ["MAX_OBJECT_BYTES", "Group", "join"]
