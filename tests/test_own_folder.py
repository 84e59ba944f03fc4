"""Folders of one process: made while others clean up, and removed when nobody holds them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from other_user import UID, needs_root

from fsbarrier.store import owned
from fsbarrier.store.own_folder import PREFIX, own_folder, remove_abandoned


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = tempfile.mkdtemp, list[str]()

    def mkdtemp(**where: object) -> str:
        made.append(real(**where))  # type: ignore[call-overload]
        if len(made) <= 2:
            shutil.rmtree(made[-1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with own_folder(tmp_path, "mine") as folder:
        assert str(folder) == made[2] and folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_what_nobody_holds_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}old-x").mkdir()
    (tmp_path / "other").mkdir()
    with own_folder(tmp_path, "a") as first, own_folder(tmp_path, "b") as second:
        assert sorted(os.listdir(tmp_path)) == sorted([first.name, second.name, "other"])


@needs_root
def test_another_users_is_left_alone_also_by_root(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}theirs-x"
    theirs.mkdir()
    os.chown(theirs, UID, UID)
    remove_abandoned(tmp_path)
    assert theirs.is_dir()


def test_what_somebody_puts_in_its_place_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inside").mkdir(parents=True)
    with own_folder(tmp_path, "mine") as folder:
        (folder / "file").write_text("")
        folder.rename(tmp_path / "moved")
        precious.rename(folder)
    assert (folder / "inside").is_dir() and os.listdir(tmp_path / "moved") == []


def test_a_link_and_what_belongs_to_somebody_else_are_not_followed_or_removed(tmp_path: Path) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    (precious / "letters").mkdir(parents=True)
    run.mkdir()
    (run / "old").symlink_to(precious)
    with pytest.raises(OSError, match="is a link"):
        owned.remove(run / "old" / "letters", run)
    owned.remove(run / "old", run)
    assert (precious / "letters").is_dir() and not os.path.lexists(run / "old")
    if os.geteuid() == 0:
        (run / "theirs").mkdir()
        os.chown(run / "theirs", 65534, 65534)
        with pytest.raises(owned.NotOwn, match="belongs to nobody"):
            owned.remove(run / "theirs", run)
    with owned.scratch(run, "scratch-") as scratch:
        (scratch / "mine").mkdir()
        (made,) = run.glob("scratch-*")
        made.rename(tmp_path / "moved")
        made.symlink_to(precious)
    assert (precious / "letters").is_dir() and os.listdir(tmp_path / "moved") == []
