"""The update: the same for any number of processes, exact resume, honest about what does not fit together."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_warm
from hypothesis import given
from hypothesis import strategies as st
from trainer_bench import (
    REPO,
    Bench,
    bench,
    first_weights,
    flat,
    largest_difference,
    policy_of,
    rollouts,
    settings,
    tiny_model,
)

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import checkpoints, known_logprobs

pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_update_is_the_same_however_many_processes_share_it(tmp_path: Path) -> None:
    """24 trajectories in minibatches of 10 and 14: neither 2 nor 3 processes get equal shards of all of them."""
    work = bench(tmp_path)
    work.prepare()
    alone = work.update("alone")
    two = work.torchrun(
        work.update_spec("two"), work.update_spec("two", result=str(tmp_path / "second.result"))
    )
    three = work.torchrun(work.update_spec("three"), processes=3)
    for process, said in (*two, *three):
        assert process.returncode == 0, said
    assert largest_difference(work.weights("alone"), first_weights(tmp_path)) > 1e-4
    for name in ("two", "three"):
        assert largest_difference(work.weights("alone"), work.weights(name)) < 1e-5
        assert checkpoints.verify(tmp_path / name).policy_version == 1
        result = flat(json.loads((tmp_path / f"{name}.result").read_text()))
        assert result["logprob_gap_max"] < 1e-4 and result["optimizer_steps"] == 4
        assert result["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        assert result["distributed"] == f"replicated on {2 if name == 'two' else 3} processes (float32)"
    # a node has gone: the same state goes on with another world size
    work.nested["algorithm"]["max_logprob_gap"] = 100.0  # the rollouts are the old policy's
    assert work.update("after", version=2, before="three")["optimizer_steps"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_node_that_fails_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    work = bench(tmp_path)
    work.prepare()
    (first, first_said), (second, second_said) = work.torchrun(
        work.update_spec("out"), work.update_spec("out", batch=str(tmp_path / "absent"))
    )
    assert first.returncode != 0 and second.returncode != 0
    last_lines = "\n".join(second_said.splitlines()[-20:])  # what the daemon shows of a log
    assert f"{tmp_path / 'absent'} is not a training batch" in last_lines, second_said
    assert "lost contact with the trainer on another node" in first_said
    assert not (tmp_path / "out" / checkpoints.MANIFEST).exists()


# What Python itself ends with is that it takes its modules apart; the first one is the program's own.
ENDS = """
import atexit, os, runpy, sys

class Abort:
    def __del__(self):
        os.abort()

sys.modules["late"] = type(sys)("late")
sys.modules["late"].abort = Abort()
atexit.register(print, "at the exit")
del Abort
runpy.run_module("fsbarrier.workers.update", run_name="__main__", alter_sys=True)
"""


def test_an_update_that_is_done_has_not_failed_while_the_interpreter_ends(tmp_path: Path) -> None:
    """PyTorch's threads may still want something of the interpreter then, and be aborted for it."""
    work = bench(tmp_path)
    work.prepare()
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(work.update_spec("v1")))
    argv = [sys.executable, "-c", ENDS, "--spec", str(spec)]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert checkpoints.verify(tmp_path / "v1").policy_version == 1


def test_an_update_without_a_batch_fails_and_says_so(tmp_path: Path) -> None:
    work = bench(tmp_path)
    work.prepare()
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(work.update_spec("v1", batch=str(tmp_path / "absent"))))
    argv = [sys.executable, "-m", "fsbarrier.workers.update", "--spec", str(spec)]
    done = run_warm(argv, env={**os.environ, "PYTHONPATH": str(REPO)})
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "not a training batch" in done.stderr


def test_a_resumed_trainer_does_what_one_that_never_stopped_does(tmp_path: Path) -> None:
    """Two updates with the state saved and loaded between them, against the same two without: equal to the last bit."""
    from transformers import AutoModelForCausalLM

    from fsbarrier.training.batch import TrainingBatch
    from fsbarrier.training.optimizer_step import train

    work = bench(tmp_path)
    work.prepare()
    kept = work.trainer()
    train(kept, TrainingBatch.load(tmp_path / "batch"), work.settings, tmp_path / "model")

    work.update("v1")
    (tmp_path / "merged").unlink()
    rollouts(tmp_path / "merged", AutoModelForCausalLM.from_pretrained(tmp_path / "v1" / "model"))
    work.prepare()
    work.update("v2", version=2, before="v1")
    work.update("fresh", version=2, before="v1", trainer_state=None)

    train(kept, TrainingBatch.load(tmp_path / "batch"), work.settings, tmp_path / "model")
    assert largest_difference(work.weights("v2"), dict(kept.model.causal.state_dict())) == 0
    assert largest_difference(work.weights("v2"), work.weights("fresh")) > 1e-5


def test_an_update_goes_on_with_what_is_in_memory_only_if_that_is_what_the_run_stands_on(
    tmp_path: Path,
) -> None:
    """Equal to the last bit to one that loads, and anything but the very policy by its digest is loaded."""
    from transformers import AutoModelForCausalLM

    from fsbarrier.workers.update import Updates, leave

    def update(out: str, **fields: Any) -> dict[str, Any]:
        return work.update_by(updates, out, **fields)

    work, updates = bench(tmp_path), Updates()
    work.nested["trainer"]["timeout_s"] = 60
    work.prepare()
    assert update("v1", policy="start")["went_on"] is False
    (tmp_path / "merged").unlink()
    rollouts(tmp_path / "merged", AutoModelForCausalLM.from_pretrained(tmp_path / "v1" / "model"))
    work.prepare()
    kept = update("v2", version=2, before="v1")
    assert kept["went_on"] is True and updates.stay()
    # It holds version 2 now, and is asked for version 1.
    loaded = update("again", version=2, before="v1")
    # Then for what has the name of what it holds, and is version 1.
    shutil.copytree(tmp_path / "again", tmp_path / "made-again")
    shutil.rmtree(tmp_path / "again")
    shutil.copytree(tmp_path / "v1", tmp_path / "again")
    other = update("other", version=2, before="again")
    assert loaded["went_on"] is other["went_on"] is False
    assert largest_difference(work.weights("v2"), work.weights("made-again")) == 0
    assert largest_difference(work.weights("v2"), work.weights("other")) == 0
    for name in ("v2", "made-again"):
        layout = json.loads((tmp_path / name / "trainer" / "layout.json").read_text())
        assert layout["optimizer_steps"] == 8
    leave()


def test_what_is_in_memory_was_made_with_the_settings_of_now_or_is_not_gone_on_with(tmp_path: Path) -> None:
    """A weight decay that is changed during a run is in effect from the next update on, also for processes that stay."""
    from fsbarrier.workers.update import Updates, leave

    def update(updates: Updates, out: str, **fields: Any) -> bool:
        return bool(work.update_by(updates, out, **fields)["went_on"])

    work, stayed = bench(tmp_path, optimizer__lr=1e-2), Updates()
    # The batch is always the same, so it is another policy's from the second update on.
    work.nested["algorithm"]["max_logprob_gap"] = 1e9
    work.prepare()
    assert not update(stayed, "v1", policy="start")
    work.nested["optimizer"]["weight_decay"] = 0.5
    assert not update(stayed, "v2", version=2, before="v1")
    assert update(stayed, "v3", version=3, before="v2")
    update(Updates(), "anew", version=2, before="v1")
    assert largest_difference(work.weights("v2"), work.weights("anew")) == 0
    leave()


def test_another_policy_in_the_place_of_the_published_one_is_refused(tmp_path: Path) -> None:
    """Whole and in itself right: its weights, its state and its manifest."""
    work = bench(tmp_path)
    work.prepare()
    work.update("v1")
    published = work.identity("v1")
    # A run that an older fsbarrier began has published this digest: it is that of the file.
    in_file = hashlib.sha256((tmp_path / "v1" / checkpoints.MANIFEST).read_bytes()).hexdigest()
    assert published == f"v1:{in_file[:16]}"
    shutil.rmtree(tmp_path / "v1")
    work.nested["optimizer"]["lr"] = 1e-2
    work.update("v1")
    with pytest.raises(ProgramFailed, match=rf"v1 holds another policy than was published .*{published}\)"):
        work.update("v2", version=2, before="v1", policy=published)
    # A program of one's own may have published no digest.
    checkpoints.check_identity(tmp_path / "v1", "v1:")


def test_weights_that_were_not_served_are_noticed(tmp_path: Path) -> None:
    work = bench(tmp_path)
    work.prepare()
    work.update("v1")
    with pytest.raises(ProgramFailed, match="the engine does not serve the weights"):
        work.update("v2", version=2, before="v1")
    assert not (tmp_path / "v2" / checkpoints.MANIFEST).exists()


def test_a_version_is_neither_written_over_nor_gone_on_with_under_another_number(tmp_path: Path) -> None:
    """A second update into the same folder would replace what is served, and a state of another version would take wrong steps."""
    work = bench(tmp_path)
    work.prepare()
    work.update("v1")
    check_that_its_size_was_planned(work)
    published = work.identity("v1")
    with pytest.raises(ProgramFailed, match=r"v1 is already a complete policy version; nothing was written"):
        work.update("v1")
    assert work.identity("v1") == published and checkpoints.verify(tmp_path / "v1").policy_version == 1
    said = r"v1/trainer: cannot resume the trainer: this state belongs to policy version 1, but the model is version 2"
    with pytest.raises(ProgramFailed, match=said):
        work.update("v3", version=3, before="v1")
    assert not (tmp_path / "v3" / checkpoints.MANIFEST).exists()


def check_that_its_size_was_planned(work: Bench) -> None:
    """`fsbarrier plan` against the tensors that are on the disk: the served weights, and the trainer's state beside them."""
    from safetensors.torch import load_file

    from fsbarrier.planning.cluster_plan import checkpoint_bytes

    def tensors(pattern: str) -> int:
        return sum(
            tensor.numel() * tensor.element_size()
            for file in (work.folder / "v1").glob(pattern)
            for tensor in load_file(file).values()
        )

    count = sum(tensor.numel() for tensor in work.weights("v1").values())
    planned = checkpoint_bytes(count, count, 4, work.settings, 0)
    assert tensors("model/*.safetensors") == planned.model
    assert tensors("trainer/*.safetensors") == planned.trainer_state


def test_log_probabilities_are_compared_at_the_sampling_temperature(tmp_path: Path) -> None:
    work = Bench(tmp_path, settings(rollout__temperature=0.7))
    rollouts(tmp_path / "merged", tiny_model(tmp_path / "model"), temperature=0.7)
    work.prepare()
    assert work.update("v1")["logprob_gap_max"] < 1e-4
    work.nested["rollout"]["temperature"] = 1.0
    with pytest.raises(ProgramFailed, match="max_logprob_gap"):
        work.update("other")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_version_tells_what_an_engine_must_compute_with_it(tmp_path: Path, rank: int) -> None:
    """Without the temperature that rollouts have, and not what the model before it computes."""
    import torch
    from transformers import AutoModelForCausalLM

    work = Bench(
        tmp_path,
        settings(rollout__temperature=0.7, lora__rank=rank, optimizer__lr=0.05, engine__max_model_len=6),
    )
    rollouts(tmp_path / "merged", tiny_model(tmp_path / "model"), temperature=0.7)
    work.prepare()
    work.update("v1")
    known = known_logprobs.read(tmp_path / "v1")
    assert known is not None and known.limit == 0.002 and len(known.sequences) == 16
    gaps = []
    for folder in (tmp_path / "v1" / "model", tmp_path / "model"):
        model, computed = AutoModelForCausalLM.from_pretrained(folder), []
        for one in known.sequences:
            tokens = torch.tensor([one.token_ids])
            with torch.no_grad():
                found = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])
            computed.append([0.0, *found[:, 0].tolist()])
        gaps.append(known.gap(computed))
    assert gaps[0] < 1e-5 and gaps[1] > 0.01, gaps
    # An engine says one token more than it reads.
    assert {len(one.token_ids) for one in known.sequences} == {3, 4, 5}
    compared = [[at for at, value in enumerate(one.logprobs) if value is not None] for one in known.sequences]
    assert {tuple(one) for one in compared} == {(2,), (2, 3), (2, 3, 4)}
    assert "logprobs.json" in checkpoints.verify(tmp_path / "v1").files
    (tmp_path / "v1" / "logprobs.json").write_text("{}")
    with pytest.raises(ProgramFailed, match=r"logprobs\.json differs from what MANIFEST\.json says"):
        known_logprobs.read(tmp_path / "v1")


def test_a_loss_that_is_no_number_leaves_no_checkpoint(tmp_path: Path) -> None:
    import torch

    work = bench(tmp_path, algorithm__max_logprob_gap=1e9)
    work.prepare()
    batch = torch.load(tmp_path / "batch", weights_only=True)
    batch["weights"][0] = float("nan")
    torch.save(batch, tmp_path / "batch")
    with pytest.raises(ProgramFailed, match=r"optimizer step 1: loss nan.*nothing was saved"):
        work.update("v1")
    assert not (tmp_path / "v1").exists()


def test_a_tied_model_stays_tied(tmp_path: Path) -> None:
    """One tensor, trained from both its ends, in the published folder once."""
    from transformers import AutoModelForCausalLM

    work = bench(tmp_path, tied=True)
    work.prepare()
    work.update("v1")
    config = json.loads((tmp_path / "v1" / "model" / "config.json").read_text())
    weights = work.weights("v1")
    assert config["tie_word_embeddings"] is True and "lm_head.weight" not in weights
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v1" / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    moved = (
        weights["model.embed_tokens.weight"] - first_weights(tmp_path)["model.embed_tokens.weight"]
    ).abs()
    # Tokens that no sequence has as input are moved by the head alone.
    assert float(moved.max(1).values.min()) > 1e-5
    work.nested["algorithm"]["max_logprob_gap"] = 100.0
    assert work.update("v2", version=2, before="v1")["optimizer_steps"] == 4


def test_nothing_to_learn_from_is_no_failure(tmp_path: Path) -> None:
    work = Bench(tmp_path, settings())
    rollouts(tmp_path / "merged", tiny_model(tmp_path / "model"), rewards=(1, 1, 1, 1))
    assert work.prepare()["dropped_groups"] == 6
    result = work.update("v1")
    assert result["optimizer_steps"] == 0 and "unchanged" in result["note"]
    assert 0.1 < result["memory_peak_gb"] < 10
    assert largest_difference(work.weights("v1"), first_weights(tmp_path)) == 0
    assert checkpoints.verify(tmp_path / "v1").policy_version == 1
    (tmp_path / "merged").unlink()
    rollouts(tmp_path / "merged", tiny_model(tmp_path / "again"))
    work.prepare()
    assert work.update("v2", version=2, before="v1")["optimizer_steps"] == 4


def test_a_model_folder_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    work = bench(tmp_path)
    work.prepare()
    weights = first_weights(tmp_path)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"it lacks model\.norm\.weight"):
        work.update("v1")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match="cannot be loaded"):
        work.update("v1")
    config = tmp_path / "model" / "config.json"
    known = json.loads(config.read_text())
    for wrong, said in (
        ({"dtype": "bfloat61"}, "bfloat61"),
        ({"num_hidden_layers": 32}, r"\(32\) must be equal"),
    ):
        config.write_text(json.dumps(known | wrong))
        with pytest.raises(UsageError, match=f"cannot be loaded: .*{said}"):
            work.update("v1")


def test_rejection_sampling_makes_successes_likelier(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from fsbarrier.training.batch import TrainingBatch
    from fsbarrier.training.losses import token_log_probs
    from fsbarrier.training.micro_batch import MicroBatch

    work = bench(tmp_path, algorithm__loss="rft")
    assert work.prepare()["trajectories"] == 12
    work.update("v1")
    batch = TrainingBatch.load(tmp_path / "batch")
    micro = MicroBatch.of(batch, list(range(12)), torch.device("cpu"), packed=False)
    totals = []
    for name in ("model", "v1/model"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            logits = model(**micro.inputs).logits
        totals.append(float(token_log_probs(logits, micro.inputs["input_ids"], 1.0)[0][micro.mask].sum()))
    assert totals[1] > totals[0] + 1


def test_only_what_this_policy_sampled_is_compared_with_it(tmp_path: Path) -> None:
    """Older rollouts train, and their log-probabilities, which are another policy's, are held against nobody."""
    work = bench(tmp_path, update__recency=2)
    work.prepare()
    work.update("v1")
    rollouts(tmp_path / "newer", policy_of(tmp_path / "v1" / "model"), policy_version=1)
    mixed = {
        "merged": [str(tmp_path / "newer"), str(tmp_path / "merged")],
        "policy_version": 1,
        "iteration": 2,
    }
    prepared = work.prepare(**mixed)
    assert 0 < prepared["replayed"] < prepared["trajectories"]
    result = work.update("v2", version=2, before="v1")
    assert result["logprob_gap_max"] < 1e-4 and result["replayed"] == prepared["replayed"]
    work.nested["update"]["recency"] = 1
    work.prepare(policy_version=2, iteration=3)
    result = work.update("v3", version=3, before="v2")
    assert result["logprob_gap_mean"] is None and result["optimizer_steps"] > 0


def test_the_ratio_is_to_what_the_trainer_computes_itself(tmp_path: Path) -> None:
    """An engine that is far off puts every ratio beyond its bounds; with the trainer's own log-probabilities the first ratio is 1."""
    wide = {"algorithm__max_logprob_gap": 9.0, "trainer__minibatch": 24, "trainer__epochs": 1}
    found = {}
    for name in ("engine", "trainer"):
        work = bench(tmp_path / name, algorithm__old_logprobs=name, **wide)
        work.prepare()
        change_batch(work, logprobs=lambda old: old - 0.6 * (old != 0))
        found[name] = work.update("v1")
    assert found["engine"]["clip_fraction"] > 0.4 and found["engine"]["policy_kl"] > 0.1
    assert found["trainer"]["clip_fraction"] == 0 and found["trainer"]["policy_kl"] == pytest.approx(
        0, abs=1e-9
    )
    assert found["trainer"]["mismatch_kl"] == pytest.approx(0.6 + 0.548812 - 1, abs=1e-3)
    corrected = bench(tmp_path / "icepop", algorithm__mismatch="icepop", algorithm__mismatch_high=1.5, **wide)
    corrected.prepare()
    change_batch(corrected, logprobs=lambda old: old - 0.6 * (old != 0))
    # e ** 0.6 is above 1.5: no token counts, and nothing changes.
    assert corrected.update("v1")["mismatch_dropped"] == 1
    assert same_weights(corrected, "", "v1")
    # A likelihood has no ratio, but it is corrected too.
    corrected.nested["algorithm"] |= {"loss": "rft"}
    assert corrected.update("rft")["mismatch_dropped"] == 1


def test_a_policy_comes_nearer_to_its_reference(tmp_path: Path) -> None:
    """Nothing but the distance to another policy counts; that to itself is nothing."""
    chosen = {"algorithm__kl_coef": 1.0, "algorithm__max_logprob_gap": 9.0, "optimizer__lr": 0.01}
    work = bench(tmp_path, **chosen, trainer__epochs=1, trainer__minibatch=24)
    work.prepare()
    change_batch(work, weights=lambda weights: 0 * weights)
    assert work.update("same", reference=str(tmp_path / "model"))["kl"] == pytest.approx(0, abs=1e-9)
    other = policy_of(tmp_path / "model")
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    first = work.update("v1", reference=str(tmp_path / "other"))
    second = work.update("v2", version=2, before="v1", reference=str(tmp_path / "other"))
    assert 0 < second["kl"] < first["kl"] and first["entropy"] > 1


def test_the_coefficient_of_the_kl_goes_on_where_it_was(tmp_path: Path) -> None:
    """Each update uses what the one before has left, also in new processes, and grows by a fifth of 24 trajectories over 10,000."""
    work = bench(tmp_path, algorithm__kl_in_reward=0.5, algorithm__kl_target=1e-9)
    work.nested["algorithm"] |= {"normalize_std": False, "max_logprob_gap": 99.0}
    work.prepare()
    other = tiny_model(tmp_path / "other" / "model")
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other" / "model")
    seen = []
    for version in (1, 2, 3):
        before = f"v{version - 1}" if version > 1 else ""
        reference = str(tmp_path / "other" / "model")
        told = work.update(f"v{version}", version=version, before=before, reference=reference)
        assert told["reward_kl"] > 0
        seen.append(told["reward_kl_coef"])
    growth = 1 + 0.2 * 24 / 10_000
    assert seen == pytest.approx([0.5, 0.5 * growth, 0.5 * growth**2], rel=1e-9)


def change_batch(work: Any, **changes: Any) -> None:
    import torch

    batch = torch.load(work.folder / "batch", weights_only=True)
    for name, change in changes.items():
        batch[name] = change(batch[name])
    torch.save(batch, work.folder / "batch")


def same_weights(work: Any, one: str, other: str) -> bool:
    import torch

    first, second = work.weights(one), work.weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_try_after_a_failure_takes_less_at_a_time(tmp_path: Path) -> None:
    import torch

    work = bench(tmp_path, trainer__max_tokens_per_micro_batch=64)
    work.prepare()
    first = work.update("v1")
    second = work.update("w1", attempt=1)
    assert (first["max_tokens_per_micro_batch"], second["max_tokens_per_micro_batch"]) == (64, 16)
    for name, weight in work.weights("v1").items():
        torch.testing.assert_close(work.weights("w1")[name], weight, rtol=0, atol=1e-4)


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40),
    world=st.integers(1, 5),
    most_tokens=st.integers(1, 200),
    packed=st.booleans(),
)
def test_a_plan_deals_out_every_trajectory_once(
    lengths: list[int], world: int, most_tokens: int, packed: bool
) -> None:
    from fsbarrier.training.micro_batch import plan

    planned = plan(list(range(len(lengths))), lengths, world, most_tokens=most_tokens, packed=packed)
    assert sorted(i for rank in planned for micro in rank for i in micro) == list(range(len(lengths)))
    assert len(planned) == world and len({len(rank) for rank in planned}) == 1

    def tokens(micro: list[int]) -> int:
        of = [lengths[index] for index in micro]
        return sum(of) if packed else len(of) * max(of, default=0)

    for rank in planned:
        for micro, following in zip(rank, [*rank[1:], []], strict=True):
            assert len(micro) <= 1 or tokens(micro) <= most_tokens
            # None ends while there is room for the next one.
            if following:
                assert tokens([*micro, following[0]]) > most_tokens
