"""What the doctor says of a mount without trying it: its type, and which of its options do harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check, Level
from fsbarrier.host.mounts import INSTEAD, OBJECT_STORE, UNKNOWN, Mount

OWN_LOCKS = "locks are this node's own; fsbarrier does not use them between nodes"
OUTAGES = "the server's outages come as errors in the middle of writing"
#: above this, what a node remembers of a file is older than any time-out
LONG_S = 60

#: option -> (level, what it does, what to do)
RISKY = {
    "soft": (WARNING, OUTAGES, "mount with hard"),
    "softerr": (WARNING, OUTAGES, "mount with hard"),
    "nocto": (WARNING, "an opened file may be an old one", "mount without nocto"),
    "nosharecache": (WARNING, "two caches on one node", "mount without nosharecache"),
    "noserverino": (WARNING, "whose a record is cannot be told by its inode number", "mount with serverino"),
    "nolock": (NOTE, OWN_LOCKS, ""),
    "noac": (NOTE, "fresh, but each look at a name costs a request", "actimeo=1 is cheaper"),
    "localflock": (NOTE, OWN_LOCKS, ""),
    "noflock": (NOTE, "no locks; fsbarrier does not use them between nodes", ""),
}


def _long(value: str) -> bool:
    return value.isdecimal() and int(value) > LONG_S


#: the same for options with a value: option -> (which values, level, what they do, what to do)
RISKY_VALUES: dict[str, tuple[Callable[[str], bool], Level, str, str]] = {
    "local_lock": (lambda value: value != "none", NOTE, OWN_LOCKS, ""),
    "actimeo": (_long, WARNING, "what a node remembers may be {value} s old", "actimeo=3"),
    "acregmax": (_long, WARNING, "what a node remembers may be {value} s old", "actimeo=3"),
    "acdirmax": (_long, WARNING, "what a node remembers may be {value} s old", "actimeo=3"),
    "cache": (
        lambda value: value in ("loose", "fscache", "mmap"),
        WARNING,
        "nodes may not see what others wrote",
        "mount with cache=strict",
    ),
    "proto": (
        lambda value: value == "udp",
        WARNING,
        "data can be corrupted under load",
        "mount with proto=tcp",
    ),
    "vers": (
        lambda value: value.startswith("2"),
        REFUSED,
        "version 2 has no exclusive create",
        "mount with vers=4.2 or vers=3",
    ),
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
        name, _, value = option.partition("=")
        if option in RISKY:
            level, what, advice = RISKY[option]
        elif value and name in RISKY_VALUES and RISKY_VALUES[name][0](value):
            _, level, what, advice = RISKY_VALUES[name]
            # 9p has no strict cache: it has one or none.
            advice = "mount with cache=none" if (mount.kind, name) == ("9p", "cache") else advice
        else:
            continue
        yield Check("mount option", level, f"{option}: {what.format(value=value)}", advice)
