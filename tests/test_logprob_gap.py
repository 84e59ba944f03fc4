"""The log-probabilities of each engine against the trainer's: one bad replica does not hide among good ones, and is named."""

from __future__ import annotations

from array import array
from pathlib import Path

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
    work = Bench(folder, settings(trainer__minibatch=100))
    work.prepare()
    return work


def test_one_replica_of_eight_is_found_and_named(tmp_path: Path) -> None:
    # Over all of them together this is below the limit of 0.002.
    work = sampled_by(tmp_path, {(1, 3): 0.01})
    message = r"differ by 0\.0100 on average .* for engine 3 of node 1: .*the other 7 engines agree: start that node again"
    with pytest.raises(ProgramFailed, match=message):
        work.update("v1")
