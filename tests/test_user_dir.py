"""Locks and sockets lie where only this user can go; what another user puts in the way is named."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from cluster import Cluster
from other_user import UID, needs_root

from fsbarrier.processes.memory import SHARED_MEMORY
from fsbarrier.store.scratch_dir import PREFIX, SHORT_PLACE
from fsbarrier.store.user_dir import user_dir


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


def test_the_folder_is_in_the_temporary_directory_and_this_users_alone(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = user_dir()
    finally:
        os.umask(before)
    assert folder == temporary / f"fsbarrier-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert user_dir() == folder


@needs_root
def test_what_another_user_has_put_there_is_named_and_not_used(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    (temporary / "fsbarrier-0").mkdir(parents=True)
    os.chown(temporary / "fsbarrier-0", UID, UID)
    with Cluster(tmp_path, 1, "--iterations", "1", program="ping", real=True) as cluster:
        cluster.env[0] = {"TMPDIR": str(temporary)}
        cluster.start()
        assert cluster.wait() == {0: 2}, cluster.said(0)
        said = cluster.said(0)
        assert f"{temporary}/fsbarrier-0 belongs to user id {UID}; remove it, or set TMPDIR" in said
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
