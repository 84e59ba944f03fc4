"""Barriers for scripts of one's own: `fsbarrier.join`, the same core as the daemon's (docs/group.md)."""

from fsbarrier.group.group import MAX_OBJECT_BYTES, Group, join

__all__ = ["MAX_OBJECT_BYTES", "Group", "join"]
