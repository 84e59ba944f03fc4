"""Exclusive creation: one winner with hard links and without, whatever error codes say."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from fsbarrier import files

PROCESSES, NAMES = 4, 50


def link_fails(number: int) -> None:
    """Make `os.link` fail in this process."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    os.link = fail  # type: ignore[assignment]


def race(
    folder: Path, me: int, without_links: bool, start: multiprocessing.synchronize.Barrier
) -> list[bool]:
    if without_links:
        link_fails(errno.EOPNOTSUPP)
    start.wait(30)
    return [files.create_exclusive(folder / f"{n}", b"%d" % me * 50, durable=False) for n in range(NAMES)]


def racer(folder: Path, me: int, without_links: bool, start, results) -> None:  # type: ignore[no-untyped-def]
    results.put((me, race(folder, me, without_links, start)))


@pytest.mark.parametrize("without_links", [(), (0, 1, 2, 3), (0, 2)], ids=["links", "none", "mixed"])
def test_one_process_wins_each_name(tmp_path: Path, without_links: tuple[int, ...]) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(PROCESSES), context.Queue()
    racers = [
        context.Process(target=racer, args=(tmp_path, me, me in without_links, start, results))
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
        assert (tmp_path / f"{number}").read_bytes() == b"%d" % winners[0] * 50
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


def test_a_reply_that_got_lost_is_a_win_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        raise FileExistsError(errno.EEXIST, "the retransmitted request found its own link")

    monkeypatch.setattr(os, "link", link)
    assert files.create_exclusive(tmp_path / "record", b"mine")


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


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", os.link)
    link_fails(errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        files.create_exclusive(tmp_path / "record", b"mine")
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_there_and_not_seen_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node made it, and this one's mount still says that it is absent."""
    monkeypatch.setattr(Path, "is_dir", lambda self: self == tmp_path)
    monkeypatch.setattr(Path, "exists", lambda self: self == tmp_path)
    os.mkdir(tmp_path / "made")
    files.make_dirs(tmp_path / "made")


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="exists"):
        files.make_dirs(tmp_path / "file")


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
