"""All nodes of a run run the same code: what the digests cover, who is refused, and what is told of a change between two starts."""

from __future__ import annotations

import os
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from cluster import Cluster
from deep_folders import nested

from fsbarrier.errors import UsageError
from fsbarrier.node import code_digests as digests
from fsbarrier.node.code_digests import code_digests, one_digest
from fsbarrier.settings.resolve import resolve

REWARD = (
    "import helper\nfrom pack.inner import more\ndef judge(task, answer):\n    import lazy\n    return 1.0\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reward, what it imports from beside it, and what it does not."""
    for name, text in {
        "reward.py": REWARD,
        "helper.py": "import deeper\nimport json\n",
        "deeper.py": "import reward\n",
        "lazy.py": "",
        "pack/__init__.py": "",
        "pack/inner.py": "from . import other\n",
        "pack/other.py": "",
        "space/part.py": "",
        "unrelated.py": "",
        "json.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def of(folder: Path, **chosen: object) -> dict[str, str]:
    chosen = {"program": "toy", "reward.kind": f"exact,{folder / 'reward.py'}:judge", **chosen}
    return code_digests(resolve([], chosen, cross_checks=False), None)


@pytest.mark.parametrize(
    "name",
    ["reward.py", "helper.py", "deeper.py", "lazy.py", "pack/__init__.py", "pack/inner.py", "pack/other.py"],
)
def test_a_reward_counts_with_what_it_imports_from_its_folder(folder: Path, name: str) -> None:
    before = of(folder)
    (folder / name).write_text((folder / name).read_text() + "# changed\n")
    after = of(folder)
    assert [what for what in before if before[what] != after[what]] == ["reward.kind"]
    assert one_digest(before) != one_digest(after)


def test_what_it_does_not_import_and_where_it_lies_do_not_count(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    (folder / "unrelated.py").write_text("changed")
    (folder / "json.txt").write_text("changed")
    assert of(folder) == before
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("reward.py", "helper.py", "deeper.py", "lazy.py", "pack", "space"):
        (folder / name).rename(elsewhere / name)
    assert of(elsewhere) == before
    (elsewhere / "space" / "part.py").write_text("changed")
    assert of(elsewhere) == before
    (elsewhere / "lazy.py").write_text("import space.part")
    now = of(elsewhere)
    (elsewhere / "space" / "part.py").write_text("changed again")
    assert of(elsewhere) != now


def test_two_files_do_not_make_up_for_each_other(folder: Path) -> None:
    (folder / "deeper.py").write_text("")
    (folder / "lazy.py").write_text("x = 1\n")
    before = of(folder)
    (folder / "deeper.py").write_text("x = 1\n")
    (folder / "lazy.py").write_text("")
    assert of(folder) != before


def test_programs_agents_and_trainers_count_by_the_setting_that_names_them(folder: Path) -> None:
    for name in ("mine.py", "agent.py", "train.py", "zero.json"):
        (folder / name).write_text("import unrelated\n")
    (folder / "train.sh").write_text("#!/bin/sh\n")
    named = {
        "program": str(folder / "mine.py"),
        "rollout.agent": f"{folder / 'agent.py'}:Agent",
        "trainer.command": f"/bin/sh {folder}/train.sh --script={folder}/train.py --out {{out}} {folder} nothing.py",
        "trainer.deepspeed": str(folder / "zero.json"),
    }
    before = of(folder, **named)
    assert set(before) == {"fsbarrier", "reward.kind", *named}
    for file, what in {
        "mine.py": "program",
        "agent.py": "rollout.agent",
        "train.sh": "trainer.command",
        "train.py": "trainer.command",
        "zero.json": "trainer.deepspeed",
    }.items():
        (folder / file).write_text("import unrelated # changed\n")
        after = of(folder, **named)
        assert [name for name in before if before[name] != after[name]] == [what], file
        before = after
    (folder / "unrelated.py").write_text("changed")
    after = of(folder, **named)
    assert {name for name in before if before[name] != after[name]} == {
        "program",
        "rollout.agent",
        "trainer.command",
    }


def test_a_file_that_is_no_python_counts_and_ends_nothing(folder: Path) -> None:
    (folder / "helper.py").write_bytes(b"\0\xff(" * 100)
    assert of(folder)
    (folder / "helper.py").unlink()
    os.mkfifo(folder / "helper.py")
    assert of(folder)


def model(folder: Path, weights: bytes) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "modeling_own.py"):
        (folder / name).touch()
    (folder / "model.safetensors").write_bytes(weights)
    return code_digests(resolve([], {"program": "ping"}, cross_checks=False), folder)


def test_a_model_counts_whole_where_it_is_small_and_by_samples_where_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    before = model(folder, b"weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "when").touch()
    assert model(folder, b"weights") == before != model(folder, b"Weights")
    for name in ("config.json", "tokenizer.json", "modeling_own.py"):
        (folder / name).write_text("x")
        after = model(folder, b"weights")
        assert after != before and one_digest(after) == one_digest(before), name
        before = after
    # Now large: 64 pieces of 16 bytes of what follows a header of 4 KiB.
    monkeypatch.setattr(digests, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(digests, "SAMPLE_BYTES", 16)
    size, header = 64 * 1024, (4096).to_bytes(8, "little")
    weights = bytearray(header + bytes(size - 8))
    before = model(folder, bytes(weights))
    assert model(folder, bytes(weights) + b"\0") != before
    for place in (9, 4096, size - 1, size // 2 - 1, size // 4 - 16):
        weights[place] ^= 1
        assert model(folder, bytes(weights)) != before, place
        weights[place] ^= 1
    assert model(folder, bytes(weights)) == before


def test_a_node_with_another_reward_is_refused_and_a_later_start_may_change_it(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def judge(): return 1\n")
    chosen = ("--iterations", "1", f"reward.kind={reward}:judge")
    with Cluster(tmp_path, 2, *chosen, program="ping") as cluster:
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


def test_what_links_lead_to_counts_as_if_it_lay_there(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "shared"
    elsewhere.mkdir()
    (elsewhere / "linked.py").write_text("")
    (folder / "pack" / "shared").symlink_to(elsewhere)
    # Links may lead in a circle.
    (elsewhere / "circle").symlink_to(folder / "pack")
    before = of(folder)
    (elsewhere / "linked.py").write_text("changed")
    assert of(folder)["reward.kind"] != before["reward.kind"]
    weights = model(tmp_path / "model", b"weights")
    (tmp_path / "model" / "more").symlink_to(elsewhere)
    linked = model(tmp_path / "model", b"weights")
    (elsewhere / "linked.py").write_text("changed again")
    assert len({each["model"] for each in (weights, linked, model(tmp_path / "model", b"weights"))}) == 3


def test_links_that_lead_to_a_whole_disk_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST_FILES", 50)
    before = of(folder)
    disk = folder.parent / f"{folder.name}-disk"
    for number in range(60):
        (disk / str(number)).mkdir(parents=True)
    (folder / "pack" / "disk").symlink_to(disk)
    with pytest.raises(UsageError, match="pack: with what its links lead to it has more than 50 files"):
        of(folder)
    monkeypatch.undo()
    assert of(folder) == before
    monkeypatch.setattr(digests, "MOST_BYTES", 4)
    (disk / "big.py").write_text("12345")
    with pytest.raises(UsageError, match="GiB of small files"):
        of(folder)


def test_folders_may_be_nested_deep(folder: Path) -> None:
    before = of(folder)
    with nested(folder / "pack" / "deep"):
        assert of(folder) == before


@pytest.mark.parametrize("suffix", EXTENSION_SUFFIXES + BYTECODE_SUFFIXES)
@pytest.mark.parametrize("place", ["deeper", "pack/other"])
def test_compiled_modules_count(folder: Path, suffix: str, place: str) -> None:
    (folder / f"{place}.py").unlink()
    compiled = folder / f"{place}{suffix}"
    compiled.write_bytes(b"\x7fELF")
    before = of(folder)
    compiled.write_bytes(b"\x7fELF changed")
    assert of(folder)["reward.kind"] != before["reward.kind"]
    # What Python keeps there by itself is of the node.
    (folder / "pack" / "__pycache__").mkdir()
    after = of(folder)
    (folder / "pack" / "__pycache__" / f"other{suffix}").write_bytes(b"x")
    assert of(folder) == after
