"""The losses beside TRL's own, on random tensors: its GRPOTrainer._compute_loss with a stand-in for the trainer.

TRL is in no other test's environment, so this file is collected only by name: `pip install -e .[rl,dev,trl]`, then
`pytest tests/trl_losses.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fsbarrier.settings.sections import AlgorithmSettings

pytestmark = [
    pytest.mark.torch,
    # TRL imports everything there is.
    pytest.mark.timeout(1800),
    # Theirs to mend.
    pytest.mark.filterwarnings("default"),
]

ROWS, LENGTH, LONGEST = 5, 9, 16

# name -> TRL's arguments, ours
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "seq-mean-token-mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token-mean"}),
    "dapo": ({"loss_type": "dapo"}, {"aggregation": "token-mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "seq-mean-token-sum-norm"}),
    "delta": ({"loss_type": "dapo", "delta": 1.5}, {"aggregation": "token-mean", "dual_clip": 1.5}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"},
    ),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "seq-mean-token-mean"}),
}
KL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no KL": ({"beta": 0.0}, {}),
    # Without the factor with which DeepSeek-V3.2 weighs it.
    "KL": ({"beta": 0.3, "use_bias_correction_kl": False}, {"kl_coef": 0.3, "kl_estimator": "k3"}),
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"mismatch": "none"},
    "token_truncate": {"mismatch": "token_tis", "mismatch_high": 1.4},
    "token_mask": {"mismatch": "icepop", "mismatch_high": 1.4},
    "sequence_mask": {"mismatch": "sequence_mask", "mismatch_high": 1.4},
}


def tensors(seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def near(one: Any, by: float) -> Any:
        return one + by * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

    new = -3 * torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(LENGTH)[None] < lengths
    old = near(new, 0.4)
    weights = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    engine, reference = near(old, 0.1), near(new, 0.3)
    return {
        "new": new,
        "old": old,
        "engine": engine,
        "reference": reference,
        "mask": mask,
        "weights": weights,
    }


def importance(mode: str, given: dict[str, Any]) -> Any:
    """What TRL makes of the two log-probabilities before it calls its loss (`_generate_and_score_completions`)."""
    import torch

    apart = (given["old"] - given["engine"]) * given["mask"]
    ratio = torch.exp(apart.sum(-1, keepdim=True) if mode.startswith("sequence") else apart)
    if mode.endswith("truncate"):
        return ratio.clamp(max=1.4)
    return ratio.masked_fill((ratio < (0.5 if mode == "token_mask" else 0.0)) | (ratio > 1.4), 0.0)


def trl_loss(arguments: dict[str, Any], mode: str, given: dict[str, Any], new: Any) -> Any:
    import torch
    from trl import GRPOConfig, GRPOTrainer

    known = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        **arguments,
    }
    args = GRPOConfig(**known)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda one: one, reduce=lambda one, reduction: one)

    class StandIn:
        def __getattr__(self, name: str) -> Any:
            # Whatever its loss looks at beside what is set here is as the arguments have it.
            return getattr(args, name)

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
            return new, torch.zeros_like(new), None

    trainer = StandIn()
    vars(trainer).update(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        epsilon_low=args.epsilon,
        use_vllm=mode != "none",
        vllm_importance_sampling_correction=mode != "none",
        max_completion_length=LONGEST,
        _metrics={"train": defaultdict(list)},
    )
    trainer.args.steps_per_generation = 1
    rows = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    inputs = {
        "prompt_ids": rows[:, :1],
        "prompt_mask": rows[:, :1] + 1,
        "completion_ids": rows,
        "completion_mask": given["mask"].long(),
        "advantages": given["weights"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["mask"].sum(),
        "sampling_per_token_logps": given["engine"],
    }
    if mode != "none":
        inputs["importance_sampling_ratio"] = importance(mode, given)
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_are_trls(loss: str, kl: str, correction: str) -> None:
    import torch

    from fsbarrier.training.losses import Divisor, TokenValues, minibatch_loss

    theirs, ours = LOSSES[loss]
    algorithm = replace(
        AlgorithmSettings(clip_low=0.2, clip_high=0.28, dual_clip=None),
        **{**ours, **KL[kl][1], **CORRECTIONS[correction]},
    )
    for seed in range(5):
        given = tensors(seed)
        found = []
        for name in ("theirs", "ours"):
            new = given["new"].clone().requires_grad_()
            if name == "theirs":
                value = trl_loss({**theirs, **KL[kl][0]}, correction, given, new)
            else:
                reference = given["reference"] if algorithm.kl_coef else None
                values = TokenValues(new, given["old"], given["engine"], torch.zeros_like(new), reference)
                divisor = Divisor(int(given["mask"].sum()), ROWS, LONGEST)
                value = minibatch_loss(algorithm, values, given["weights"], given["mask"], divisor).loss
            value.backward()
            found.append((value.item(), new.grad))
        # TRL holds SAPO's temperatures in float32.
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-7)
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-7)
