"""What kind of filesystem a path is on, what is known of that kind, and which of its mount options do harm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.doctor.findings import Check

COHERENT, CLOSE_TO_OPEN, OBJECT_STORE, LOCAL, UNKNOWN = (
    "coherent",
    "close-to-open",
    "object store",
    "local",
    "unknown",
)


@dataclass(frozen=True)
class Family:
    """A kind of filesystem. `stale_s`: how old names and content may be by default; `fresher`: what makes them younger."""

    names: tuple[str, ...]
    kind: str
    stale_s: float = 0.0
    fresher: str = ""


INSTEAD = "use NFS, Lustre, GPFS, CephFS or a local disk for the run directory"
#: the first family one of whose names begins the type (for an object store also: stands in a FUSE mount's source) is it
FAMILIES = (
    Family(
        (
            "blobfuse",
            "s3fs",
            "goofys",
            "geesefs",
            "rclone",
            "gcsfuse",
            "mountpoint-s3",
            "mount-s3",
            "ossfs",
            "cosfs",
        ),
        OBJECT_STORE,
    ),
    Family(("nfs",), CLOSE_TO_OPEN, 0.0, "actimeo=1 or lookupcache=positive (nfs)"),
    Family(("sshfs",), CLOSE_TO_OPEN, 20.0, "-o dir_cache=no (sshfs)"),
    Family(
        ("glusterfs",),
        CLOSE_TO_OPEN,
        5.0,
        "-o attribute-timeout=0,entry-timeout=0,negative-timeout=0 (glusterfs), and the volume without nl-cache",
    ),
    Family(
        ("juicefs",),
        CLOSE_TO_OPEN,
        1.0,
        "--attr-cache 0 --entry-cache 0 --dir-entry-cache 0 (juicefs)",
    ),
    Family(("mfs", "moosefs"), CLOSE_TO_OPEN, 1.0, "-o mfsattrcacheto=0,mfsentrycacheto=0 (moosefs)"),
    Family(("beegfs",), CLOSE_TO_OPEN, 1.0, "a shorter tuneDirSubentryCacheValidityMS (beegfs)"),
    Family(("cifs", "smb"), CLOSE_TO_OPEN, 1.0, "cache=strict,actimeo=0,serverino (cifs)"),
    Family(("9p",), CLOSE_TO_OPEN, 0.0, "cache=none (9p)"),
    Family(("virtiofs",), CLOSE_TO_OPEN, 1.0, "--cache=never on the host's virtiofsd"),
    Family(("lustre", "gpfs", "ceph", "wekafs", "gfs2", "ocfs2"), COHERENT),
    Family(
        (
            "ext",
            "xfs",
            "btrfs",
            "zfs",
            "f2fs",
            "bcachefs",
            "tmpfs",
            "ramfs",
            "overlay",
            "vfat",
            "exfat",
            "ntfs",
        ),
        LOCAL,
    ),
)
OTHER = Family(
    (), UNKNOWN, 0.0, "shorter entry, attribute and negative time-outs, where the mount has such options"
)

#: option -> (level, what it does, what to do); those with a value are looked at in `_with_values`
RISKY = {
    "soft": ("warning", "the server's outages come as errors in the middle of writing", "mount with hard"),
    "softerr": ("warning", "the server's outages come as errors in the middle of writing", "mount with hard"),
    "nocto": ("warning", "an opened file may be an old one", "mount without nocto"),
    "nosharecache": ("warning", "two caches on one node", "mount without nosharecache"),
    "noserverino": (
        "warning",
        "whose a record is cannot be told by its inode number",
        "mount with serverino",
    ),
    "nolock": ("note", "locks are this node's own; fsbarrier does not use them between nodes", ""),
    "noac": ("note", "fresh, but each look at a name costs a request", "actimeo=1 is cheaper"),
    "localflock": ("note", "locks are this node's own; fsbarrier does not use them between nodes", ""),
    "noflock": ("note", "no locks; fsbarrier does not use them between nodes", ""),
}
LONG_S = 60
MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """The mount that holds a path."""

    kind: str
    source: str
    options: tuple[str, ...]

    @property
    def family(self) -> Family:
        return family_of(self.kind, self.source)

    @property
    def fresher(self) -> str:
        """What makes names and content younger here."""
        if self.kind.startswith("nfs") and "noac" in self.options:
            return "a server, or a network, that answers sooner: with noac this client remembers nothing"
        return self.family.fresher or OTHER.fresher


def mount_of(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """(type, source, options) of the mount that holds `path`. Raises OSError."""
    found = find(path)
    return found.kind, found.source, found.options


def claims_unsafe(path: Path) -> str:
    """Why two nodes may both win an exclusive create under `path`, going by its type; "" where one does. Raises OSError."""
    found = find(path)
    return f"{found.kind} from {found.source}: {INSTEAD}" if found.family.kind == OBJECT_STORE else ""


def find(path: Path) -> Mount:
    """The mount that holds `path`, from /proc/self/mountinfo. Raises OSError."""
    best, found = -1, Mount("unknown", "unknown", ())
    real = path.resolve()
    for line in MOUNTINFO.read_text().splitlines():
        left, _, right = line.partition(" - ")
        words, about = left.split(), [*right.split(), "", "", ""]
        point = Path(words[4].encode().decode("unicode_escape"))
        if real.is_relative_to(point) and len(point.parts) >= best:
            options = dict.fromkeys([*words[5].split(","), *about[2].split(",")])
            best, found = len(point.parts), Mount(about[0], about[1], tuple(options))
    return found


def family_of(kind: str, source: str) -> Family:
    """What is known of a filesystem of this type."""
    kind, source = kind.lower(), source.lower()
    types = (kind, kind.removeprefix("fuse."))
    for family in FAMILIES:
        if any(each.startswith(name) for each in types for name in family.names):
            return family
        if (
            family.kind == OBJECT_STORE
            and kind.startswith("fuse")
            and any(name in source for name in family.names)
        ):
            return family
    return OTHER


def judge(mount: Mount) -> list[Check]:
    """The filesystem's type and its mount options."""
    family = mount.family
    shown = f"{mount.kind} from {mount.source}"
    if family.kind == OBJECT_STORE:
        reason = f"{shown}: an object store, where two nodes can both win an exclusive create"
        return [Check("mount", "refused", reason, f"no mount option makes it safe; {INSTEAD}")]
    level, advice = "ok", ""
    if mount.kind in ("tmpfs", "ramfs", "overlay"):
        level = "warning"
        what = "a container's own layer" if mount.kind == "overlay" else "memory"
        shown, advice = (
            f"{shown}: {what}, gone when it ends",
            "for a run that is to last: a disk or a shared mount",
        )
    elif family.kind == UNKNOWN:
        level, shown = "note", f"{shown}: of no kind that is known here; what was measured counts"
    if "ro" in mount.options:
        return [Check("mount", "refused", f"{shown}, read-only", "mount with rw")]
    return [Check("mount", level, shown, advice), *options(mount)]


def options(mount: Mount) -> list[Check]:
    """What is to be said of a mount's options."""
    found = list(_with_values(mount))
    for option in mount.options:
        if option in RISKY:
            level, what, advice = RISKY[option]
            found.append(Check("mount option", level, f"{option}: {what}", advice))
    return found


def _with_values(mount: Mount) -> Iterator[Check]:
    values = dict(option.split("=", 1) for option in mount.options if "=" in option)
    if values.get("local_lock", "none") != "none":
        what = "locks are this node's own; fsbarrier does not use them between nodes"
        yield Check("mount option", "note", f"local_lock={values['local_lock']}: {what}")
    for name in ("actimeo", "acregmax", "acdirmax"):
        if values.get(name, "").isdecimal() and int(values[name]) > LONG_S:
            what = f"what a node remembers may be {values[name]} s old"
            yield Check("mount option", "warning", f"{name}={values[name]}: {what}", "actimeo=3")
    if values.get("cache") in ("loose", "fscache", "mmap"):
        advice = "mount with cache=none" if mount.kind == "9p" else "mount with cache=strict"
        what = "nodes may not see what others wrote"
        yield Check("mount option", "warning", f"cache={values['cache']}: {what}", advice)
    if values.get("proto") == "udp":
        yield Check(
            "mount option", "warning", "proto=udp: data can be corrupted under load", "mount with proto=tcp"
        )
    if values.get("vers", "").startswith("2"):
        what = "version 2 has no exclusive create"
        yield Check(
            "mount option", "refused", f"vers={values['vers']}: {what}", "mount with vers=4.2 or vers=3"
        )
