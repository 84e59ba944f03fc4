"""Wake-up hints: a file that appears wakes; a mount that is not local, and a directory that is not there, do no harm."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fsbarrier.coordination import directory_watch
from fsbarrier.store import files
from fsbarrier.store.mounts import Mount


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_watch, "mount_of", lambda path: Mount("ext4", "disk", ()))


def test_a_fact_that_appears_wakes(tmp_path: Path, local: None) -> None:
    woken = threading.Event()
    watcher = directory_watch.Hints(tmp_path, woken.set)
    watcher.watch(tmp_path)
    files.write_atomic(tmp_path / "node-0001.done", b"fact")
    assert woken.wait(30)
    watcher.close()


def test_looking_is_no_news(tmp_path: Path, local: None) -> None:
    """A node that lists the directory it watches must not wake itself, again and again."""
    (tmp_path / "old").write_bytes(b"fact")
    woken, events = threading.Event(), []

    def wake() -> None:
        events.append(1)
        woken.set()

    watcher = directory_watch.Hints(tmp_path, wake)
    watcher.watch(tmp_path)
    for _ in range(50):
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"fact"]
    files.write_atomic(tmp_path / "new", b"fact")
    assert woken.wait(30)
    watcher.close()
    assert len(events) < 10


def test_only_the_directory_of_now_is_watched(tmp_path: Path, local: None) -> None:
    woken = threading.Event()
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    watcher = directory_watch.Hints(tmp_path, woken.set)
    watcher.watch(old)
    watcher.watch(new)
    files.write_atomic(old / "fact", b"late")
    files.write_atomic(new / "fact", b"now")
    assert woken.wait(30)
    watcher.watch(None)
    watcher.close()


def test_what_cannot_be_watched_does_no_harm(tmp_path: Path, local: None) -> None:
    watcher = directory_watch.Hints(tmp_path, lambda: None)
    watcher.watch(tmp_path / "missing")
    watcher.watch(tmp_path)
    watcher.close()


def test_a_network_mount_is_never_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_watch, "mount_of", lambda path: Mount("nfs4", "server:/export", ()))
    watcher = directory_watch.Hints(tmp_path, lambda: None)
    watcher.watch(tmp_path)
    assert watcher._observer is None
