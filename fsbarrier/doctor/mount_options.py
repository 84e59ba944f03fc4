"""Judges a mount by its type and options, without testing it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check
from fsbarrier.store.mounts import BUCKET_INSTEAD, OBJECT_STORE, UNKNOWN, Mount

OUTAGES = "a server outage makes writes fail with an error"
#: a longer attribute cache lifetime exceeds all timeouts
LONG_S = 60

#: pattern of an option -> (level, effect, advice); `age`: in seconds, harmless up to LONG_S
RISKY = {
    "soft|softerr": (WARNING, OUTAGES, "mount with hard"),
    "nocto": (WARNING, "open may return stale contents", "mount without nocto"),
    "nosharecache": (WARNING, "this node has two inconsistent caches", "mount without nosharecache"),
    "noserverino": (WARNING, "inode numbers do not identify files", "mount with serverino"),
    "noac": (NOTE, "no stale attributes, but every lookup costs a request", "actimeo=1 is cheaper"),
    r"(?:actimeo|acregmax|acdirmax)=(?P<age>\d+)": (
        WARNING,
        "cached attributes may be {age} s old",
        "actimeo=3",
    ),
    "cache=(?:loose|fscache|mmap)": (
        WARNING,
        "nodes may not see changes made by other nodes",
        "mount with cache=strict",
    ),
    "proto=udp": (WARNING, "data can be corrupted under load", "mount with proto=tcp"),
    "vers=2.*": (REFUSED, "version 2 has no exclusive create", "mount with vers=4.2 or vers=3"),
}


def judge(mount: Mount) -> list[Check]:
    """Check the filesystem's type and mount options."""
    category, shown = mount.family.category, str(mount)
    if category == OBJECT_STORE:
        reason = f"{shown}: an object store, on which two nodes can both succeed in an exclusive create"
        return [Check("mount", REFUSED, reason, f"no mount option makes it safe; {BUCKET_INSTEAD}")]
    level, advice = OK, ""
    if mount.kind in ("tmpfs", "ramfs", "overlay"):
        what = (
            "a container layer, lost when the container ends"
            if mount.kind == "overlay"
            else "memory, lost at reboot"
        )
        level, shown = WARNING, f"{shown}: {what}"
        advice = "use a disk or a shared mount for runs that you want to keep"
    elif category == UNKNOWN:
        level, shown = NOTE, f"{shown}: unknown filesystem type; see the measurements"
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
                # 9p has no cache=strict.
                advice = "mount with cache=none"
            yield Check("mount option", level, f"{option}: {what.format(**match.groupdict())}", advice)
