"""The filesystem type of a path, and the known properties of that type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

#: Another node's writes become visible immediately ("coherent") or at the next lookup ("close-to-open").
COHERENT = "coherent"
CLOSE_TO_OPEN = "close-to-open"
#: no exclusive create: two nodes can both succeed
OBJECT_STORE = "object store"
#: visible on this host only
LOCAL = "local"
UNKNOWN = "unknown"

INSTEAD = "use NFS, Lustre, GPFS, CephFS or a local disk for the run directory"
#: JuiceFS keeps only the data in the bucket. Its names are in a database, so an exclusive create has one winner.
BUCKET_INSTEAD = f"mount the bucket with JuiceFS (docs/filesystems.md), or {INSTEAD}"


@dataclass(frozen=True, slots=True)
class Family:
    """Filesystems with the same behaviour. `stale_s`: maximum age of reads with default mount options; `fresher`: mount options that reduce
    it."""

    names: tuple[str, ...]
    category: str
    stale_s: float = 0.0
    fresher: str = ""


def _family(names: str, category: str, stale_s: float = 0.0, fresher: str = "") -> Family:
    return Family(tuple(names.split()), category, stale_s, fresher)


#: a type belongs to the first family that contains a prefix of its name
FAMILIES = (
    _family(
        "blobfuse s3fs goofys geesefs rclone gcsfuse mountpoint-s3 mount-s3 ossfs cosfs",
        OBJECT_STORE,
    ),
    _family("nfs", CLOSE_TO_OPEN, 0.0, "actimeo=1 or lookupcache=positive (nfs)"),
    _family("sshfs", CLOSE_TO_OPEN, 20.0, "-o dir_cache=no (sshfs)"),
    _family(
        "glusterfs",
        CLOSE_TO_OPEN,
        5.0,
        "-o attribute-timeout=0,entry-timeout=0,negative-timeout=0 (glusterfs), and disable nl-cache for the volume",
    ),
    _family("juicefs", CLOSE_TO_OPEN, 1.0, "--attr-cache 0 --entry-cache 0 --dir-entry-cache 0 (juicefs)"),
    _family("mfs moosefs", CLOSE_TO_OPEN, 1.0, "-o mfsattrcacheto=0,mfsentrycacheto=0 (moosefs)"),
    _family("beegfs", CLOSE_TO_OPEN, 1.0, "a shorter tuneDirSubentryCacheValidityMS (beegfs)"),
    _family("cifs smb", CLOSE_TO_OPEN, 1.0, "cache=strict,actimeo=0,serverino (cifs)"),
    _family("9p", CLOSE_TO_OPEN, 0.0, "cache=none (9p)"),
    _family("virtiofs", CLOSE_TO_OPEN, 1.0, "--cache=never on the host's virtiofsd"),
    _family("lustre gpfs ceph wekafs gfs2 ocfs2", COHERENT),
    _family("ext xfs btrfs zfs f2fs bcachefs tmpfs ramfs overlay vfat exfat ntfs", LOCAL),
)
OTHER = Family((), UNKNOWN, 0.0, "shorter entry, attribute and negative timeouts, if the mount supports them")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount. `kind`: the kernel's name of the filesystem type, such as "nfs4" or "fuse.sshfs". `point`: the mount point."""

    kind: str
    source: str
    options: tuple[str, ...]
    point: str = "/"

    def __str__(self) -> str:
        return f"{self.kind} from {self.source}"

    @property
    def family(self) -> Family:
        kind, source = self.kind.lower(), self.source.lower()
        types = (kind, kind.removeprefix("fuse."))
        for family in FAMILIES:
            if any(each.startswith(name) for each in types for name in family.names):
                return family
            # Some object stores mount as plain "fuse" with their name as the source.
            unnamed = family.category == OBJECT_STORE and kind.startswith("fuse")
            if unnamed and any(name in source for name in family.names):
                return family
        return OTHER

    @property
    def fresher(self) -> str:
        """Advice that reduces stale reads on this mount."""
        if self.kind.startswith("nfs") and "noac" in self.options:
            return "use a faster server or network: with noac this client already caches nothing"
        return self.family.fresher or OTHER.fresher


def mount_of(path: Path) -> Mount:
    """The mount of `path`, from /proc/self/mountinfo. Raises OSError."""
    real = path.resolve()
    longest, mount = -1, Mount("unknown", "unknown", ())
    for line in MOUNTINFO.read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, source, options, *_) = left.split(), [*right.split(), "", "", ""]
        point = Path(fields[4].encode().decode("unicode_escape"))
        # Of two mounts on the same point, the later one hides the earlier one.
        if real.is_relative_to(point) and len(point.parts) >= longest:
            both = dict.fromkeys([*fields[5].split(","), *options.split(",")])
            longest, mount = len(point.parts), Mount(kind, source, tuple(both), str(point))
    return mount


def claims_unsafe(path: Path) -> str:
    """Why exclusive create is unsafe under `path` according to its filesystem type; "" if it is safe. Raises OSError."""
    mount = mount_of(path)
    return f"{mount}: {BUCKET_INSTEAD}" if mount.family.category == OBJECT_STORE else ""
