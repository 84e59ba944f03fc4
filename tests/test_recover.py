"""`fsbarrier recover` after a disaster: shows, keeps, merges, puts aside; and the normal command goes on afterwards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, Cluster, all_gone, assert_exactly_once, rolled_out_twice
from commands import typed
from fake_run import FakeRun
from waiting import until

from fsbarrier.trajectories import RankFileWriter, load, scan_rank_file


def recover(log_path: Path, *flags: str, code: int = 0) -> str:
    said = typed("recover", "--log-path", log_path, "--iteration", "1", *flags, code=code)
    return said.err if code else said.out


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with its size and the time of its last change."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def states(shown: str) -> dict[str, str]:
    return {Path(item["path"]).name: item["state"] for item in json.loads(shown)["files"]}


def test_images_that_trajectories_name_are_checked_and_a_damaged_one_is_put_aside(tmp_path: Path) -> None:
    from PIL import Image

    run = FakeRun(tmp_path / "run")
    kept_in = run.paths.images("train", 1)
    kept_in.mkdir(parents=True)
    names = []
    for colour in ("red", "green", "blue", "white"):
        Image.new("RGB", (4, 4), colour).save(tmp_path / "one.png")
        image = (tmp_path / "one.png").read_bytes()
        names.append(f"{hashlib.sha256(image).hexdigest()}.png")
        (kept_in / names[-1]).write_bytes(image)
    about = {"policy_version": 0, "node_rank": 0, "reward": 1.0, "sample": 0}
    with RankFileWriter(run.paths.rank_checkpoint("train", 1, 0), header={"run_id": run.run_id}) as writer:
        for task, seen in enumerate((names[:2], names[1:3], [])):
            shown = {"images": [[], seen]} if seen else {}
            writer.append_group(task, [{"task_id": f"t{task}", "task_index": task, **about, **shown}])
        writer.finish()
    assert set(states(recover(run.log_path, "--dry-run", "--json")).values()) == {"complete"}
    (kept_in / names[1]).write_bytes(b"half")
    (kept_in / names[2]).unlink()
    shown = recover(run.log_path, "--dry-run")
    assert (
        f"image    missing           0 groups       0 trajectories  {names[2]}  (an image that task t1 needs)"
        in shown
    )
    assert "would move 1 file(s) to quarantine/" in shown
    recover(run.log_path)
    (aside,) = run.log_path.glob("quarantine/*/*")
    assert (aside.name, aside.read_bytes()) == (names[1], b"half")
    found = states(recover(run.log_path, "--dry-run", "--json"))
    assert {name: found.get(name) for name in names} == {
        **dict.fromkeys(names),
        names[1]: "missing",
        names[2]: "missing",
    }


def leave_a_mess(paths: Any) -> dict[str, str]:
    """Files that a disaster and other people left in iteration 1; their names with the state they should be found in."""
    rank_0 = sorted(paths.trajectories("train").glob("*_rank_0*.part"))[0]
    rank_0.write_bytes(rank_0.read_bytes()[:-100])
    record = {
        "task_id": "0",
        "task_index": 0,
        "sample": 0,
        "reward": 1.0,
        "policy_version": 0,
        "node_rank": 5,
    }
    other_run = paths.rank_checkpoint("train", 1, 5)
    with RankFileWriter(other_run, header={"run_id": "another", "assigned": [0]}) as writer:
        writer.append_group(0, [record])
        writer.finish()
    garbage = paths.rank_checkpoint("train", 1, 6)
    garbage.write_bytes(b"\x80\x04not one of ours")
    empty = paths.rank_checkpoint("train", 1, 7)
    empty.write_bytes(b"")  # as of a node that was killed before its first group
    unfinished = paths.trajectories("train") / f".{paths.merged('train', 1).name}.0123456789ab.tmp"
    unfinished.write_bytes(b"half")
    return {
        rank_0.name: "torn",
        other_run.name: "foreign",
        garbage.name: "foreign",
        empty.name: "partial",
        unfinished.name: "temporary",
    }


@pytest.fixture
def halted(tmp_path: Path) -> Any:
    """Two nodes, killed in the middle of their first rollout."""
    held = str(Path(__file__).parent / "programs" / "held.py")
    with Cluster(
        tmp_path, 2, "--iterations", "1", *FAST, "custom.hold=2", "custom.hold_s=60", program=held
    ) as cluster:
        cluster.start()
        for rank in (0, 1):
            cluster.beating(rank, lambda beat: beat.phase == 2 and beat.progress.get("done", 0) >= 1)
        said = recover(cluster.log_path, code=2)
        assert "is in use by node 0 (" in said and "node 1 (" in said and "fsbarrier stop --now" in said
        assert "partial" in recover(cluster.log_path, "--dry-run")
        trees = [cluster.tree(rank) for rank in (0, 1)]
        for rank in (0, 1):
            cluster.kill(rank)
        # A program may be in the middle of its part still.
        assert all(map(all_gone, trees))
        # The last file that changes by itself is the name that tells of a kill.
        beats = cluster.log_path / "coordination" / "beats"
        until(lambda: sum(".killed." in path.name for path in beats.iterdir()) == 2, cluster.said_by_all)
        yield cluster


def test_the_normal_command_goes_on_from_what_recovery_leaves(halted: Cluster) -> None:
    log_path, paths = halted.log_path, halted.paths
    expected = leave_a_mess(paths)
    mess = {name for name, state in expected.items() if state in ("foreign", "unreadable", "temporary")}
    before = everything(log_path)

    found = states(recover(log_path, "--dry-run", "--aggregate", "--json"))
    assert expected.items() <= found.items()
    rank_1 = next(name for name in found if "_rank_1" in name)
    assert found[rank_1] == "partial"
    shown = recover(log_path, "--dry-run", "--aggregate")
    assert "train: would not merge: " in shown and " of 24\n" in shown
    assert "missing" in recover(log_path, "--aggregate", code=2)
    assert "only valid with --aggregate" in recover(log_path, "--allow-partial", code=2)
    assert everything(log_path) == before

    said = recover(log_path, "--aggregate", "--allow-partial")
    assert "train: merged: " in said and "tasks are missing" in said
    merged = load(paths.merged("train", 1))
    durable = {
        group.task_index
        for part in paths.trajectories("train").glob("*.part")
        for group in scan_rank_file(part).groups
    }
    assert {t["task_index"] for t in merged["trajectories"]} == durable
    assert set(merged["metadata"]["missing"]) == set(range(24)) - durable
    assert merged["metadata"]["allow_partial"] is True
    aside = {path.name: path for path in (log_path / "quarantine").rglob("*") if path.is_file()}
    assert set(aside) == mess
    assert all(
        before[str(paths.trajectories("train") / name)][0] == aside[name].stat().st_size for name in mess
    )

    halted.start()
    assert halted.wait() == {0: 0, 1: 0}, halted.said(0)
    for split in ("train", "test"):
        assert_exactly_once(log_path, 1, split=split)
        assert rolled_out_twice(log_path, 1, split) == []
    assert "complete" in recover(log_path)


def test_a_damaged_merged_file_is_made_anew_where_the_run_counts_on_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, "--iterations", "1", *FAST) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}
        paths = cluster.paths
        damaged = paths.merged_by("train", 1, 1)
        whole = load(damaged)["trajectories"]
        data = damaged.read_bytes()
        damaged.write_bytes(data[: len(data) // 2])  # the plain name is a link to it
        assert states(recover(cluster.log_path, "--dry-run", "--json"))[damaged.name] == "damaged"
        said = recover(cluster.log_path)
        assert f"{damaged.name} is missing" in said and not damaged.exists()
        recover(cluster.log_path, "--aggregate")
        assert sorted(t["task_index"] for t in load(damaged)["trajectories"]) == sorted(
            t["task_index"] for t in whole
        )
        assert_exactly_once(cluster.log_path, 1)
        assert "train: already merged: " in recover(cluster.log_path, "--aggregate")


def test_recover_says_that_there_is_no_run(tmp_path: Path) -> None:
    assert "no run" in recover(tmp_path / "nowhere", code=2)
