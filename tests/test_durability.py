"""What is written lasts: flushed and named in an order that a loss of power respects; and what is old goes only where a setting says so."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from core_builders import ROLL_OUT, RULES, generation
from node_loops import NO_PAUSES, node_loop, observer, settle
from operations import Recorder, recording
from trajectory_files import write_part

from fsbarrier.data.merge import MergeRequest, Part, merge
from fsbarrier.loader import load_module
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
        settle(loop.tick, 1.0)
        settle(loop.tick, 1.1)
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


# --- what is old goes, and never what may still be needed ---------------------------------------------------------------------


def make(paths: RunPaths, iteration: int) -> list[Path]:
    """All that one iteration leaves."""
    made = []
    for split in ("train", "test"):
        made += [paths.merged(split, iteration), paths.merged_by(split, iteration, 3)]
        made += [paths.rank_checkpoint(split, iteration, 12), paths.part(split, iteration, 12, 3, 1)]
    made.append(paths.batch(iteration, 3))
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return made


def test_old_batches_and_trajectories_go_and_the_rest_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    files = {iteration: make(paths, iteration) for iteration in (1, 2, 3, 10, 11)}
    other = paths.trajectories("train") / "train_trajectories.pt.iteration1.mine"
    other.write_text("x")
    for iteration in (2, 3):
        paths.images("train", iteration).mkdir()
        (paths.images("train", iteration) / "abc.png").write_text("x")
    assert retention.remove_old(tmp_path, 10, batches=0, trajectories=0) == []
    assert all(path.exists() for made in files.values() for path in made)
    assert retention.remove_old(tmp_path, 10, batches=1, trajectories=8) == [1, 2]
    left = {iteration for iteration, made in files.items() if any(path.exists() for path in made[:-1])}
    assert left == {3, 10, 11} and other.exists()
    assert not paths.images("train", 2).exists() and paths.images("train", 3).exists()
    assert [iteration for iteration, made in files.items() if made[-1].exists()] == [10, 11]
    assert retention.remove_old(tmp_path, 10, batches=1, trajectories=8) == []
    assert retention.remove_old(tmp_path / "none", 10, batches=1, trajectories=1) == []


def test_a_run_keeps_as_many_iterations_as_set(tmp_path: Path) -> None:
    flags = ("--iterations", "7", "checkpoint.keep_trajectories=1", "update.recency=2", "toy.phase_s=0.01")
    flags += ("--eval-interval", "1", "checkpoint.keep=1")
    with Cluster(tmp_path, 1, *flags) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        there = sorted(path.name for path in RunPaths(cluster.log_path).trajectories("train").iterdir())
        assert {name.partition("iteration")[2][0] for name in there} == {"6", "7"}  # the recency wins
        events = [event for event in cluster.events() if event["event"] == "trajectories_removed"]
        assert [(event["iteration"], event["iterations"]) for event in events] == [
            (iteration, [iteration - 2]) for iteration in range(3, 8)
        ]
        # Iteration n evaluates policy version n - 1.
        rewards = {
            event["policy_version"]: event["reward_mean"]
            for event in cluster.events()
            if event["event"] == "evaluated"
        }
        best = max(rewards, key=rewards.__getitem__)
        last = [event for event in cluster.events() if event["event"] == "weights_published"][-1]
        assert (last["best_policy_version"], last["best_reward"]) == (best, rewards[best])
        kept = {version for version, _ in checkpoints.versions(cluster.log_path)}
        assert kept == {6, 7, best} and 0 < best < 6, "choose another number of iterations"


def test_the_newest_every_so_many_and_the_best_stay(tmp_path: Path) -> None:
    def kept(keep: int, every: int = 0, best: str | None = None) -> list[int]:
        for version in range(1, 13):
            RunPaths(tmp_path).checkpoint(version, 1).mkdir(parents=True, exist_ok=True)
        retention.remove_old_versions(tmp_path, keep, RunPaths(tmp_path).checkpoint(11, 1), every, best)
        return [version for version, _ in checkpoints.versions(tmp_path)]

    assert kept(0) == list(range(1, 13))
    # The version before is always kept, and a later one is another node's business.
    assert kept(1) == [10, 11, 12]
    assert kept(3, every=4) == [4, 8, 9, 10, 11, 12]
    assert kept(2, best="policy-000003.g0001") == [3, 10, 11, 12]


def test_while_a_kept_version_does_not_say_which_state_it_needs_none_is_removed(tmp_path: Path) -> None:
    """Its manifest may name any of them: unreadable is never absent."""
    for version in range(1, 6):
        folder = RunPaths(tmp_path).checkpoint(version, 1)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights").write_bytes(b"w")
        state_in = "policy-000001.g0001" if version == 4 else ""
        checkpoints.commit(folder, replace(checkpoints.write_manifest(folder, version), state_in=state_in))
    current, manifest = (
        RunPaths(tmp_path).checkpoint(5, 1),
        RunPaths(tmp_path).checkpoint(4, 1) / "MANIFEST.json",
    )
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-9])
    assert retention.remove_old_versions(tmp_path, 2, current) == []
    assert [version for version, _ in checkpoints.versions(tmp_path)] == [1, 2, 3, 4, 5]
    manifest.write_bytes(whole)
    retention.remove_old_versions(tmp_path, 2, current)
    assert [version for version, _ in checkpoints.versions(tmp_path)] == [1, 4, 5]


def test_the_best_evaluated_is_handed_on(tmp_path: Path) -> None:
    from fsbarrier.context import Context
    from fsbarrier.decisions import PublishDecision
    from fsbarrier.program import Phase
    from fsbarrier.settings.sections import Settings

    rl = load_module("rl")

    def publication(iteration: int, reward: float | None, last: dict[str, Any] | None) -> dict[str, Any]:
        """What the publication of this iteration says, after an evaluation with this reward and the publication before."""
        evaluated = {} if reward is None else {"reward_mean": reward}
        made = {"folder": RunPaths(tmp_path).checkpoint(iteration, 2).name, "policy_version": iteration}
        decisions: dict[str, Any] = {"eval_rollout": {"iteration": iteration, "value": evaluated}}
        ready = {"makes": made, "master_addr": "127.0.0.1", "master_port": 1}
        decisions["update_ready"] = {"iteration": iteration, "value": ready}
        if last is not None:
            decisions["weights_publish"] = {"iteration": iteration - 1, "value": last}
        context = Context(
            *("run", RunPaths(tmp_path), Settings(), {}, None, 0, 1, (), 0, 2, iteration, 0),
            phase=Phase(11, "weights_publish"),
            decisions=decisions,
        )
        folder = RunPaths(tmp_path).checkpoint(iteration, 2)
        best = rl.publication(context).best
        return PublishDecision(iteration, folder.name, best=best).as_json()

    one = publication(1, 0.5, None)
    assert (one["best"]["version"], one["best"]["folder"]) == (0, None)
    two = publication(2, 0.7, one)
    assert (two["best"]["version"], two["best"]["folder"]) == (1, "policy-000001.g0002")
    three = publication(3, None, two)
    four = publication(4, 0.6, three)
    assert (four["best"]["version"], four["best"]["reward"]) == (1, 0.7)
    assert publication(1, None, None)["best"] is None


def test_an_update_draws_from_the_iterations_that_are_set(tmp_path: Path) -> None:
    from fsbarrier.context import Context
    from fsbarrier.program import Phase
    from fsbarrier.settings.sections import Settings, UpdateSettings

    rl = load_module("rl")
    paths = RunPaths(tmp_path)
    settings = Settings(update=UpdateSettings(recency=3))
    context = Context(
        *("run", paths, settings, {}, None, 0, 1, (), 0, 2, 2, 0),
        phase=Phase(8, "batch_prepare"),
        decisions={"train_aggregate": {"iteration": 2, "value": {"merged": "2.g02", "earlier": ["1.g01"]}}},
    )
    # Not what lies under the public name.
    assert rl.learned_from(context) == [paths.trajectories("train") / name for name in ("2.g02", "1.g01")]
    assert rl.earlier_merges(context) == ["2.g02", "1.g01"]
    assert rl.earlier_merges(replace(context, settings=Settings(update=UpdateSettings(recency=2)))) == [
        "2.g02"
    ]
    assert rl.earlier_merges(replace(context, decisions={})) == []
    alone = replace(context, iteration=9)
    assert rl.learned_from(alone) == [paths.merged("train", n) for n in (9, 8, 7)]


def test_whoever_must_stop_removes_no_further_version(tmp_path: Path) -> None:
    """Between two removals the leader is asked whether it was cancelled meanwhile."""
    folders = [RunPaths(tmp_path).checkpoint(version, 1) for version in range(1, 6)]
    for folder in folders:
        folder.mkdir(parents=True)
    asked: list[int] = []

    def between() -> None:
        asked.append(sum(folder.is_dir() for folder in folders))
        if len(asked) == 2:
            raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        retention.remove_old_versions(tmp_path, 2, folders[-1], between=between)
    assert asked == [5, 4] and [folder.is_dir() for folder in folders] == [False, True, True, True, True]
