"""Code of the user's own: the modules beside it are found, and every node must have the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from fsbarrier.cli.start.node_checks import try_user_code
from fsbarrier.errors import UsageError
from fsbarrier.run.code_digests import code_digests, one_digest
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sources import ChosenValue


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two rewards, and a file beside them."""
    for name in ("reward.py", "other.py", "unrelated.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def of(folder: Path, **chosen: object) -> dict[str, str]:
    kinds = f"exact,{folder / 'reward.py'}:judge,{folder / 'other.py'}:judge"
    return code_digests(resolve([], {"program": "toy", "reward.kind": kinds, **chosen}, cross_checks=False))


def test_the_content_of_a_named_file_counts_and_its_place_does_not(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    (folder / "unrelated.py").write_text("# changed\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("reward.py", "other.py"):
        (folder / name).rename(elsewhere / name)
    assert of(elsewhere) == before
    (elsewhere / "reward.py").write_text("# changed\n")
    after = of(elsewhere)
    assert [what for what in before if before[what] != after[what]] == ["reward.kind"]
    assert one_digest(before) != one_digest(after)


def test_programs_agents_and_trainers_count_by_the_setting_that_names_them(folder: Path) -> None:
    for name in ("mine.py", "agent.py", "loss.py", "train.py"):
        (folder / name).write_text("\n")
    (folder / "train.sh").write_text("#!/bin/sh\n")
    named = {
        "program": str(folder / "mine.py"),
        "rollout.agent": f"{folder / 'agent.py'}:Agent",
        "algorithm.loss": f"{folder / 'loss.py'}:loss",
        "trainer.command": f"/bin/sh {folder}/train.sh --script={folder}/train.py --out {{out}} {folder} nothing.py",
    }
    before = of(folder, **named)
    assert set(before) == {"fsbarrier", "reward.kind", *named}
    for file, what in {
        "mine.py": "program",
        "agent.py": "rollout.agent",
        "loss.py": "algorithm.loss",
        "train.sh": "trainer.command",
        "train.py": "trainer.command",
    }.items():
        (folder / file).write_text("# changed\n")
        after = of(folder, **named)
        assert [name for name in before if before[name] != after[name]] == [what], file
        before = after


def test_a_node_with_another_reward_is_refused_and_a_later_start_may_change_it(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def judge(): return 1\n")
    chosen = ("--iterations", "1", f"reward.kind={reward}:judge")
    with Cluster(tmp_path, 2, *chosen, program="ping", real=True) as cluster:
        cluster.start(0)
        cluster.beating(0, lambda beat: True)
        reward.write_text("def judge(): return 2\n")
        cluster.start(1)
        assert cluster.wait(1) == {1: 2}
        assert "(what differs: reward.kind); start all nodes with the same" in cluster.said(1)
        reward.write_text("def judge(): return 1\n")
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(1)
        reward.write_text("def judge(): return 3\n")
        cluster.flags = ("--iterations", "2")
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        told = [event for event in cluster.events() if event["event"] == "code_changed"]
        # Node 1 was started with another reward, then with the first again, and now with a third.
        assert [event["what"] for event in told if event["node_rank"] == 0] == [["reward.kind"]]
        assert [event["what"] for event in told if event["node_rank"] == 1] == [["reward.kind"]] * 2
        assert "changed since the last start of this node: reward.kind" in cluster.said(0)


# --- where one stands -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("random", "tempfile", "queue"):
        (folder / f"{name}.py").write_text("raise RuntimeError('this is not the library')\n")
    return folder


def test_a_reward_finds_its_own_modules_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text("FULL = 1.0\n")
    (here / "rewards").mkdir()
    file = here / "rewards" / "score.py"
    monkeypatch.chdir(here)
    settings = resolve([ChosenValue("reward.kind", f"{file}:score", "reward.kind")])
    rest = "import FULL\n\ndef score(prompt, response, answer, metadata):\n    return FULL\n"
    file.write_text(f"import random\nfrom mine {rest}")
    try_user_code(settings)
    file.write_text(f"from theirs {rest}")
    with pytest.raises(UsageError, match="theirs"):
        try_user_code(settings)
