"""Folders of one process: made while others clean up, and removed when nobody holds them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from other_user import UID, needs_root

from fsbarrier.store import owned
from fsbarrier.store.scratch_dir import PREFIX, remove_abandoned, scratch_dir


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
    with scratch_dir(tmp_path, "mine") as folder:
        assert str(folder) == made[2] and folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_what_nobody_holds_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}old-x").mkdir()
    (tmp_path / "other").mkdir()
    with scratch_dir(tmp_path, "a") as first, scratch_dir(tmp_path, "b") as second:
        assert sorted(os.listdir(tmp_path)) == sorted([first.name, second.name, "other"])


@needs_root
def test_another_users_is_left_alone_also_by_root(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}theirs-x"
    theirs.mkdir()
    os.chown(theirs, UID, UID)
    remove_abandoned(tmp_path)
    assert theirs.is_dir()


def test_no_link_is_followed_to_what_is_removed(tmp_path: Path) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    (precious / "letters").mkdir(parents=True)
    run.mkdir()
    (run / "old").symlink_to(precious)
    with pytest.raises(OSError, match="is a link"):
        owned.remove(run / "old" / "letters", run)
    owned.remove(run / "old", run)
    assert (precious / "letters").is_dir() and not os.path.lexists(run / "old")
