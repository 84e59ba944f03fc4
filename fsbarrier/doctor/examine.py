"""Runs the checks: `alone` on one node, `together` on several nodes, `short` at the start of a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fsbarrier.doctor import between, machine, probes
from fsbarrier.doctor.findings import REFUSED, Check, Report
from fsbarrier.errors import BarrierTimeout, Fenced, PeerLost, TooFewNodes, UsageError
from fsbarrier.group import Group, join
from fsbarrier.network.listening import listen, port_of, reachable
from fsbarrier.network.this_host import boot_id, candidate_addresses, host_name
from fsbarrier.store import files, trusted_folder
from fsbarrier.store.mounts import LOCAL, Mount, mount_of

WAIT_S = 60.0
#: the folder in which several doctors meet; scratch folders append random letters
FOLDER = ".fsbarrier-doctor"
#: Generous timeouts, because the directory under test may show changes half a minute late.
BEAT_S, SUSPECT_S, SILENT_S = 1.0, 10.0, 35.0
#: how long node 0 waits for the others to leave before it removes the folder
BYE_S = 15.0
ALONE = "from this node only; start it on several nodes with --num-nodes to measure what other nodes see, and how late"


def alone(path: Path) -> Report:
    """All checks that one node can do on `path`, an existing directory. Raises OSError."""
    mount = mount_of(path)
    return _presumed(path, mount, _own_checks(path, mount))


def short(path: Path, *, write: bool = True) -> Report:
    """The quick check at the start of a run: type, options, a few races; read-only without `write`. Raises OSError.

    `path` need not exist; the check then uses its nearest existing parent.
    """
    there = existing(path)
    mount = mount_of(there)
    checks = machine.judge(mount)
    if write and not _refused(checks):
        with _scratch(there) as scratch:
            checks += _tried(probes.exclusive_create(scratch, racers=2, rounds=16), scratch)
    return _presumed(path, mount, checks)


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _presumed(path: Path, mount: Mount, checks: list[Check]) -> Report:
    return Report(str(path), mount.family.category, ALONE, mount.family.stale_s, tuple(checks))


def _refused(checks: list[Check]) -> bool:
    return any(check.level == REFUSED for check in checks)


def _own_checks(path: Path, mount: Mount) -> list[Check]:
    judged = machine.judge(mount)
    if _refused(judged):
        return judged
    with _scratch(path) as scratch:
        tried = _tried(probes.exclusive_create(scratch), scratch)
    return [*judged, *tried, *probes.space(path), *probes.this_node()]


def _tried(raced: Check, scratch: Path) -> list[Check]:
    return [raced] if raced.level == REFUSED else [raced, probes.symbolic_links(scratch)]


# --- several nodes --------------------------------------------------------------------------------------------------------


def together(
    path: Path,
    num_nodes: int,
    rank: int,
    *,
    wait_s: float,
    shared_group: bool,
    trust_mount: bool,
    say: Callable[[str], None],
) -> Report:
    """All checks of `num_nodes` nodes on a shared directory. Every node returns the same report.

    `say` receives progress messages. Raises TooFewNodes if a node does not come or leaves, UsageError if the nodes' flags contradict each
    other or others could exchange the folder where they meet, StoreError if they cannot agree through this directory, OSError.
    """
    mount = mount_of(path)
    if _refused(machine.judge(mount)):
        # The mount is unsuitable, whatever the other nodes find.
        return alone(path)
    with _meeting_place(path, shared_group, trust_mount) as place, _in_its_words(path, mount):
        own = _own_checks(path, mount)
        say(f"this is node {rank}; waiting up to {wait_s:g} s for the other nodes, of {num_nodes}")
        with join(
            place / "group",
            node_rank=rank,
            num_nodes=num_nodes,
            timeout_s=wait_s,
            beat_s=BEAT_S,
            suspect_s=SUSPECT_S,
            dead_s=SILENT_S,
        ) as group:
            session = place / f"session-{group.generation}"
            exchanged = _exchange(session, group, own, mount)
        _take_leave(place, session, rank, num_nodes)
    return _conclude(path, exchanged)


@contextmanager
def _scratch(base: Path) -> Iterator[Path]:
    """A new folder in `base` for this process, which is removed at the end. Raises OSError."""
    with TemporaryDirectory(prefix=f"{FOLDER}-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _meeting_place(path: Path, shared_group: bool, trust_mount: bool) -> Iterator[Path]:
    """The folder where the doctors meet; whoever leaves last removes it. Raises UsageError, OSError."""
    folder = path / FOLDER
    files.set_shared_group(shared_group)
    check = partial(
        trusted_folder.check,
        folder,
        shared_group=shared_group,
        trust_mount=trust_mount,
        named="doctor --num-nodes",
    )
    check()
    files.make_dirs(folder)
    # Another user may have created the folder first, so check again.
    check()
    yield folder
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _in_its_words(path: Path, mount: Mount) -> Iterator[None]:
    """Translate the errors of the group into errors of the doctor."""
    try:
        yield
    except (BarrierTimeout, PeerLost) as error:
        local = mount.family.category == LOCAL and isinstance(error, BarrierTimeout)
        advice = f" On this host the directory is on {mount}, which is a local filesystem." if local else ""
        raise TooFewNodes(
            f"doctor: {error}. Check that `fsbarrier doctor` runs on every node with the same --num-nodes, and that {path} is the same "
            f"shared directory everywhere.{advice}"
        ) from None
    except Fenced:
        raise UsageError(
            "doctor: another doctor has the same rank; give each node its own --worker R"
        ) from None
    except ValueError as error:
        raise UsageError(f"doctor: {error}; use the same --num-nodes on all nodes") from None


def _exchange(session: Path, group: Group, own: list[Check], mount: Mount) -> dict[int, between.NodeFindings]:
    """Measure together with the other nodes, and exchange the findings."""
    addresses = candidate_addresses()
    with ExitStack() as held:
        listening = [held.enter_context(listener) for listener in listen(addresses)]
        offers = group.all_gather({"addresses": addresses, "port": port_of(listening[0])})
        others = {
            rank: each for rank, each in zip(group.members, offers, strict=True) if rank != group.node_rank
        }
        reached = {str(rank): reachable(each["addresses"], each["port"]) for rank, each in others.items()}
        group.barrier()
    files.make_dirs(session)
    delays = between.measure(session, group.node_rank, group.members)
    group.barrier()
    races = between.race(session, group.node_rank, len(group.members))
    group.barrier()
    races.read(session)
    findings = between.NodeFindings(
        host_name(), boot_id(), str(mount), mount.fresher, own, races, delays, reached
    )
    messages = group.all_gather(asdict(findings))
    return {
        rank: between.NodeFindings.of(message) for rank, message in zip(group.members, messages, strict=True)
    }


def _take_leave(place: Path, session: Path, rank: int, num_nodes: int) -> None:
    """Node 0 removes the session's files once the others have left the group. The next doctor removes what a killed one left behind."""
    with suppress(OSError):
        if rank:
            os.close(files.open_new(session / f"left-{rank}"))
            return
        end = time.monotonic() + BYE_S
        while sum(name.startswith("left-") for name in os.listdir(session)) < num_nodes - 1:
            if time.monotonic() > end:
                return
            files.write_atomic(session / "node-0-looks", b"")
            threading.Event().wait(0.02)
        for name in os.listdir(place):
            if name == "group" or name.startswith("session-"):
                files.discard(place / name, place.parent)


def _conclude(path: Path, findings: between.Findings) -> Report:
    checks = between.merged({rank: node.checks for rank, node in findings.items()})
    columns = ("host", "boot_id", "mount", "delays", "reached")
    nodes = {rank: asdict(node) for rank, node in findings.items()}
    return Report(
        str(path),
        between.category_of(findings),
        f"between {len(findings)} nodes, by measurement",
        between.stale_s(findings),
        tuple([*checks, *between.between_nodes(findings)]),
        tuple({"node_rank": rank, **{name: node[name] for name in columns}} for rank, node in nodes.items()),
    )
