"""A node's join record: whose it is when the create ended in an error, and the next try finds the name taken."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fsbarrier.coordination.join_writer import JoinWriter
from fsbarrier.protocol.facts import Join, Record
from fsbarrier.run.fingerprint import Fingerprint
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

DEVICES = Fingerprint(accelerators=[("cuda A100", 80 << 30, 0)])
HERE = Join(2, 1, "here", 7, "boot", fingerprint=DEVICES.as_json())
ELSEWHERE = Join(2, 1, "elsewhere", 8, "boot")


class OneErrorStore(PosixStore):
    """The first create ends in an error. By then `done` has been created under its name, if it is not None."""

    def __init__(self, done: Record | None) -> None:
        self.done, self.failed = done, False

    def create(self, path: Path, record: Record) -> bool:
        if self.failed:
            return super().create(path, record)
        self.failed = True
        if self.done is not None:
            super().create(path, self.done)
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("done", "mine"), [(HERE, True), (ELSEWHERE, False), (None, True)], ids=["own", "another's", "none"]
)
def test_after_an_error_the_record_tells_whose_it_is(tmp_path: Path, done: Join | None, mine: bool) -> None:
    store, paths = OneErrorStore(done), RunPaths(tmp_path)
    store.make_dir(paths.joins)
    writer = JoinWriter(store, paths)
    with pytest.raises(OSError, match="Input/output error"):
        writer.create(HERE)
    assert writer.announced == 0
    assert writer.create(HERE) == mine
    assert writer.announced == (1 if mine else 0)


def test_without_an_error_a_name_that_is_taken_is_another_process_s(tmp_path: Path) -> None:
    store, paths = PosixStore(), RunPaths(tmp_path)
    store.make_dir(paths.joins)
    assert JoinWriter(store, paths).create(HERE)
    assert not JoinWriter(store, paths).create(HERE)
