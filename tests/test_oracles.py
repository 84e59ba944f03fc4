"""Losses and advantages against formulas that were written from the papers, in plain Python: they share no code with what they judge.

    PPO 1707.06347, dual clip 1912.09729, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585, SAPO 2511.20347, RFT 2308.01825, the
    estimators of the KL joschu.net/blog/kl-approx.html, TIS fengyao.notion.site/off-policy-rl, IcePop 2510.18855, Dr.GRPO 2503.20783,
    GRPO 2402.03300, RLOO 2402.14740, REINFORCE++ 2501.03262, GAE 1506.02438, the KL in the reward 2203.02155, distillation 2306.13649

Every case has ragged answers with gaps in them (what a tool said), and numbers outside the mask that would spoil each sum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.settings.sections import AlgorithmSettings

pytestmark = pytest.mark.torch

Row = list[float]
# what stands outside the mask, where nothing may look
WILD = 1e3


@dataclass(frozen=True)
class Case:
    """Some sequences, as lists: log-probabilities by the policy, before the first step, by the engine, by the reference; the entropies,
    the advantages, and which tokens are trained on."""

    new: list[Row]
    old: list[Row]
    engine: list[Row]
    reference: list[Row]
    entropy: list[Row]
    advantages: list[Row]
    mask: list[list[bool]]


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    length = rng.randint(4, 7)
    mask = [[rng.random() < 0.7 for _ in range(length)] for _ in range(rng.randint(2, 4))]
    for number, row in enumerate(mask):
        row[number % length] = True
    mask[0][1] = False

    def values(low: float, high: float) -> list[Row]:
        return [[rng.uniform(low, high) if trained else WILD for trained in row] for row in mask]

    new, old, engine = (values(-2.0, -0.1) for _ in range(3))
    signs = [[rng.choice((-1.5, -0.4, 0.3, 1.2)) if trained else WILD for trained in row] for row in mask]
    return Case(new, old, engine, values(-2.0, -0.1), values(0.1, 1.5), signs, mask)


# --- the policy's loss ----------------------------------------------------------------------------------------------------------


def clipped(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def ppo(a: AlgorithmSettings, ratio: float, advantage: float) -> float:
    """-J of 1707.06347, and with a negative advantage no more than c * A (1912.09729)."""
    gain = min(ratio * advantage, clipped(ratio, 1 - a.clip_low, 1 + a.clip_high) * advantage)
    return -max(gain, a.dual_clip * advantage) if a.dual_clip and advantage < 0 else -gain


def token_losses(a: AlgorithmSettings, case: Case, row: int, new: Row, frozen: Row) -> dict[int, float]:
    """The loss of each trained token of a sequence. `frozen`: the policy's log-probabilities where the paper stops the gradient."""
    tokens = [t for t, trained in enumerate(case.mask[row]) if trained]
    old, engine, reference = case.old[row], case.engine[row], case.reference[row]
    together = math.exp(sum(new[t] - old[t] for t in tokens) / len(tokens))
    gap = {t: math.exp(old[t] - engine[t]) for t in tokens}
    of_sequence = math.prod(gap.values())
    losses = {}
    for t in tokens:
        advantage, ratio = case.advantages[row][t], math.exp(new[t] - old[t])
        match a.loss:
            case "grpo":
                loss = ppo(a, ratio, advantage)
            case "gspo":
                loss = ppo(a, together, advantage)
            case "cispo":
                weight = clipped(math.exp(frozen[t] - old[t]), 1 - a.clip_low, 1 + a.clip_high)
                loss = -weight * advantage * new[t]
            case "sapo":
                sharpness = 1.0 if advantage > 0 else 1.05
                gate = 4 / sharpness / (1 + math.exp(-sharpness * (ratio - 1)))
                loss = -gate * advantage
            case _:
                loss = -advantage * new[t]
        match a.mismatch:
            case "token_tis":
                loss *= min(gap[t], a.mismatch_high)
            case "icepop":
                loss *= gap[t] if 0.5 <= gap[t] <= a.mismatch_high else 0.0
            case "sequence_mask":
                loss *= of_sequence if of_sequence <= a.mismatch_high else 0.0
        if a.kl_coef:
            apart = reference[t] - new[t]
            kl = {"k1": -apart, "k2": apart**2 / 2, "k3": math.exp(apart) - 1 - apart}[a.kl_estimator]
            loss += a.kl_coef * kl
        losses[t] = loss - a.entropy_coef * case.entropy[row][t]
    return losses


def loss_by_the_papers(a: AlgorithmSettings, case: Case, new: list[Row], constant: int) -> float:
    rows = [token_losses(a, case, row, new[row], case.new[row]) for row in range(len(new))]
    total, sums = sum(map(len, rows)), [sum(row.values()) for row in rows]
    match a.aggregation:
        case "token-mean":
            return sum(sums) / total
        case "seq-mean-token-mean":
            return sum(one / len(row) for one, row in zip(sums, rows, strict=True)) / len(rows)
        case "seq-mean-token-sum":
            return sum(sums) / len(rows)
        case _:
            return sum(sums) / len(rows) / constant


def loss_of_the_trainer(a: AlgorithmSettings, case: Case, constant: int) -> tuple[float, list[Row], Any]:
    """The loss, its gradient to the policy's log-probabilities, and the figures beside it."""
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

    def tensor(rows: object) -> Any:
        return torch.tensor(rows, dtype=torch.float64)

    new, mask = tensor(case.new).requires_grad_(), torch.tensor(case.mask)
    given = (new, *map(tensor, (case.old, case.engine, case.entropy)))
    values = TokenValues(*given, tensor(case.reference) if a.kl_coef else None)
    divisor = Divisor(int(mask.sum()), len(case.mask), constant)
    found = minibatch_loss(a, values, tensor(case.advantages), mask, divisor)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return found.loss.item(), new.grad.tolist(), found.sums


PLAIN = AlgorithmSettings(clip_low=0.2, clip_high=0.28, dual_clip=None, kl_coef=0.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dual clip": {"dual_clip": 1.5, "aggregation": "seq-mean-token-sum"},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.1, "aggregation": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "clip_low": 0.7, "clip_high": 0.9, "aggregation": "seq-mean-token-sum-norm"},
    "sapo": {"loss": "sapo", "aggregation": "seq-mean-token-mean"},
    "rft": {"loss": "rft"},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.7, "kl_estimator": "k2", "aggregation": "seq-mean-token-mean"},
    "k3": {"kl_coef": 0.5, "kl_estimator": "k3", "entropy_coef": 0.2},
    "token_tis": {"mismatch": "token_tis", "mismatch_high": 1.4},
    "icepop": {"mismatch": "icepop", "mismatch_high": 1.6, "kl_coef": 0.1, "kl_estimator": "k2"},
    "sequence_mask": {"mismatch": "sequence_mask", "mismatch_high": 2.0, "loss": "cispo", "clip_low": 0.4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loss_and_its_gradient_are_those_of_the_paper(name: str) -> None:
    a, step = replace(PLAIN, **SETTINGS[name]), 1e-6
    for seed in range(6):
        case = drawn(seed)
        loss, gradient, sums = loss_of_the_trainer(a, case, constant=9)
        assert loss == pytest.approx(loss_by_the_papers(a, case, case.new, 9), abs=1e-9), seed
        for row, mask in enumerate(case.mask):
            for t, trained in enumerate(mask):
                moved = []
                for sign in (1, -1):
                    new = [[*one] for one in case.new]
                    new[row][t] += sign * step
                    moved.append(loss_by_the_papers(a, case, new, 9))
                slope = (moved[0] - moved[1]) / (2 * step) if trained else 0.0
                assert gradient[row][t] == pytest.approx(slope, abs=1e-6), (seed, row, t)
        check_figures(a, case, sums)


def check_figures(a: AlgorithmSettings, case: Case, sums: Any) -> None:
    """The sums beside the loss, which become metrics."""
    places = [(row, t) for row, mask in enumerate(case.mask) for t, trained in enumerate(mask) if trained]
    of_old = [case.old[row][t] - case.new[row][t] for row, t in places]
    of_engine = [case.engine[row][t] - case.old[row][t] for row, t in places]
    assert float(sums.entropy) == pytest.approx(sum(case.entropy[row][t] for row, t in places))
    assert float(sums.negative_log_likelihood) == pytest.approx(-sum(case.new[row][t] for row, t in places))
    assert float(sums.policy_kl) == pytest.approx(sum(math.exp(x) - 1 - x for x in of_old))
    assert float(sums.mismatch_kl) == pytest.approx(sum(math.exp(x) - 1 - x for x in of_engine))
    if a.loss == "grpo":
        low = sum(
            math.exp(-x) < 1 - a.clip_low and case.advantages[row][t] < 0
            for x, (row, t) in zip(of_old, places, strict=True)
        )
        high = sum(
            math.exp(-x) > 1 + a.clip_high and case.advantages[row][t] > 0
            for x, (row, t) in zip(of_old, places, strict=True)
        )
        assert (float(sums.clipped_low), float(sums.clipped_high)) == (low, high)


def test_a_loss_of_ones_own_sees_zeros_outside_the_mask(tmp_path: Path) -> None:
    """docs/algorithms.md: each parameter is 0 where the mask is false, the reference too."""
    names = ("new", "old", "engine", "reference", "entropy", "advantages")
    sums = " + ".join(f"{name}.sum(1, keepdim=True)" for name in names)
    (tmp_path / "mine.py").write_text(
        f"def loss({', '.join(names)}, mask):\n    return ({sums}).expand_as(new)\n"
    )
    a = replace(PLAIN, loss=f"{tmp_path / 'mine.py'}:loss", kl_coef=1e-12, aggregation="seq-mean-token-mean")
    case = drawn(3)
    loss, _, _ = loss_of_the_trainer(a, case, constant=1)
    tables = [getattr(case, name) for name in names]
    trained = [
        sum(table[row][t] for table in tables for t, on in enumerate(mask) if on)
        for row, mask in enumerate(case.mask)
    ]
    assert loss == pytest.approx(sum(trained) / len(trained), abs=1e-6)


# --- the critic's loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_critics_loss_is_half_the_larger_squared_error(clip: float | None) -> None:
    import torch

    from fsbarrier.training.losses import Divisor, value_loss

    case, mask = drawn(5), torch.tensor(drawn(5).mask)
    new, old, returns = (
        torch.tensor(rows, dtype=torch.float64) for rows in (case.new, case.old, case.engine)
    )
    tokens = int(mask.sum())
    found = value_loss(clip, "token-mean", new, old, returns, mask, Divisor(tokens, len(mask), 1))
    total, bounded = 0.0, 0
    for row, t in mask.nonzero().tolist():
        value, before, target = case.new[row][t], case.old[row][t], case.engine[row][t]
        near = value if clip is None else clipped(value, before - clip, before + clip)
        total += max((value - target) ** 2, (near - target) ** 2) / 2
        bounded += (near - target) ** 2 > (value - target) ** 2
    assert found.loss.item() == pytest.approx(total / tokens)
    assert float(found.sums.value_clipped) == bounded and (clip is None) == (bounded == 0)  # type: ignore[union-attr]


# --- advantages -------------------------------------------------------------------------------------------------------------------


def deviation(values: Sequence[float]) -> float:
    """With Bessel's correction."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def by_grpo(rewards: Row, normalize: bool) -> Row:
    mean, spread = sum(rewards) / len(rewards), deviation(rewards) + 1e-6
    return [(reward - mean) / (spread if normalize else 1.0) for reward in rewards]


def by_rloo(rewards: Row, normalize: bool) -> Row:
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    spread = deviation(rewards) + 1e-6 if normalize else 1.0
    return [(reward - other) / spread for reward, other in zip(rewards, others, strict=True)]


@pytest.mark.parametrize(("advantage", "formula"), [("grpo", by_grpo), ("rloo", by_rloo)])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_groups_advantages_are_those_of_the_paper(
    advantage: Any, formula: Callable[[Row, bool], Row], normalize: bool
) -> None:
    from fsbarrier.training.group_weights import group_advantages

    a = AlgorithmSettings(advantage=advantage, normalize_std=normalize)
    for rewards in ([0.2, 1.0, -0.5, 0.7, 0.7], [3.0, 1.0]):
        found = group_advantages(rewards, a)
        assert found == pytest.approx(formula(rewards, normalize), abs=1e-9)


# --- token by token: GAE, the KL in the reward, a teacher -----------------------------------------------------------------------------


# three sequences, of which the last continues the second's trajectory
LENGTHS, CONTINUES = (6, 5, 4), (0, 0, 1)
SAMPLED = [[0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 1]]
TRAJECTORIES = [[(0, 1), (0, 2), (0, 4), (0, 5)], [(1, 2), (1, 3), (2, 1), (2, 3)]]
REWARDS = [0.75, -0.5]


def gae_by_the_paper(rewards: Row, values: Row, gamma: float, lam: float) -> Row:
    """A_t = sum over l of (gamma * lambda)^l * delta_(t+l), with delta_t = r_t + gamma * V_(t+1) - V_t, written as the double sum."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * v1 - v for r, v1, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, len(delta)))
        for t in range(len(delta))
    ]


def whitened(values: Row) -> Row:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def flat_tables(seed: int) -> dict[str, Row]:
    """By name, a number for each token of all sequences; wild where nothing was sampled."""
    rng = random.Random(seed)
    mask = [on for row in SAMPLED for on in row]
    return {
        name: [rng.uniform(-2, -0.1) if on else WILD for on in mask]
        for name in ("policy", "reference", "values", "teacher")
    }


def batch_of(tables: dict[str, Row], **more: Any) -> Any:
    import torch

    from fsbarrier.training.batch import TrainingBatch

    def tensor(name: str) -> Any:
        return torch.tensor(tables[name])

    mask = torch.tensor([on for row in SAMPLED for on in row], dtype=torch.uint8)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    weights = torch.tensor([REWARDS[0], REWARDS[1], REWARDS[1]])
    continues = torch.tensor(CONTINUES)
    parts = (mask.int(), mask, tensor("policy"), offsets, weights, mask, mask, continues, mask, ())
    return TrainingBatch(*parts, **{name: tensor(table) for name, table in more.items()})


def flat_place(place: tuple[int, int]) -> int:
    return sum(LENGTHS[: place[0]]) + place[1]


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("critic", [True, False])
def test_the_advantages_of_tokens_are_those_of_the_papers(kl_coef: float, critic: bool) -> None:
    from fsbarrier.training.advantages import with_token_weights

    if not critic and not kl_coef:
        return
    gamma, lam = 0.9, 0.8
    names: dict[str, Any] = (
        {"advantage": "gae", "gamma": gamma, "lam": lam} if critic else {"advantage": "rloo"}
    )
    a = AlgorithmSettings(**names, normalize_std=True, kl_in_reward=kl_coef)
    tables = flat_tables(1)
    given = {**({"reference": "reference"} if kl_coef else {}), **({"values": "values"} if critic else {})}
    found, kl = with_token_weights(batch_of(tables, **given), a, kl_coef)

    own: dict[int, float] = {}
    returns: dict[int, float] = {}
    apart = []
    for reward, places in zip(REWARDS, TRAJECTORIES, strict=True):
        at = [flat_place(place) for place in places]
        distance = [tables["policy"][i] - tables["reference"][i] for i in at]
        rewards = [-kl_coef * one for one in distance]
        rewards[-1] += reward
        values = [tables["values"][i] if critic else 0.0 for i in at]
        advantages = gae_by_the_paper(rewards, values, *((gamma, lam) if critic else (1.0, 1.0)))
        own |= dict(zip(at, advantages, strict=True))
        returns |= {i: one + value for i, one, value in zip(at, advantages, values, strict=True)}
        apart.append(sum(distance) / len(distance))
    places = sorted(own)
    wanted = [own[i] for i in places]
    # RLOO's advantages are of groups, so the batch leaves them as they are; those with a critic are whitened, as verl does it.
    wanted = whitened(wanted) if critic else wanted
    weights = found.token_weights.tolist()
    assert [weights[i] for i in places] == pytest.approx(wanted, abs=1e-5)
    assert not any(weights[i] for i in range(len(weights)) if i not in own)
    assert kl == (pytest.approx(sum(apart) / len(apart), abs=1e-6) if kl_coef else None)
    if critic:
        assert [found.returns.tolist()[i] for i in places] == pytest.approx(
            [returns[i] for i in places], abs=1e-5
        )


def test_a_teachers_advantage_is_how_much_likelier_the_token_is_for_it() -> None:
    from fsbarrier.training.advantages import with_distillation

    tables = flat_tables(2)
    a = AlgorithmSettings(loss="distil", distil_reward=0.25)
    found = with_distillation(batch_of(tables, teacher="teacher"), a).token_weights.tolist()
    for reward, places in zip(REWARDS, TRAJECTORIES, strict=True):
        for i in map(flat_place, places):
            assert found[i] == pytest.approx(
                0.25 * reward + tables["teacher"][i] - tables["policy"][i], abs=1e-5
            )
    sampled = {flat_place(place) for places in TRAJECTORIES for place in places}
    assert not any(one for i, one in enumerate(found) if i not in sampled)
