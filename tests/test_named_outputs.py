"""A file that a command is told to write takes the place of a plain file and of nothing else: a device, a FIFO or a link stays."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import typed
from fake_run import long_run
from other_user import needs_root

COMMANDS = {
    "--out": "report --out {out} --log-path {run}",
    "--csv": "report --csv {out} --log-path {run}",
    "--perfetto": "report --perfetto {out} --log-path {run}",
    "--prometheus": "report --prometheus {out} --log-path {run}",
    "debug": "debug --out {out} --log-path {run}",
    "--output": "launch slurm --nodes 2 --output {out} --program ping --log-path {run}",
}


def null_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


PLANTED: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to(path.with_name("elsewhere")),
    "device": null_device,
}


def test_a_file_below_a_file_is_refused(tmp_path: Path) -> None:
    run, out = long_run(tmp_path / "run", 1).log_path, tmp_path / "file" / "out"
    out.parent.write_text("theirs")
    for name, command in COMMANDS.items():
        said = typed(*command.format(out=out, run=run).split(), code=2).err
        assert f"{out}: " in said and len(said.splitlines()) == 1, name
    assert out.parent.read_text() == "theirs"


def identity(path: Path) -> tuple[int, ...]:
    """What tells whether a file was replaced or written. Not the time of the last look, which looking itself changes."""
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_uid, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("kind", ["fifo", "link", pytest.param("device", marks=needs_root)])
def test_what_is_no_plain_file_is_refused(kind: str, tmp_path: Path) -> None:
    run, out = long_run(tmp_path / "run", 1).log_path, tmp_path / "out"
    (tmp_path / "elsewhere").write_text("theirs")
    try:
        PLANTED[kind](out)
    except PermissionError:
        pytest.skip("no devices can be made here")
    before = identity(out)
    for name, command in COMMANDS.items():
        said = typed(*command.format(out=out, run=run).split(), code=2).err
        assert f"{out}: " in said and "not a plain file" in said, name
    assert identity(out) == before and (tmp_path / "elsewhere").read_text() == "theirs"
