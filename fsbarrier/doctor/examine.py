"""Runs the checks: `alone` on one node, `together` on several nodes, `short` at the start of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor import delays, mount_options, probes, races, readers, verdict
from fsbarrier.doctor.connections import Door, opened, reached
from fsbarrier.doctor.findings import OK, REFUSED, About, Check, NodeFindings, Report
from fsbarrier.doctor.meeting import Interruption, Meeting
from fsbarrier.doctor.messages import Message
from fsbarrier.errors import StoreError, TooFewNodes
from fsbarrier.host.addresses import candidate_addresses
from fsbarrier.host.identity import boot_id, host_name
from fsbarrier.host.mounts import INSTEAD, LOCAL, Mount, mount_of

WAIT_S = 60.0
ALONE = "from this node only; start it on several nodes with --num-nodes to measure what other nodes see, and how late"


def alone(path: Path) -> Report:
    """All checks that one node can do on `path`, an existing directory. Raises OSError."""
    mount = mount_of(path)
    with _scratch(path) as scratch:
        checks = _own_checks(path, mount, scratch)
    versions = ", ".join(f"{name} {version}" for name, version in probes.versions().items())
    return _presumed(path, mount, [*checks, Check("versions", OK, versions)])


def short(path: Path, *, write: bool = True) -> Report:
    """The quick check at the start of a run: type, options, a few races and replacements; read-only without `write`. Raises OSError.

    `path` need not exist; the check then uses its nearest existing parent.
    """
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    mount = mount_of(there)
    checks = mount_options.judge(mount)
    if write and not _refused(checks):
        with _scratch(there) as scratch:
            checks += _tried(
                probes.exclusive_create(scratch, racers=2, rounds=16), scratch, replacements=8, samples=4
            )
    return _presumed(path, mount, checks)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A temporary folder for the tests. Raises OSError."""
    scratch = path / probes.scratch_name()
    files.make_dirs(scratch)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _presumed(path: Path, mount: Mount, checks: list[Check]) -> Report:
    stale_s = mount.family.stale_s
    timeouts = verdict.timeouts(stale_s)
    return Report(str(path), mount.family.category, ALONE, stale_s, timeouts, tuple(checks))


def _refused(checks: list[Check]) -> bool:
    return any(check.level == REFUSED for check in checks)


def _own_checks(path: Path, mount: Mount, scratch: Path) -> list[Check]:
    judged = mount_options.judge(mount)
    if _refused(judged):
        return judged
    tried = _tried(probes.exclusive_create(scratch), scratch, probes.REPLACEMENTS, probes.SAMPLES)
    return [*judged, *tried, *probes.space(path), *probes.this_node()]


def _tried(raced: Check, scratch: Path, replacements: int, samples: int) -> list[Check]:
    if raced.level == REFUSED:
        return [raced]
    return [raced, probes.replacement(scratch, replacements), *probes.latencies(scratch, samples)]


def together(
    path: Path,
    num_nodes: int,
    rank: int | None,
    wait_s: float,
    say: Callable[[str], None],
    interruption: Interruption,
) -> Report:
    """All checks of `num_nodes` nodes on a shared directory. Every node returns the same report.

    `say` receives progress messages. Raises TooFewNodes if a node does not arrive or leaves, UsageError if the nodes' flags contradict each
    other, OSError.
    """
    mount = mount_of(path)
    if _refused(mount_options.judge(mount)):
        # Already unsuitable, whatever the other nodes find.
        return alone(path)
    meeting = Meeting(path, num_nodes, rank, interruption)
    try:
        with meeting:
            meeting.meet(wait_s, say)
            if rank is None:
                say(f"this is node {meeting.rank}")
            messages = _examine(path, mount, meeting)
    except TooFewNodes as error:
        if meeting.members or mount.family.category != LOCAL:
            raise
        raise TooFewNodes(
            f"{error} On this host the directory is on {mount}, which is a local filesystem."
        ) from None
    except StoreError as error:
        # The nodes found each other but could not form a group. A run uses the same mechanism, so it would fail too.
        finding = f"the nodes cannot communicate through this directory: {error}"
        report = alone(path)
        return replace(report, checks=(*report.checks, Check("meeting", REFUSED, finding, INSTEAD)))
    return _conclude(path, messages)


def _examine(path: Path, mount: Mount, meeting: Meeting) -> dict[int, Message]:
    """Do this node's part and return the findings of all nodes."""
    loopback = meeting.on_one_host
    addresses = ("127.0.0.1",) if loopback else tuple(candidate_addresses())
    for part in (races, readers, delays):
        part.prepare(meeting)
    with opened(addresses, meeting.token, loopback=loopback) as own_door:
        doors = meeting.exchange("hello", asdict(own_door))
        with delays.answering(meeting):
            others = {rank: Door(**door) for rank, door in doors.items() if rank != meeting.rank}
            answered = reached(others)
            scratch = meeting.session / f"scratch-{meeting.rank}"
            files.make_dirs(scratch)
            meeting.interruption.heed()
            own = _own_checks(path, mount, scratch)
            meeting.interruption.heed()
            reading = readers.read_others(meeting)
            # From here on all nodes have finished their round trips and connection tests.
            delayed, ready = delays.measure(meeting)
    accelerators = probes.accelerators_here()
    about = About(host_name(), boot_id(), addresses, probes.versions(), accelerators, mount)
    findings = NodeFindings(
        about,
        own,
        races.race(meeting, ready),
        reading,
        delayed.times(),
        delayed.clock(),
        {str(rank): at for rank, at in answered.items()},
    )
    return meeting.exchange("findings", asdict(findings))


def _conclude(path: Path, messages: dict[int, Message]) -> Report:
    findings = {rank: NodeFindings.of(message) for rank, message in messages.items()}
    fresher = "; ".join(dict.fromkeys(node.about.mount.fresher for node in findings.values()))
    checks = [
        *verdict.merged({rank: node.checks for rank, node in findings.items()}),
        *verdict.between(findings, fresher),
    ]
    stale_s = verdict.stale_s(findings)
    shown = ("lags", "clock", "reading", "reached")
    return Report(
        str(path),
        verdict.category_of(findings),
        f"between {len(findings)} nodes, by measurement",
        stale_s,
        verdict.timeouts(stale_s),
        tuple(checks),
        tuple({"node_rank": rank, **message["about"]} for rank, message in messages.items()),
        {str(rank): {key: message[key] for key in shown} for rank, message in messages.items()},
    )
