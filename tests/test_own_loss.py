"""A loss of the user's own: equal to the built-in one that it repeats, and what cannot be trained with is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from complete_runs import Bench
from test_losses import CASES, PPO, loss_of

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import AlgorithmSettings

pytestmark = pytest.mark.torch

LOSSES = """
import torch

def clipped(new, old, advantages, mask):
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)

def likelihood(**given):
    return -given["new"] * given["advantages"]

def by_length(new, advantages, mask):
    return -new * advantages / mask.sum(1, keepdim=True)

def far(new, reference, entropy, engine, factor=2.0):
    return factor * (new - reference) + entropy * engine
"""
WRONG = {
    "missing": "does not define missing",
    "VALUE": "VALUE is not a function",
    "asks(new, more)": "its parameters may be new, old, engine, reference, entropy, advantages, mask: missing a required argument: 'more'",
    "raises(new): return new / nobody": r"NameError: name 'nobody' is not defined \(wrong.py, line \d+\)",
    "leaves(new): raise SystemExit(3)": "SystemExit: 3",
    "of_sequences(new): return new.sum(1)": r"must return the loss of each token, a tensor \[2, 3\].* but gave a tensor \[2\]",
    "number(new): return 1.0": "but gave 1.0",
    "detached(new): return -new.detach()": "has no gradient",
    "infinite(new): return new / 0": "is not finite",
    "summed(new): return new.sum()": r"must return the loss of each token, a tensor \[2, 3\], but gave a tensor \[\]",
    "mean(new, mask): return new / mask.sum()": "depends on what is beside it",
    "longest(new): return new / new.shape[1]": "depends on what is beside it",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path / "losses.py"


def own(file: Path, name: str, **changed: object) -> AlgorithmSettings:
    return replace(PPO, loss=f"{file}:{name}", **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        *({"aggregation": one} for one in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")),
        {"aggregation": "seq-mean-token-sum-norm"},
        {"mismatch": "token_tis"},
        {"kl_coef": 2.0, "kl_estimator": "k3"},
        {"entropy_coef": 0.5},
    ],
)
def test_it_is_the_built_in_loss_that_it_repeats(file: Path, changes: dict[str, object]) -> None:
    import torch

    value, gradient, sums = loss_of(own(file, "clipped", **changes))
    expected, right, other = loss_of(replace(PPO, **changes))  # type: ignore[arg-type]
    assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, right)
    # How many tokens are clipped is not known of a function.
    assert torch.equal(sums[2:], other[2:]) and not sums[:2].any()


def test_it_gets_what_it_names(file: Path) -> None:
    value, _, _ = loss_of(own(file, "likelihood"))
    assert value == pytest.approx(CASES["rft"][1], abs=1e-12)
    # 2 * (new - reference) with an entropy of zero, and k2 beside it with its weight.
    value, _, _ = loss_of(own(file, "far", kl_coef=2.0, kl_estimator="k2"))
    assert value == pytest.approx(2 * 0.04 + 2 * 0.02, abs=1e-12)


@pytest.mark.parametrize("name", ["clipped", "likelihood"])
def test_what_can_be_trained_with_passes_the_trial(file: Path, name: str) -> None:
    from fsbarrier.training.try_loss import try_loss

    try_loss(own(file, name))
    try_loss(own(file, "far", kl_coef=0.1))


def test_a_process_without_sequences_adds_nothing_to_the_gradient(file: Path) -> None:
    """It takes part with a sequence of which no token counts, also where the function divides by their number."""
    value, gradient, _ = loss_of(own(file, "by_length"), mask=[[True] * 3, [False] * 3])
    assert abs(value) < 9 and gradient[0].all() and not gradient[1].any()


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_trained_with_is_one_line(tmp_path: Path, case: str) -> None:
    from fsbarrier.training.try_loss import try_loss

    body = f"def {case}" if ":" in case else f"def {case}: return new" if "(" in case else ""
    (tmp_path / "wrong.py").write_text(f"VALUE = 1\n{body}\n")
    value = f"{tmp_path / 'wrong.py'}:{case.partition('(')[0]}"
    with pytest.raises(UsageError, match=WRONG[case]) as caught:
        try_loss(replace(PPO, loss=value))
    assert str(caught.value).startswith(f"algorithm.loss={value}: ") and "\n" not in str(caught.value)


def test_a_run_learns_what_the_built_in_loss_does(bench: Bench, tmp_path: Path, file: Path) -> None:
    """The whole way: the same journal, whether the clipped ratio is built in or the user's."""
    chosen = (
        "--iterations",
        "2",
        "algorithm.clip_low=0.2",
        "algorithm.clip_high=0.28",
        "algorithm.dual_clip=none",
    )
    found = []
    for name in ("grpo", f"{file}:clipped"):
        run = tmp_path / name.rpartition(":")[2]
        updated = bench.run(run, *chosen, f"algorithm.loss={name}").check().events("updated")
        found.append([(one["loss"], one["grad_norm"], one["optimizer_steps"]) for one in updated])
    assert found[0] == found[1] and len(found[0]) == 2 and all(norm > 0 for _, norm, _ in found[0])
