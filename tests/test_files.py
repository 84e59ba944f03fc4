"""Exclusive creation: one winner, whatever error codes say."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from fsbarrier.protocol.facts import Fact
from fsbarrier.rundir.record_store import PosixStore, UnreadableRecord
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
