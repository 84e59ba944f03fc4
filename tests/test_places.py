"""The catalogue of places (tests/places): each launcher's environment, and machines and folders other than a developer's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import typed
from fuse import mounting
from places.launchers import LAUNCHED

from fsbarrier.cli.start import ranks
from fsbarrier.errors import UsageError

FAST = ("coordination.beat_s=0.2", "coordination.last_call_s=0.5")


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_node_takes_its_rank_and_the_number_of_nodes_from_each_launcher(name: str) -> None:
    node = LAUNCHED[name]
    if node.expected is None:
        with pytest.raises(UsageError) as caught:
            rank = ranks.node_rank(master=False, worker=None, environ=node.environ)
            ranks.check_count(rank, node.environ, dry_run=False)
        assert node.says in str(caught.value)
        return
    rank = ranks.node_rank(master=False, worker=None, environ=node.environ)
    count = ranks.count_nodes(rank, node.environ)
    assert (rank and rank.value, count and count.value) == node.expected


# --- a mount that sets all modes itself ------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(mounting.missing()), reason=mounting.missing() or "")
def test_a_mount_with_forced_modes_is_told_from_a_folder_that_somebody_opened(tmp_path: Path) -> None:
    words = ("run", "--program", "toy", "--iterations", "1", *FAST, "--log-path")
    with mounting.mounted(tmp_path / "behind", tmp_path / "azure", ["--forced-mode", "0777"]) as mount:
        said = typed(*words, str(mount / "run"), code=2).err
        for part in (
            "has mode 0777",
            "chmod cannot change it",
            "dir_mode=0700,file_mode=0600",
            "--trust-mount",
        ):
            assert part in said
        assert "run chmod" not in said
        typed(*words, str(mount / "run"), "--trust-mount")
        # Each start says so itself, and whoever repairs the run does too.
        assert "--trust-mount" in typed(*words, str(mount / "run"), code=2).err
        recover = ("recover", "--iteration", "1", "--dry-run", "--log-path", str(mount / "run"))
        assert "--trust-mount" in typed(*recover, code=2).err
        typed(*recover, "--trust-mount")
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    for flag in ((), ("--trust-mount",)):
        assert f"run chmod o-w {opened}" in typed(*words, str(opened), *flag, code=2).err
