"""Exclusive creation: one winner with hard links and without, whatever error codes say."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.protocol.facts import Fact
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files

PROCESSES, NAMES = 4, 50


def link_fails(number: int) -> None:
    """Make `os.link` fail in this process."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    os.link = fail  # type: ignore[assignment]


def race(
    folder: Path,
    me: int,
    without_links: bool,
    never_torn: bool,
    start: multiprocessing.synchronize.Barrier,
) -> list[bool]:
    if without_links:
        link_fails(errno.EOPNOTSUPP)
    start.wait(30)
    return [
        files.create_exclusive(folder / f"{n}", b"%d" % me * 50, durable=False, never_torn=never_torn)
        for n in range(NAMES)
    ]


def racer(folder: Path, me: int, without_links: bool, never_torn: bool, start, results) -> None:  # type: ignore[no-untyped-def]
    results.put((me, race(folder, me, without_links, never_torn, start)))


@pytest.mark.parametrize("never_torn", [False, True])
@pytest.mark.parametrize("without_links", [(), (0, 1, 2, 3), (0, 2)], ids=["links", "none", "mixed"])
def test_one_process_wins_each_name(tmp_path: Path, without_links: tuple[int, ...], never_torn: bool) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(PROCESSES), context.Queue()
    racers = [
        context.Process(target=racer, args=(tmp_path, me, me in without_links, never_torn, start, results))
        for me in range(PROCESSES)
    ]
    for process in racers:
        process.start()
    wins = dict(results.get(timeout=60) for _ in racers)
    for process in racers:
        process.join(30)
    for number in range(NAMES):
        winners = [me for me, won in wins.items() if won[number]]
        assert len(winners) == 1
        assert files.read_created(tmp_path / f"{number}") == b"%d" % winners[0] * 50
    assert len(os.listdir(tmp_path)) == NAMES, "a temporary file is left"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_the_name_itself_is_created_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", os.link)  # put back afterwards
    link_fails(number)
    path = tmp_path / "record"
    assert files.create_exclusive(path, b"first")
    assert not files.create_exclusive(path, b"second")
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["record"]


def test_without_hard_links_a_killed_process_leaves_no_torn_record(tmp_path: Path) -> None:
    """Killed before each of its calls in turn: the name is free, and the next one wins it, or the record is whole."""
    calls = ("mkdir", "chmod", "open", "write", "fsync", "close", "rename", "unlink", "stat")
    killed_at, path = 0, tmp_path
    while not (killed_at and path.exists() and files.read_created(path) == b"first"):
        killed_at += 1
        assert killed_at < 60
        path = tmp_path / f"record-{killed_at}"
        if (child := os.fork()) == 0:
            link_fails(errno.EOPNOTSUPP)
            left = killed_at

            def counted(call: Callable[..., Any]) -> Callable[..., Any]:
                def count(*args: Any, **more: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if not left:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **more)

                return count

            for name in calls:
                setattr(os, name, counted(getattr(os, name)))
            files.create_exclusive(path, b"first", never_torn=True)
            os._exit(0)
        os.waitpid(child, 0)
        assert not path.exists() or files.read_created(path) == b"first"
        won = files.create_exclusive(path, b"second", never_torn=True)
        assert files.read_created(path) == (b"second" if won else b"first")
    assert killed_at > 8
    # What is left of those that were killed is a temporary name, which readers skip.
    assert all(name.startswith((".record-", "record-")) for name in os.listdir(tmp_path))


def test_without_hard_links_a_lost_reply_is_a_win_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", os.link)
    link_fails(errno.EOPNOTSUPP)
    real, path = os.rename, tmp_path / "record"

    def rename(*args: Any) -> None:
        real(*args)
        raise OSError(errno.EIO, "the reply is lost")

    monkeypatch.setattr(os, "rename", rename)
    assert files.create_exclusive(path, b"mine", never_torn=True)
    assert not files.create_exclusive(path, b"theirs", never_torn=True)
    assert files.read_created(path) == b"mine" and os.listdir(tmp_path) == ["record"]


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
            files.link_or_copy(tmp_path / "a" / "open", tmp_path / "a" / f"second-{name}")
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


def test_a_record_that_is_a_folder_is_read_and_removed_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As records are made where there are no hard links; what a process left that was killed is no record."""

    def no_links(*names: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store, path = PosixStore(), tmp_path / "facts" / "iter-000001.node-0000.done"
    store.make_dir(path.parent)
    assert store.create(path, Fact(0, 1, "done")) and path.is_dir()
    files.temporary_beside(path).mkdir()
    assert store.names(path.parent) == [path.name]
    assert store.read(path, Fact) == Fact(0, 1, "done")
    store.remove(path)
    assert store.names(path.parent) == []


def test_without_hard_links_a_name_that_is_taken_in_this_moment_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, open_new = tmp_path / "claim", files.open_new

    def no_links(*names: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def other_is_first(name: Path, more_flags: int = 0) -> int:
        if name == path:
            path.write_bytes(b"theirs")
        return open_new(name, more_flags)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(files, "open_new", other_is_first)
    assert not files.create_exclusive(path, b"ours", durable=False)
    assert path.read_bytes() == b"theirs"


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
