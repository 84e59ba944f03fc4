"""Barriers for your own scripts: `fsbarrier.join`, on the same core as the daemon (docs/group.md)."""

from fsbarrier.group.collective import MAX_OBJECT_BYTES
from fsbarrier.group.group import Group, join

__all__ = ["MAX_OBJECT_BYTES", "Group", "join"]
