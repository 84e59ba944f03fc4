"""The order in which things are written, flushed and named, where a loss of power must not find a name before its content."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from core_builders import ROLL_OUT, RULES, generation
from node_loops import NO_PAUSES, node_loop, observer
from operations import Recorder, recording
from trajectory_files import write_part

from fsbarrier.data.merge import MergeRequest, Part, merge
from fsbarrier.protocol.facts import SEALED, Fact, Generation, Member, Payload, Position, Record
from fsbarrier.protocol.state import Node, RowPart, WorkReport
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files


def refuse(number: int) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def assert_named_when_whole(seen: Recorder, verb: str, path: str) -> int:
    """`path` was named by `verb` only after its content was flushed, and its directory was flushed after that; gives the place."""
    named = seen.one(verb, path)
    assert seen.flushed_before(path, named), seen.done
    parent = str(Path(path).parent)
    assert any(at > named for at in seen.all("flush-dir") if seen.done[at].path == parent), seen.done
    return named


# --- records: the leader's fact, a generation, a join, a seal -----------------------------------------------------------------

RECORDS: dict[str, Record] = {
    "generation": Generation(2, (Member(0, 1, "a"),), 0, Position(1, 0), "start"),
    "leader's fact": Fact(0, 1, "done", {"merged": "x"}),
    "seal": Fact(1, 1, SEALED),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_flushed_before_its_name_and_its_name_before_anybody_relies_on_it(
    tmp_path: Path, name: str
) -> None:
    with recording(tmp_path) as seen:
        assert PosixStore().create(tmp_path / "record", RECORDS[name])
    assert_named_when_whole(seen, "link", "record")


def test_a_name_that_could_not_be_flushed_is_flushed_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try finds the name taken, by this very process."""
    real, store = files.fsync_dir, PosixStore()

    def fails_for_the_name(folder: Path) -> None:
        if folder == tmp_path:
            refuse(errno.EIO)()
        real(folder)

    monkeypatch.setattr(files, "fsync_dir", fails_for_the_name)
    with pytest.raises(OSError, match="Input/output"):
        store.create(tmp_path / "record", RECORDS["generation"])
    monkeypatch.setattr(files, "fsync_dir", real)
    with recording(tmp_path) as seen:
        assert not store.create(tmp_path / "record", RECORDS["generation"])
    assert "." in [seen.done[at].path for at in seen.all("flush-dir")], seen.done


class DoneAtOnce:
    """Work that has ended, well or not, when somebody first asks."""

    def __init__(self, ok: bool) -> None:
        self._ok, self._part = ok, RowPart.EACH

    def launch(self, node: Node, part: RowPart) -> None:
        self._part = part

    def cancel(self) -> None: ...

    @property
    def report(self) -> WorkReport:
        return WorkReport(self._part, self._ok, {"groups": 3} if self._ok else {"error": "no"}, 0.1)

    def progress(self) -> Payload:
        return {}


@pytest.mark.parametrize("status", ["done", "failed"])
def test_what_a_member_says_of_its_work_is_whole_after_a_loss_of_power(tmp_path: Path, status: str) -> None:
    """Were only the name of its fact left, nobody would wait for it any more, and the leader could not read it."""
    paths, seen_by_node = RunPaths(tmp_path), observer(tmp_path, table=RULES.table, intervals=NO_PAUSES)
    loop = node_loop(seen_by_node, 1, RULES, DoneAtOnce(status == "done"))
    loop.store.create(paths.generation(1), generation(1, (0, 1), start=(1, ROLL_OUT)))
    with recording(tmp_path) as seen:
        loop.tick(1.0)
        loop.tick(1.1)
    folder = paths.phase(1, ROLL_OUT, "roll_out").relative_to(tmp_path)
    assert_named_when_whole(seen, "rename", f"{folder}/iter-000001.node-0001.{status}")


# --- a merged file and its public name ----------------------------------------------------------------------------------------


def test_a_merged_file_is_flushed_before_its_name_and_before_its_public_name(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / f"part-{rank}", [rank], rank=rank) for rank in range(2)]
    with recording(tmp_path) as seen:
        merge(MergeRequest(tuple(Part(path) for path in parts), tmp_path / "merged.g0001", {}, (0, 1)))
        files.link(tmp_path / "merged.g0001", tmp_path / "merged")
    named = assert_named_when_whole(seen, "rename", "merged.g0001")
    public = seen.one("rename", "merged")
    assert any(named < at < public for at in seen.all("flush-dir")), seen.done
    assert any(at > public for at in seen.all("flush-dir")), seen.done


def test_the_last_look_is_the_last_thing_before_the_public_name(tmp_path: Path) -> None:
    (tmp_path / "merged.g0001").write_bytes(b"content")
    folder = policy(tmp_path, 1)
    with recording(tmp_path) as seen:
        files.link(tmp_path / "merged.g0001", tmp_path / "merged", lambda: seen.note("look", tmp_path / "a"))
        checkpoints.publish_link(tmp_path, folder, lambda: seen.note("look", tmp_path / "b"))
    for look, name in (("a", "merged"), ("b", "model.pt")):
        after = [one for one in seen.done[seen.one("look", look) + 1 :] if one.verb != "look"]
        assert (after[0].verb, after[0].path) == ("rename", name), seen.done


# --- a rank's growing file ----------------------------------------------------------------------------------------------------


def test_a_group_is_flushed_before_it_is_acknowledged(tmp_path: Path) -> None:
    with recording(tmp_path) as seen:
        write_part(tmp_path / "part", [0, 1])
    assert seen.all("flush-dir"), "its name would be lost"
    last_write, last_flush = seen.all("write", "part")[-1], seen.all("flush", "part")[-1]
    assert last_flush > last_write
    # The start, each group, and what completes the file: each is flushed before the next one is written.
    assert len(seen.all("flush", "part")) >= 3


# --- a policy version ---------------------------------------------------------------------------------------------------------


def policy(log_path: Path, version: int) -> Path:
    folder = RunPaths(log_path).checkpoint(version, 1)
    for name in ("model/config.json", "model/model.safetensors", "trainer/state.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * version)
    checkpoints.write_manifest(folder, version)
    return folder


def test_a_policy_version_has_its_manifest_when_all_else_is_flushed(tmp_path: Path) -> None:
    with recording(tmp_path) as seen:
        folder = policy(tmp_path, 1)
    inside = os.path.relpath(folder, tmp_path)
    named = assert_named_when_whole(seen, "rename", f"{inside}/{checkpoints.MANIFEST}")
    for name in ("model/config.json", "model/model.safetensors", "trainer/state.pt"):
        assert seen.flushed_before(f"{inside}/{name}", named), name
    flushed = {seen.done[at].path for at in seen.all("flush-dir") if at < named}
    # The names of the files, of their folders, and of the folder itself.
    assert flushed >= {f"{inside}/model", f"{inside}/trainer", inside, str(Path(inside).parent)}


def test_the_weights_are_public_only_when_their_manifest_is_durable(tmp_path: Path) -> None:
    with recording(tmp_path) as seen:
        folder = policy(tmp_path, 1)
        checkpoints.publish_link(tmp_path, folder)
    manifest = seen.one("rename", f"{os.path.relpath(folder, tmp_path)}/{checkpoints.MANIFEST}")
    public = seen.one("rename", "model.pt")
    assert any(manifest < at < public for at in seen.all("flush-dir"))
    assert any(at > public and seen.done[at].path == "." for at in seen.all("flush-dir")), seen.done


def test_a_version_that_is_removed_is_incomplete_first(tmp_path: Path) -> None:
    folders = [policy(tmp_path, version) for version in (1, 2, 3, 4)]
    with recording(tmp_path) as seen:
        assert retention.remove_old_versions(tmp_path, 2, folders[-1]) == folders[:2]
    for folder in folders[:2]:
        inside = os.path.relpath(folder, tmp_path)
        assert seen.one("unlink", f"{inside}/{checkpoints.MANIFEST}") == min(seen.all("unlink", inside))
