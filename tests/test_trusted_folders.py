"""A run directory or a pool that somebody else made or can change is not used: its program would run as the victim."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import typed

from fsbarrier.errors import UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.store import trusted_folder

SOMEBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes another user's files")

PROGRAM = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("")
from fsbarrier.loader import load_program
PROGRAM = load_program("ping")
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of another user, with a program of his, that everybody may read."""
    place = tmp_path / "of-somebody"
    place.mkdir()
    (place / "mine.py").write_text(PROGRAM)
    words = [
        "run",
        "--program",
        str(place / "mine.py"),
        "--log-path",
        str(place / "run"),
        "--iterations",
        "1",
    ]
    typed(*words)
    (place / "mine.py").with_name("ran").unlink()
    for path in (place, *place.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    monkeypatch.chdir(tmp_path)
    return place


@needs_root
@pytest.mark.parametrize(
    "words",
    [
        ["run", "--worker", "1"],
        ["run", "--master", "--num-nodes", "2", "--iterations", "2"],
        ["run", "--dry-run"],
        ["launch", "local", "--nodes", "1"],
        ["recover", "--iteration", "1", "--dry-run"],
        ["recover", "--iteration", "1"],
    ],
    ids=" ".join,
)
def test_another_users_run_is_refused_and_its_program_is_not_loaded(words: list[str], foreign: Path) -> None:
    # A damaged generation makes `recover` ask the program where to continue.
    (foreign / "run" / "coordination" / "generations" / "gen-000001.json").write_text("{")
    said = typed(*words, "--log-path", foreign / "run", code=2).err
    assert "belongs to nobody" in said and "could run code as you" in said and said.count("\n") == 1
    assert not (foreign / "ran").exists(), "the other user's program ran"


@needs_root
@pytest.mark.parametrize("record", [True, False], ids=["with a record", "empty"])
def test_a_run_directory_that_somebody_else_makes_during_the_start_is_refused(
    record: bool, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder such as /tmp, everybody may make what is not there yet."""
    log_path, new = tmp_path / "run", runrecord.new

    def meanwhile(*args: object, **more: object) -> object:
        os.rename(foreign / "run", log_path)
        if not record:
            (log_path / "run.json").unlink()
        return new(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(runrecord, "new", meanwhile)
    said = typed("run", "--program", "ping", "--iterations", "1", "--log-path", log_path, code=2)
    assert "belongs to nobody" in said.err
    assert not (foreign / "ran").exists(), "the other user's program ran"


@needs_root
def test_another_users_pool_is_refused(foreign: Path) -> None:
    pool = foreign / "pool"
    pool.mkdir()
    os.chown(pool, SOMEBODY, SOMEBODY)
    said = typed("daemon", pool, code=2)
    assert "belongs to nobody" in said.err and not list(pool.iterdir())
    for name in ("log", "logs", "runs", "coordination"):
        (pool / name).mkdir()
    for words in (["daemon", str(pool)], ["submit", str(pool), "--program", "ping"]):
        assert "belongs to nobody" in typed(*words, code=2).err


@needs_root
@pytest.mark.parametrize(
    ("change", "shared_group", "says"),
    [
        (lambda home: None, False, ""),
        (lambda home: None, False, "the link is somebody's"),
        (lambda home: home.chmod(0o777), False, "everybody may write"),
        (lambda home: home.chmod(0o777), True, "everybody may write"),
        (lambda home: home.chmod(0o1777), False, ""),
        # Its owner can rename what others made in it.
        (lambda home: (home.chmod(0o1777), os.chown(home, SOMEBODY, -1)), False, "belongs to nobody"),
        (lambda home: home.chmod(0o775), False, "--shared-group"),
        (lambda home: home.chmod(0o775), True, ""),
        (lambda home: (home / "runs" / "one").chmod(0o1777), False, "everybody may write"),
        (lambda home: (home / "runs" / "one" / "coordination").chmod(0o770), False, "its group may write"),
    ],
)
def test_nobody_else_may_write_on_the_way(
    tmp_path: Path, change: Callable[[Path], object], shared_group: bool, says: str
) -> None:
    """Whoever can rename a folder on the way can put another in the place of the run."""
    home = tmp_path / "home"
    (home / "runs" / "one" / "coordination").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home / "runs")
    for folder in (home, *home.rglob("*")):
        # The user's own group would do no harm.
        os.chown(folder, -1, SOMEBODY)
    change(home)
    if "link" in says:
        os.chown(tmp_path / "link", SOMEBODY, SOMEBODY, follow_symlinks=False)
        with pytest.raises(UsageError, match="/link belongs to nobody"):
            trusted_folder.check(tmp_path / "link" / "one", shared_group=False, named="--log-path")
        return
    for folder in (home / "runs" / "one", tmp_path / "link" / "one"):
        try:
            trusted_folder.check(
                folder, shared_group=shared_group, named="--log-path", inside=["coordination", "run.json"]
            )
            said = ""
        except UsageError as error:
            said = str(error)
        assert (says in said) if says else not said
