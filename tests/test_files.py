"""Files on a shared directory: one winner, whatever error codes say; and the one way to wait for a mount that fails for a moment."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.loop import LookAgain
from fsbarrier.coordination.polling import Pace
from fsbarrier.coordination.run_rules import make_rules, poll_intervals
from fsbarrier.program import Phase, Program
from fsbarrier.protocol.facts import Fact
from fsbarrier.rundir.record_store import PosixStore, UnreadableRecord
from fsbarrier.settings.sections import CoordinationSettings, Settings
from fsbarrier.store import files
from fsbarrier.store.retry import Backoff, fails, fails_or_hides, patiently

PROCESSES, NAMES = 4, 50


def link_fails(number: int) -> None:
    """Make `os.link` fail in this process."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    os.link = fail  # type: ignore[assignment]


def race(
    folder: Path,
    me: int,
    start: multiprocessing.synchronize.Barrier,
) -> list[bool]:
    start.wait(240)
    return [files.create_exclusive(folder / f"{n}", b"%d" % me * 50, durable=False) for n in range(NAMES)]


def racer(folder: Path, me: int, start, results) -> None:  # type: ignore[no-untyped-def]
    results.put((me, race(folder, me, start)))


def test_one_process_wins_each_name(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(PROCESSES), context.Queue()
    racers = [context.Process(target=racer, args=(tmp_path, me, start, results)) for me in range(PROCESSES)]
    for process in racers:
        process.start()
    wins = dict(results.get(timeout=240) for _ in racers)
    for process in racers:
        process.join(240)
    for number in range(NAMES):
        winners = [me for me, won in wins.items() if won[number]]
        assert len(winners) == 1
        assert (tmp_path / f"{number}").read_bytes() == b"%d" % winners[0] * 50
    assert len(os.listdir(tmp_path)) == NAMES, "a temporary file is left"


def test_an_absence_that_is_remembered_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client may say ENOENT of a name that another created, until the directory is listed."""
    path, real, listed = tmp_path / "record", os.stat, []
    path.write_bytes(b"theirs")

    def stat(asked: object, **kwargs: object) -> os.stat_result:
        if asked == path and not listed:
            raise FileNotFoundError(errno.ENOENT, "remembered", str(path))
        return real(asked, **kwargs)  # type: ignore[arg-type]

    def listdir(asked: Path) -> list[str]:
        listed.append(asked)
        return [path.name]

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "listdir", listdir)
    assert not files.create_exclusive(path, b"mine")
    assert listed and path.read_bytes() == b"theirs"


def test_a_directory_that_another_node_made_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This mount still says that it is absent: neither made (EEXIST) nor entered (ENOENT), until it looks again."""
    made, hidden, is_dir, look = tmp_path / "made", [3], Path.is_dir, files._look

    def late(path: Path) -> bool:
        hidden[0] -= path == made
        return is_dir(path) and (path != made or hidden[0] < 0)

    monkeypatch.setattr(Path, "is_dir", late)
    monkeypatch.setattr(files, "_look", lambda path: look(path) if hidden[0] < 0 else None)
    os.mkdir(made)
    with pytest.raises(FileNotFoundError):
        files.try_to_make_dirs(made)
    files.make_dirs(made / "below")
    assert hidden[0] < 0 and (made / "below").is_dir()


def lose_replies(monkeypatch: pytest.MonkeyPatch, name: str, count: int = 1) -> None:
    """The next `count` calls of `os.NAME` are done, and an error comes back."""
    real, left = getattr(os, name), [count]

    def call(*args: object, **kwargs: object) -> object:
        result = real(*args, **kwargs)
        if left[0] <= 0:
            return result
        left[0] -= 1
        if name == "open":
            os.close(result)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("mount_point_stays", [True, False])
def test_the_directory_of_a_run_that_is_gone_is_not_made_again(
    tmp_path: Path, mount_point_stays: bool
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").touch()
    files.make_dirs_only_beside(run / "run.json")
    files.try_to_make_dirs(run / "coordination" / "gen-000001")
    run.rename(tmp_path / "away")
    if mount_point_stays:
        run.mkdir()
    with pytest.raises(OSError, match="the run was moved, removed or unmounted"):
        files.try_to_make_dirs(run / "coordination" / "gen-000001")
    assert not mount_point_stays or os.listdir(run) == []
    files.try_to_make_dirs(tmp_path / "elsewhere")


def test_a_lost_reply_is_recognised_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        lose_replies(patch, "mkdir", 2)
        files.try_to_make_dirs(tmp_path / "a" / "b")
    for name in ("open", "replace"):
        with monkeypatch.context() as patch:
            lose_replies(patch, name)
            files.write_atomic(tmp_path / "a" / name, b"content")
    for name in ("open", "link"):
        with monkeypatch.context() as patch:
            lose_replies(patch, name)
            assert files.create_exclusive(tmp_path / "a" / f"new-{name}", b"content")
    for name in ("link", "replace"):
        with monkeypatch.context() as patch:
            lose_replies(patch, name)
            files.link(tmp_path / "a" / "open", tmp_path / "a" / f"second-{name}")
    with monkeypatch.context() as patch:
        lose_replies(patch, "open")
        os.close(files.open_append(tmp_path / "a" / "log"))
    contents = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
    assert contents.pop("log") == b"" and set(contents.values()) == {b"content"}
    assert contents.keys() == {"open", "replace", "new-open", "new-link", "second-link", "second-replace"}


def test_two_who_append_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Also where one of them created the file."""
    first, second = files.open_append(tmp_path / "log"), files.open_append(tmp_path / "log")
    try:
        for fd in (first, second, first):
            os.write(fd, b"line\n")
    finally:
        os.close(first)
        os.close(second)
    assert (tmp_path / "log").read_bytes() == b"line\n" * 3


def test_a_folder_in_the_place_of_a_record_is_an_unreadable_record(tmp_path: Path) -> None:
    store, path = PosixStore(), tmp_path / "facts" / "iter-000001.node-0000.done"
    files.make_dirs(path)
    assert store.names(path.parent) == [path.name]
    assert store.read(path, Fact) is None
    with pytest.raises(UnreadableRecord, match="cannot be read"):
        store.must_read(path, Fact)


def test_without_hard_links_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", os.link)  # put back afterwards
    link_fails(errno.EOPNOTSUPP)
    with pytest.raises(OSError):
        files.create_exclusive(tmp_path / "record", b"content")
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PosixStore()
    assert store.names(tmp_path / "not there") == []
    for number in (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTDIR):
        with monkeypatch.context() as patched:

            def fail(path: Path, number: int = number) -> list[str]:
                raise OSError(number, os.strerror(number), str(path))

            patched.setattr(os, "listdir", fail)
            with pytest.raises(OSError, match=str(tmp_path)):
                store.names(tmp_path)


# --- what is tried again ------------------------------------------------------------------------------------------------------


class Mount(threading.Event):
    """Its operation takes `takes_s` and fails until `fails_until`; a wait advances the clock."""

    def __init__(self, code: int, fails_until: float, takes_s: float = 0.0) -> None:
        super().__init__()
        self.now, self.tries = 0.0, 0
        self._code, self._fails_until, self._takes_s = code, fails_until, takes_s

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()

    def operation(self) -> float:
        self.tries += 1
        self.now += self._takes_s
        if self.now < self._fails_until:
            raise OSError(self._code, os.strerror(self._code))
        return self.now


@pytest.mark.parametrize(
    ("code", "passes", "lasts_s"),
    [(errno.EIO, fails, 9.0), (errno.ESTALE, fails_or_hides, 9.0), (errno.ENOENT, fails_or_hides, 9.0)],
)
def test_what_passes_in_time_is_waited_for(
    code: int, passes: Callable[[Exception], bool], lasts_s: float
) -> None:
    mount = Mount(code, lasts_s)
    assert (
        lasts_s
        <= patiently(mount.operation, 10.0, passes=passes, cancel=mount, clock=lambda: mount.now)
        < 9.5
    )
    # The last repetition happens exactly when the time is up.
    late = Mount(code, 10.1)
    with pytest.raises(OSError, match=os.strerror(code)):
        patiently(late.operation, 10.0, passes=passes, cancel=late, clock=lambda: late.now)
    assert late.now == pytest.approx(10.0)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_what_does_not_pass_is_raised_at_once(code: int) -> None:
    mount = Mount(code, 60.0)
    with pytest.raises(OSError, match=os.strerror(code)):
        patiently(mount.operation, 10.0, cancel=mount, clock=lambda: mount.now)
    assert mount.tries == 1


@pytest.mark.parametrize(
    ("takes_s", "lasts_s", "within_s"),
    [
        pytest.param(1800.0, 7000.0, 120.0, id="a program of half an hour that meets three outages"),
        pytest.param(14.0, 50.0, 25.0, id="a process that is stopped while its operation fails"),
    ],
)
def test_long_operations_are_repeated_several_times(takes_s: float, lasts_s: float, within_s: float) -> None:
    mount = Mount(errno.EIO, lasts_s, takes_s)
    assert patiently(mount.operation, within_s, cancel=mount, clock=lambda: mount.now) > lasts_s


def test_operations_that_hang_before_they_fail_are_given_up() -> None:
    mount = Mount(errno.EIO, float("inf"), takes_s=200.0)
    with pytest.raises(OSError, match="Input/output"):
        patiently(mount.operation, 120.0, cancel=mount, clock=lambda: mount.now)
    assert mount.tries == 13


def test_whoever_is_cancelled_waits_no_more() -> None:
    mount = Mount(errno.EIO, 60.0)
    mount.set()
    with pytest.raises(OSError, match="Input/output"):
        patiently(mount.operation, 10.0, cancel=mount, clock=lambda: mount.now)
    assert mount.tries == 1


# --- a node's looks -------------------------------------------------------------------------------------------------------------

OUTAGE_S = 10.0


class FailingMount:
    """A node's loop on a mount that fails from time to time."""

    def __init__(self, root: Path) -> None:
        self.fails = False
        self.observer = SimpleNamespace(
            paths=SimpleNamespace(root=root),
            intervals=SimpleNamespace(outage_s=OUTAGE_S),
            schedule=SimpleNamespace(beats_due=0.0),
        )
        self.node, self.store = SimpleNamespace(rank=2), None
        self.exit: Any = None
        self.write_event = lambda event, node, fields: None

    def tick(self, now: float) -> LookAgain:
        if self.fails:
            raise OSError(5, "the mount fails")
        return LookAgain.LATER


@pytest.fixture
def mount(tmp_path: Path) -> FailingMount:
    return FailingMount(tmp_path)


def life(mount: FailingMount) -> NodeLife:
    return NodeLife(cast(Any, mount), lambda: None, 2.0, Backoff(0.001, 0.05), 0.0)


def test_a_failing_mount_is_tried_again_for_the_time_of_an_outage(mount: FailingMount) -> None:
    node, mount.fails = life(mount), True
    node.tick(100.0)
    node.tick(100.0 + OUTAGE_S - 0.1)
    assert mount.exit is None
    node.tick(100.0 + OUTAGE_S)
    assert mount.exit.code == 3 and re.match(r"node 2: .* has failed for 10 s", mount.exit.reason)


def test_errors_with_good_looks_between_them_are_no_outage(mount: FailingMount) -> None:
    node = life(mount)
    for now in range(0, 100, 6):
        for mount.fails in (True, False):
            node.tick(now + 1.0 - mount.fails)
            assert node.failing is mount.fails
    assert mount.exit is None


def test_looks_are_quick_again_as_soon_as_something_has_happened(mount: FailingMount) -> None:
    """A pause is a part of this wait, however long the wait before took."""
    mount.observer.schedule.beats_due = float("inf")
    pace, pauses = Pace(cast(Any, mount)), Backoff(0.001, 0.05)
    assert pace.next_pause(0.0, pauses, LookAgain.LATER) == 0.001
    assert pace.next_pause(100.0, pauses, LookAgain.AT_USUAL_PACE) == 1.0
    assert pace.next_pause(101.0, pauses, LookAgain.NOW) == 0.0
    assert pace.next_pause(101.01, pauses, LookAgain.AT_USUAL_PACE) < 0.01


def test_the_times_of_a_node_are_those_of_its_settings() -> None:
    coordination = CoordinationSettings(beat_s=3.0, dead_s=20.0)
    settings = Settings(coordination=coordination, num_nodes=2)
    limits = make_rules(settings, Program("ping", (Phase(0, "only"),)), 0).limits
    assert (limits.suspect_s, limits.dead_s, limits.stagger_s) == (12.0, 20.0, 6.0)
    intervals = poll_intervals(settings)
    # A longer time without a look is one and a half beats.
    assert (intervals.poll_gap_s, intervals.outage_s) == (4.5, 240.0)
