"""The log-probabilities of each engine against the trainer's: one bad replica does not hide among good ones, and is named."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import PROMPT, Bench, settings, tiny_model, trajectory, write_groups

from fsbarrier.errors import ProgramFailed

pytestmark = pytest.mark.torch

ENGINES = [(node, replica) for node in (0, 1) for replica in (0, 1, 2, 3)]


def sampled_by(folder: Path, off_by: dict[tuple[int, int], float], length: int = 32) -> Bench:
    """A bench whose groups were sampled by two nodes of four engines, some of which told other log-probabilities than the model's."""
    import torch

    model, generator, groups = tiny_model(folder / "model"), torch.Generator().manual_seed(1), []
    with torch.no_grad():
        for task, (node, replica) in enumerate(ENGINES):
            group = []
            for sample in range(4):
                tokens = torch.randint(2, 32, (1, PROMPT + length), generator=generator)
                log_probs = torch.log_softmax(model(tokens).logits[0, :-1], -1)
                chosen = log_probs.gather(1, tokens[0, 1:, None])[PROMPT - 1 :, 0]
                told = array("f", (chosen - off_by.get((node, replica), 0.0)).tolist())
                one = trajectory(task, sample, tokens[0].tolist(), list(told), float(sample % 2))
                group.append({**one, "node_rank": node, "replica": replica})
            groups.append(group)
    write_groups(folder / "merged", groups)
    work = Bench(folder, settings(trainer__minibatch=100, trainer__micro_batch=5))
    assert work.prepare()["left_out_groups"] == 0
    return work


def accused(work: Bench) -> Any:
    return json.loads((work.folder / "v1.result").read_text())["differing_engines"]


def test_one_replica_of_eight_is_found_named_and_done_without(tmp_path: Path) -> None:
    # Over all of them together this is below the limit of 0.002.
    work = sampled_by(tmp_path, {(1, 3): 0.01})
    message = r"differ by 0\.0100 on average .* for engine 3 of node 1: .*the other 7 engines agree: restarting it once"
    with pytest.raises(ProgramFailed, match=message):
        work.update("v1")
    assert accused(work) == [[1, 3]]
    told = work.prepare(without_engines=[[1, 3]])
    assert (told["left_out_groups"], told["trajectories"]) == (1, 28)
    assert work.update("v1")["logprob_gap_max"] < 1e-4


def test_each_node_learns_of_it_before_the_processes_end(tmp_path: Path) -> None:
    work = sampled_by(tmp_path, {(0, 2): 0.01, (1, 0): 0.5})
    results = [tmp_path / f"{node}.result" for node in (0, 1)]
    ended = work.torchrun(*(work.update_spec("v1", result=str(result)) for result in results))
    for result, (torchrun, said) in zip(results, ended, strict=True):
        assert torchrun.returncode != 0 and "for engine 2 of node 0, engine 0 of node 1" in said, said
        assert json.loads(result.read_text()) == {"differing_engines": [[0, 2], [1, 0]]}


def test_where_all_differ_nobody_is_left_out(tmp_path: Path) -> None:
    work = sampled_by(tmp_path, dict.fromkeys(ENGINES, 0.01))
    with pytest.raises(ProgramFailed, match=r"engine 0 of node 0, .*engine\.dtype=float32"):
        work.update("v1")
    assert accused(work) == []


def test_a_few_tokens_accuse_nobody(tmp_path: Path) -> None:
    """A single engine is judged by no fewer tokens than would show a fault and not chance; all together are as ever."""
    work = sampled_by(tmp_path, {(1, 3): 0.01}, length=15)
    assert work.update("v1")["logprob_gap_max"] == pytest.approx(0.01, abs=1e-3)
    (tmp_path / "merged").unlink()
    work = sampled_by(tmp_path, {(1, 3): 0.1}, length=15)
    with pytest.raises(ProgramFailed, match="for the engines: the engine does not serve"):
        work.update("v2")


def test_what_is_left_out_is_this_policy_s(tmp_path: Path) -> None:
    """What an older policy sampled enters with its ratio, whoever served it."""
    work = sampled_by(tmp_path, {})
    told = work.prepare(without_engines=[[1, 3]], policy_version=1)
    assert (told["left_out_groups"], told["trajectories"]) == (0, 32)
