"""The doctor's visits: `alone` from one node, `together` with the doctors of others, `short` at the start of a run."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.doctor import across, mount_options, probes, verdict
from fsbarrier.doctor.connections import Door, reached
from fsbarrier.doctor.findings import OK, REFUSED, Check, Report
from fsbarrier.doctor.meeting import Meeting
from fsbarrier.errors import TooFewNodes
from fsbarrier.machine.addresses import candidate_addresses
from fsbarrier.machine.host import boot_id
from fsbarrier.machine.mounts import LOCAL, Mount, mount_of

WAIT_S = 60.0
ALONE = "from this node alone: what other nodes see, and how late, only several can tell (--num-nodes)"


def alone(path: Path) -> Report:
    """All that one node can find out about `path`, an existing directory. Raises OSError."""
    mount = mount_of(path)
    scratch = path / probes.scratch_name()
    files.make_dirs(scratch)
    try:
        checks = _own_checks(path, mount, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    versions = ", ".join(f"{name} {version}" for name, version in probes.versions().items())
    return _presumed(path, mount, [*checks, Check("versions", OK, versions)])


def short(path: Path, *, write: bool = True) -> Report:
    """What the start of a run asks: type, options, a few races and replacements; `write`: False looks only. Raises OSError.

    `path` need not exist yet: its nearest parent that does is examined.
    """
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    mount = mount_of(there)
    checks = mount_options.judge(mount)
    if write and not any(check.level == REFUSED for check in checks):
        scratch = there / probes.scratch_name()
        files.make_dirs(scratch)
        try:
            checks += _tried(probes.quick_races(scratch), scratch, replacements=8, samples=4)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return _presumed(path, mount, checks)


def _presumed(path: Path, mount: Mount, checks: list[Check]) -> Report:
    stale_s = mount.family.stale_s
    return Report(str(path), mount.family.category, ALONE, stale_s, verdict.timeouts(stale_s), tuple(checks))


def _own_checks(path: Path, mount: Mount, scratch: Path) -> list[Check]:
    judged = mount_options.judge(mount)
    if any(check.level == REFUSED for check in judged):
        return judged
    tried = _tried(probes.exclusive_create(scratch), scratch, probes.REPLACEMENTS, probes.SAMPLES)
    return [*judged, *tried, *probes.space(path), *probes.this_node()]


def _tried(races: Check, scratch: Path, replacements: int, samples: int) -> list[Check]:
    if races.level == REFUSED:
        return [races]
    return [races, probes.replacement(scratch, replacements), *probes.latencies(scratch, samples)]


def together(
    path: Path,
    num_nodes: int,
    rank: int | None,
    wait_s: float = WAIT_S,
    say: Callable[[str], None] = print,
    breaks_off: Callable[[], None] = lambda: None,
) -> Report:
    """What `num_nodes` doctors find out about the directory they share. All give the same answer.

    `say` is told what is waited for; `breaks_off` is called again and again, and may raise to end it in order.
    Raises TooFewNodes where one does not come or goes away, UsageError where they contradict each other, OSError.
    """
    mount = mount_of(path)
    if any(check.level == REFUSED for check in mount_options.judge(mount)):
        return alone(path)  # nothing that nodes could find out makes it fit
    meeting, done = Meeting(path, num_nodes, rank, wait_s, say, breaks_off), False
    try:
        me = meeting.meet(across.FOLDERS)
        if rank is None:
            say(f"this is node {me}")
        said = _examine(path, mount, meeting, me)
        done = True
    except TooFewNodes as error:
        if meeting.members or mount.family.category != LOCAL:
            raise
        raise TooFewNodes(
            f"{error} Here it is {mount.kind} from {mount.source}, which is this host's own."
        ) from None
    finally:
        meeting.close(done=done)
    return _conclude(path, said)


def _examine(path: Path, mount: Mount, meeting: Meeting, me: int) -> dict[int, dict[str, Any]]:
    """This node's part, and what all the nodes said in the end."""
    about = {
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "addresses": candidate_addresses(),
        "versions": probes.versions(),
        "accelerators": probes.accelerators_here(),
        "mount": asdict(mount),
    }
    here = meeting.on_one_host()
    addresses = ["127.0.0.1"] if here else about["addresses"]
    across.prepare(meeting, me)
    with Door(meeting.token, loopback=here) as door:
        hello = {"port": door.port, "word": meeting.token, "addresses": addresses}
        doors = meeting.exchange("hello", hello)
        with across.Answering(meeting, me):
            reach = reached({rank: other for rank, other in doors.items() if rank != me})
            scratch = meeting.session / f"scratch-{me}"
            files.make_dirs(scratch)
            meeting.breaks_off()
            own = _own_checks(path, mount, scratch)
            meeting.breaks_off()
            reading, lags = across.reading(meeting, me), across.lags(meeting, me)
            races = across.race(
                meeting, me, lags.clock()
            )  # only now has everybody had its answers, and knocked
    message = {
        **across.found(races, reading, lags),
        "about": {**about, "addresses": addresses},
        "reached": {str(rank): answered for rank, answered in reach.items()},
        "checks": [asdict(check) for check in own],
    }
    return meeting.exchange("findings", message, last=True)


def _conclude(path: Path, said: dict[int, dict[str, Any]]) -> Report:
    own = {rank: [Check(**check) for check in message["checks"]] for rank, message in said.items()}
    mounted = [Mount(**message["about"]["mount"]) for message in said.values()]
    hint = "; ".join(dict.fromkeys(mount.fresher for mount in mounted))
    checks = [*verdict.merged(own), *verdict.between(said, hint)]
    stale_s = verdict.stale_s(said)
    nodes = tuple({"node_rank": rank, **message["about"]} for rank, message in said.items())
    measured = {
        str(rank): {key: message[key] for key in ("lags", "clock", "reading", "reached")}
        for rank, message in said.items()
    }
    proven = f"between {len(said)} nodes, by measurement"
    kind = verdict.kind_of(said)
    return Report(str(path), kind, proven, stale_s, verdict.timeouts(stale_s), tuple(checks), nodes, measured)
