"""Locks and sockets lie where only this user can go; what another user puts in the way blocks nobody and is named."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from cluster import Cluster
from other_user import UID, needs_root

from fsbarrier.host.memory import SHARED_MEMORY
from fsbarrier.store.own_folder import PREFIX, SHORT_PLACE
from fsbarrier.store.private_folder import private_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return temporary


def test_the_folder_is_in_the_temporary_directory_and_this_users_alone(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder()
    finally:
        os.umask(before)
    assert folder.path == temporary / f"fsbarrier-{os.geteuid()}" and not folder.passed_over
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert private_folder() == folder


@needs_root
def test_another_user_cannot_block_a_rank(tmp_path: Path) -> None:
    """He made the folder of the locks first, with all the locks that he could think of in it."""
    temporary = tmp_path / "tmp"
    (temporary / "fsbarrier-0").mkdir(parents=True)
    os.chown(temporary / "fsbarrier-0", UID, UID)
    with Cluster(tmp_path, 1, "--iterations", "1", program="ping", real=True) as cluster:
        cluster.env[0] = {"TMPDIR": str(temporary), "HOME": str(tmp_path), "XDG_RUNTIME_DIR": ""}
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert f"{temporary}/fsbarrier-0 belongs to user {UID}" in cluster.said(0)
    assert not list((temporary / "fsbarrier-0").iterdir())


def test_a_start_clears_away_the_folders_of_killed_daemons_wherever_they_lie(tmp_path: Path) -> None:
    """Also where it makes none itself: a folder for sockets, a copy of weights in memory."""
    places = [place for place in (SHORT_PLACE, SHARED_MEMORY) if os.access(place, os.W_OK)]
    left = [Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)) for place in places]
    with Cluster(tmp_path, 1, "--iterations", "1", program="ping", real=True) as cluster:
        cluster.env[0] = {"TMPDIR": str(tmp_path)}
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
    assert not [folder for folder in left if folder.exists()]
