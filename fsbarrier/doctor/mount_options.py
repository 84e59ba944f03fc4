"""What the doctor says of a mount without trying it: its type, and which of its options do harm."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check
from fsbarrier.host.mounts import INSTEAD, OBJECT_STORE, UNKNOWN, Mount

OWN_LOCKS = "locks are this node's own; fsbarrier does not use them between nodes"
OUTAGES = "the server's outages come as errors in the middle of writing"
#: above this, what a node remembers of a file is older than any time-out
LONG_S = 60

#: an option as a pattern -> (level, what it does, what to do); `age`: in seconds, harmless up to LONG_S
RISKY = {
    "soft|softerr": (WARNING, OUTAGES, "mount with hard"),
    "nocto": (WARNING, "an opened file may be an old one", "mount without nocto"),
    "nosharecache": (WARNING, "two caches on one node", "mount without nosharecache"),
    "noserverino": (WARNING, "whose a record is cannot be told by its inode number", "mount with serverino"),
    "nolock|localflock": (NOTE, OWN_LOCKS, ""),
    "noac": (NOTE, "fresh, but each look at a name costs a request", "actimeo=1 is cheaper"),
    "noflock": (NOTE, "no locks; fsbarrier does not use them between nodes", ""),
    "local_lock=(?!none$).+": (NOTE, OWN_LOCKS, ""),
    r"(?:actimeo|acregmax|acdirmax)=(?P<age>\d+)": (
        WARNING,
        "what a node remembers may be {age} s old",
        "actimeo=3",
    ),
    "cache=(?:loose|fscache|mmap)": (
        WARNING,
        "nodes may not see what others wrote",
        "mount with cache=strict",
    ),
    "proto=udp": (WARNING, "data can be corrupted under load", "mount with proto=tcp"),
    "vers=2.*": (REFUSED, "version 2 has no exclusive create", "mount with vers=4.2 or vers=3"),
}


def judge(mount: Mount) -> list[Check]:
    """The filesystem's type and its mount options."""
    category, shown = mount.family.category, str(mount)
    if category == OBJECT_STORE:
        reason = f"{shown}: an object store, where two nodes can both win an exclusive create"
        return [Check("mount", REFUSED, reason, f"no mount option makes it safe; {INSTEAD}")]
    level, advice = OK, ""
    if mount.kind in ("tmpfs", "ramfs", "overlay"):
        what = "a container's own layer" if mount.kind == "overlay" else "memory"
        level, shown = WARNING, f"{shown}: {what}, gone when it ends"
        advice = "for a run that is to last: a disk or a shared mount"
    elif category == UNKNOWN:
        level, shown = NOTE, f"{shown}: of no kind that is known here; what was measured counts"
    if "ro" in mount.options:
        return [Check("mount", REFUSED, f"{shown}, read-only", "mount with rw")]
    return [Check("mount", level, shown, advice), *_options(mount)]


def _options(mount: Mount) -> Iterator[Check]:
    for option in mount.options:
        for pattern, (level, what, advice) in RISKY.items():
            match = re.fullmatch(pattern, option)
            if match is None or int(match.groupdict().get("age", LONG_S + 1)) <= LONG_S:
                continue
            if mount.kind == "9p" and option.startswith("cache="):
                # 9p has no strict cache: it has one or none.
                advice = "mount with cache=none"
            yield Check("mount option", level, f"{option}: {what.format(**match.groupdict())}", advice)
