"""Losses and advantages against published or worked numbers, and losses of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from complete_runs import Bench

from fsbarrier.errors import UsageError
from fsbarrier.settings.presets import PRESETS
from fsbarrier.settings.sections import AlgorithmSettings

pytestmark = pytest.mark.torch


# Two sequences of three and two tokens.
NEW = [[-0.5, -1.2, -2.0], [-0.9, -0.4, 0.0]]
OLD = [[-0.6, -1.9, -1.5], [-0.5, -0.8, 0.0]]
ENGINE = [[-0.65, -1.6, -1.5], [-1.4, -0.8, 0.0]]
REFERENCE = [[-0.7, -1.0, -1.8], [-1.1, -0.6, 0.0]]
MASK = [[True, True, True], [True, True, False]]
ADVANTAGES = [1.0, -0.5]

PPO = AlgorithmSettings(clip_low=0.2, clip_high=0.28, dual_clip=None)


def loss_of(algorithm: AlgorithmSettings, constant: int = 4, **changed: Any) -> tuple[Any, Any, Any]:
    """(loss, its gradient to the new log-probabilities, sums), in double precision."""
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

    given = {"new": NEW, "old": OLD, "engine": ENGINE, "reference": REFERENCE, "entropy": [[0.0] * 3] * 2}
    tensors = {name: torch.tensor(changed.get(name, one), dtype=torch.float64) for name, one in given.items()}
    new = tensors["new"].requires_grad_()
    if not algorithm.kl_coef:
        del tensors["reference"]
    mask = torch.tensor(changed.get("mask", MASK))
    weights = torch.tensor(changed.get("advantages", ADVANTAGES), dtype=torch.float64)
    divisor = Divisor(int(mask.sum()), int(mask.any(1).sum()), constant)
    found = minibatch_loss(algorithm, TokenValues(**tensors), weights, mask, divisor)
    found.loss.backward()
    return found.loss.item(), new.grad, torch.stack([*found.sums])


FIRST = [-0.221034, 0.0, -0.121306]
CASES: dict[str, tuple[dict[str, Any], float, list[list[float]] | None]] = {
    "dapo": ({}, -0.3691578, [FIRST, [0.0, 0.149182, 0.0]]),
    "grpo": ({"aggregation": "seq-mean-token-mean"}, -0.2121388, None),
    "dr_grpo": ({"aggregation": "seq-mean-token-sum-norm"}, -0.2307237, None),
    "sums": ({"aggregation": "seq-mean-token-sum"}, -0.9228946, None),
    "dual clip": ({"dual_clip": 1.3}, -0.3883403, [FIRST, [0.0, 0.0, 0.0]]),
    "gspo": (
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
        -0.3025855,
        [[-0.184195] * 3, [0.125, 0.125, 0.0]],
    ),
    "gspo as published": (
        {"loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
        -0.2502000,
        [[0.0] * 3, [0.125, 0.125, 0.0]],
    ),
    "cispo": (
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        0.7164282,
        [[-0.221034, -0.402751, -0.121306], [0.067032, 0.149182, 0.0]],
    ),
    "cispo, two-sided": ({"loss": "cispo"}, 0.6145171, None),
    "sapo": (
        {"loss": "sapo", "aggregation": "seq-mean-token-mean"},
        -0.6130688,
        [[-0.183687, -0.262270, -0.097275], [0.081329, 0.174578, 0.0]],
    ),
    "k1": ({"kl_coef": 2.0, "kl_estimator": "k1"}, -0.3691578 + 2 * 0.04, None),
    "k2": ({"kl_coef": 2.0, "kl_estimator": "k2"}, -0.3691578 + 2 * 0.02, None),
    "k3": ({"kl_coef": 2.0, "kl_estimator": "k3"}, -0.3691578 + 2 * 0.0197996, None),
    "token_tis": ({"mismatch": "token_tis", "mismatch_high": 2.0}, -0.2341400, None),
    "icepop": ({"mismatch": "icepop", "mismatch_high": 2.0}, -0.3941400, None),
    "sequence_mask": ({"mismatch": "sequence_mask", "mismatch_high": 3.0}, 0.0977100, None),
    "sequence_mask, 1.3": ({"mismatch": "sequence_mask", "mismatch_high": 1.3}, -0.4659879, None),
    # Minus the rewards' weighted mean log-probability: (1 * 3.7 - 0.5 * 1.3) / 5.
    "rft": ({"loss": "rft"}, 0.61, [[-0.2] * 3, [0.1, 0.1, 0.0]]),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_published_ones(case: str) -> None:
    import torch

    changes, expected, gradient = CASES[case]
    loss, found, _ = loss_of(replace(PPO, **changes))
    assert loss == pytest.approx(expected, abs=1e-6)
    if gradient is not None:
        torch.testing.assert_close(found, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_minibatch_may_be_split(case: str) -> None:
    """Each sequence alone, divided by what belongs to the whole minibatch, adds up to the same."""
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

    algorithm = replace(PPO, **CASES[case][0])
    parts = []
    for row in range(2):
        given = [torch.tensor([one[row]], dtype=torch.float64) for one in (NEW, OLD, ENGINE, NEW, REFERENCE)]
        values = TokenValues(*given[:4], given[4] if algorithm.kl_coef else None)
        weight = torch.tensor([ADVANTAGES[row]], dtype=torch.float64)
        mask = torch.tensor([MASK[row]])
        parts.append(minibatch_loss(algorithm, values, weight, mask, Divisor(5, 2, 4)).loss.item())
    assert sum(parts) == pytest.approx(loss_of(algorithm)[0], abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_masked_tokens_cannot_spoil_the_loss(case: str) -> None:
    import torch

    wild = [[*row[:2], value] for row, value in zip(OLD, (-1.5, -1e9), strict=True)]
    clean, gradient, _ = loss_of(replace(PPO, **CASES[case][0]))
    found, spoiled, sums = loss_of(
        replace(PPO, **CASES[case][0]), old=wild, engine=[ENGINE[0], [-1.4, -0.8, float("nan")]]
    )
    assert found == clean and torch.equal(gradient, spoiled) and bool(torch.isfinite(sums).all())


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_settings_that_give_a_loss(preset: str) -> None:
    own = {name: value for name, value in PRESETS[preset].items() if "." not in name}
    algorithm = replace(AlgorithmSettings(), **own)  # type: ignore[arg-type]
    loss, gradient, _ = loss_of(algorithm)
    assert loss == loss and bool((gradient[:, :2] == gradient[:, :2]).all())


# --- advantages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "right", "wrong"),
    [
        ({}, 1.620182, -0.540061),
        ({"advantage": "rloo", "normalize_std": False}, 0.857143, -0.285714),
        ({"normalize_std": False}, 0.75, -0.25),
        ({"advantage": "reinforce_plus_plus"}, 1.0, 0.0),
        ({"advantage": "reinforce_plus_plus_baseline"}, 0.75, -0.25),
    ],
)
def test_advantages_of_a_group_are_as_worked_by_hand(
    changes: dict[str, Any], right: float, wrong: float
) -> None:
    from fsbarrier.training.group_weights import group_advantages

    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    found = group_advantages(rewards, AlgorithmSettings(**changes))
    assert (found[0], found[1]) == pytest.approx((right, wrong), abs=1e-6)
    if changes.get("advantage") != "reinforce_plus_plus":
        assert group_advantages([1.0, 1.0], AlgorithmSettings(**changes)) == [0, 0]
        assert group_advantages([1.0], AlgorithmSettings(**changes)) == [0]


def test_a_batch_is_normalised_over_its_tokens() -> None:
    """As verl's masked_whiten: every token counts once, and its variance is Bessel's."""
    import torch

    from fsbarrier.training.advantages import batch_advantages

    advantages, tokens = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([3, 1, 2])
    spread = advantages.repeat_interleave(tokens)
    chosen = AlgorithmSettings(advantage="reinforce_plus_plus")
    expected = (advantages - spread.mean()) / spread.std()
    assert torch.allclose(batch_advantages(advantages, tokens, chosen), expected, atol=1e-5)
    centred = batch_advantages(advantages, tokens, replace(chosen, normalize_std=False))
    assert torch.allclose(centred, advantages - spread.mean())
    assert torch.equal(batch_advantages(advantages, tokens, AlgorithmSettings()), advantages)


def test_the_kl_in_the_reward_of_a_token_is_that_of_the_tokens_after_it_too() -> None:
    """Three sequences, of three, two and one sampled tokens after a prompt of one, the last a segment of the second's trajectory, against
    sums written out in float64."""
    import torch

    from fsbarrier.training.advantages import with_token_weights
    from fsbarrier.training.batch import TrainingBatch

    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1], dtype=torch.uint8)
    policy = torch.tensor([9.0, -1.0, -2.0, -0.5, 9.0, -0.3, -0.7, 9.0, -1.0])
    reference = torch.tensor([0.0, -1.5, -1.0, -0.75, 0.0, -0.3, -1.7, 0.0, -3.0])
    weights, continues = torch.tensor([0.5, -0.25, -0.25]), torch.tensor([0, 0, 1])
    offsets = torch.tensor([0, 4, 7, 9])
    parts = (mask.int(), mask, policy, offsets, weights, mask, mask, continues, mask, ())
    batch = TrainingBatch(*parts, reference=reference)
    algorithm = AlgorithmSettings(advantage="rloo", normalize_std=False, kl_in_reward=0.1)
    # The log-ratios are 0.5, -1, 0.25 and 0, 1, 2.
    by_hand = [0, 0.5 + 0.025, 0.5 + 0.075, 0.5 - 0.025, 0, -0.25 - 0.3, -0.25 - 0.3, 0, -0.25 - 0.2]
    weighed, kl = with_token_weights(batch, algorithm, 0.1)
    found = weighed.token_weights
    assert found is not None and torch.allclose(found, torch.tensor(by_hand))
    assert kl == pytest.approx((-0.25 / 3 + 3 / 3) / 2)
    # By the trainer's own log-probabilities, where it computes them.
    same, _ = with_token_weights(replace(batch, old=policy, logprobs=policy - 3), algorithm, 0.1)
    assert same.token_weights is not None and torch.equal(same.token_weights, found)
    of_batch = AlgorithmSettings(advantage="reinforce_plus_plus", kl_in_reward=0.1)
    whitened, _ = with_token_weights(batch, of_batch, 0.1)
    of_tokens = torch.tensor(by_hand, dtype=torch.float64)[mask.bool()]
    expected = (of_tokens - of_tokens.mean()) / of_tokens.std()
    assert whitened.token_weights is not None
    assert torch.allclose(whitened.token_weights[mask.bool()].double(), expected, atol=1e-5)
    assert with_token_weights(batch, AlgorithmSettings(), 0.0) == (batch, None)


def test_the_coefficient_of_the_kl_follows_its_target() -> None:
    """verl's controller: target 0.1, horizon 10000, 100 trajectories an update."""
    from fsbarrier.training.advantages import adapted

    adaptive = AlgorithmSettings(kl_in_reward=0.2, kl_target=0.1)
    for kl, error in ((5.0, 0.2), (0.11, 0.1), (0.1, 0.0), (0.09, -0.1), (0.0, -0.2), (-3.0, -0.2)):
        assert adapted(0.2, kl, 100, adaptive) == pytest.approx(0.2 * (1 + error * 100 / 10_000))
    assert adapted(0.2, 5.0, 100, AlgorithmSettings(kl_in_reward=0.2)) == 0.2
    # More trajectories than the horizon has count as that many: the coefficient stays above 0.
    assert adapted(0.2, 0.0, 90_000, adaptive) == pytest.approx(0.16)


def test_a_weight_for_each_token_is_a_sum_of_losses_with_one_for_each_sequence() -> None:
    """The gradient to a token's log-probability is that with its own weight alone."""
    import torch

    chosen = AlgorithmSettings(clip_low=0.2, clip_high=0.28, dual_clip=None, aggregation="seq-mean-token-sum")
    by_token = [[0.5, -1.0, 0.25], [2.0, -0.5, 0.0]]
    _, together, _ = loss_of(chosen, advantages=by_token)
    for row in range(2):
        for column in range(3):
            _, alone, _ = loss_of(chosen, advantages=[by_token[one][column] for one in range(2)])
            assert torch.allclose(together[row, column], alone[row, column])


def test_long_answers_lose_reward_little_by_little() -> None:
    """DAPO's limits: none up to 16,384 tokens, then up to 1 at 20,480."""
    from fsbarrier.training.group_weights import overlong_penalty

    lengths = (10, 16_384, 18_432, 20_480, 20_500)
    assert [overlong_penalty(length, 20_480) for length in lengths] == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, {1: 0.25, 4: 1.0, 1000: 1.0}),
        ({"schedule": "linear", "decay_steps": 104}, {2: 0.5, 4: 1.0, 54: 0.5, 104: 0.0, 200: 0.0}),
        ({"schedule": "cosine", "decay_steps": 104}, {4: 1.0, 29: 0.8535534, 54: 0.5, 104: 0.0}),
        ({"schedule": "cosine", "decay_steps": 100, "warmup_steps": 0}, {1: 0.9997533, 50: 0.5}),
    ],
)
def test_the_learning_rate_rises_and_falls(changes: dict[str, Any], rates: dict[int, float]) -> None:
    from fsbarrier.settings.sections import OptimizerSettings
    from fsbarrier.training.optimizer import learning_rate_of

    settings = OptimizerSettings(lr=2.0, **changes)
    found = {step: learning_rate_of(settings, step) / 2 for step in rates}
    assert found == pytest.approx(rates, abs=1e-6)


# --- a loss of one's own --------------------------------------------------------------------------------------------------------


LOSSES = """
import torch

def clipped(new, old, advantages, mask):
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)

def likelihood(**given):
    return -given["new"] * given["advantages"]

def by_length(new, advantages, mask):
    return -new * advantages / mask.sum(1, keepdim=True)

def of_sequences(new, old, advantages):
    new -= old  # an update gives no leaves, and zeros where no token counts
    return -new.sum(1, keepdim=True).exp() * advantages.clone()

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


@pytest.mark.parametrize("name", ["clipped", "likelihood", "of_sequences"])
def test_what_can_be_trained_with_passes_the_trial(file: Path, name: str) -> None:
    from fsbarrier.training.own_loss import try_loss

    try_loss(own(file, name))
    try_loss(own(file, "far", kl_coef=0.1))


def test_a_process_without_sequences_adds_nothing_to_the_gradient(file: Path) -> None:
    """It takes part with a sequence of which no token counts, also where the function divides by their number."""
    value, gradient, _ = loss_of(own(file, "by_length"), mask=[[True] * 3, [False] * 3])
    assert abs(value) < 9 and gradient[0].all() and not gradient[1].any()


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_trained_with_is_one_line(tmp_path: Path, case: str) -> None:
    from fsbarrier.training.own_loss import try_loss

    body = f"def {case}" if ":" in case else f"def {case}: return new" if "(" in case else ""
    (tmp_path / "wrong.py").write_text(f"VALUE = 1\n{body}\n")
    value = f"{tmp_path / 'wrong.py'}:{case.partition('(')[0]}"
    with pytest.raises(UsageError, match=WRONG[case]) as caught:
        try_loss(replace(PPO, loss=value))
    assert str(caught.value).startswith(f"algorithm.loss={value}: ") and "\n" not in str(caught.value)


def test_a_run_learns_what_the_built_in_loss_does(bench: Bench, tmp_path: Path, file: Path) -> None:
    """The whole way: the same journal, whether the clipped ratio is built in or the user's."""
    found = []
    for name, *bound in (("grpo", "algorithm.dual_clip=none"), (f"{file}:clipped",)):
        run = tmp_path / name.rpartition(":")[2]
        updated = (
            bench.run(run, "--iterations", "2", *bound, f"algorithm.loss={name}").check().events("updated")
        )
        found.append([(one["loss"], one["grad_norm"], one["optimizer_steps"]) for one in updated])
    assert found[0] == found[1] and len(found[0]) == 2 and all(norm > 0 for _, norm, _ in found[0])
