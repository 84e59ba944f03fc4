"""The settings that each `algorithm.preset` supplies. Settings that the user chooses take precedence.

The values come from the recipe's paper. A preset does not touch a setting if the paper gives no value, or if the value depends on the
model and data (learning rate, batch size, lengths).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

# Schulman's symmetric clip, without the dual-clip bound.
_PPO_CLIP = {"loss": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_NO_KL = {"kl_coef": 0.0}
_EVERY_GROUP = {"drop_zero_signal": False}
_GROUPS_MEAN = {"advantage": "grpo", "normalize_std": True}
_REINFORCE_PLUS_PLUS: Mapping[str, object] = {
    **_PPO_CLIP,
    **_EVERY_GROUP,
    "aggregation": "token-mean",
    "advantage": "reinforce_plus_plus",
    "normalize_std": True,
}

#: preset -> settings; names without a section are of `algorithm`
PRESETS: Mapping[str, Mapping[str, object]] = {
    # DeepSeekMath, arXiv 2402.03300
    "grpo": {
        **_PPO_CLIP,
        **_EVERY_GROUP,
        "aggregation": "seq-mean-token-mean",
        **_GROUPS_MEAN,
        "kl_coef": 0.04,
        "kl_estimator": "k3",
    },
    # Understanding R1-Zero-like training, arXiv 2503.20783
    "dr_grpo": {
        **_PPO_CLIP,
        **_NO_KL,
        **_EVERY_GROUP,
        "aggregation": "seq-mean-token-sum-norm",
        **_GROUPS_MEAN,
        "normalize_std": False,
    },
    # DAPO, arXiv 2503.14476
    "dapo": {
        **_NO_KL,
        **_PPO_CLIP,
        "clip_high": 0.28,
        "aggregation": "token-mean",
        **_GROUPS_MEAN,
        "drop_zero_signal": True,
        "truncated": "shape",
        # Ten rounds in total, as in verl's recipe; the paper gives no limit.
        "rollout.max_refills": 9,
    },
    # GSPO, arXiv 2507.18071
    "gspo": {
        **_NO_KL,
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "aggregation": "seq-mean-token-mean",
        **_GROUPS_MEAN,
    },
    # MiniMax-M1, arXiv 2506.13585; the bound of 5 is from ScaleRL, arXiv 2510.13786
    "cispo": {
        **_NO_KL,
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "token-mean",
        **_GROUPS_MEAN,
    },
    # SAPO, arXiv 2511.20347
    "sapo": {**_NO_KL, "loss": "sapo", "aggregation": "seq-mean-token-mean", **_GROUPS_MEAN},
    # PPO with a critic, arXiv 1707.06347 and 1506.02438, as verl has it
    "ppo": {
        **_PPO_CLIP,
        **_NO_KL,
        "dual_clip": 3.0,
        "aggregation": "token-mean",
        "advantage": "gae",
        "gamma": 1.0,
        "lam": 1.0,
        "normalize_std": True,
        "critic.clip": 0.5,
    },
    # Back to Basics, arXiv 2402.14740
    "rloo": {
        **_PPO_CLIP,
        **_EVERY_GROUP,
        "aggregation": "seq-mean-token-sum",
        "advantage": "rloo",
        "normalize_std": False,
        **_NO_KL,
        "kl_in_reward": 0.03,
    },
    # REINFORCE++, arXiv 2501.03262
    "reinforce_plus_plus": {**_REINFORCE_PLUS_PLUS, **_NO_KL, "kl_in_reward": 0.001},
    # REINFORCE++ with a baseline, arXiv 2501.03262
    "reinforce_plus_plus_baseline": {
        **_REINFORCE_PLUS_PLUS,
        "advantage": "reinforce_plus_plus_baseline",
        "kl_coef": 0.001,
        "kl_estimator": "k2",
    },
    # Rejection-sampling fine-tuning, arXiv 2308.01825
    "rft": {**_NO_KL, "loss": "rft", "aggregation": "token-mean"},
}


if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


def preset_values(preset: object) -> dict[str, object]:
    """The preset's values by dotted name; {} if there is no such preset."""
    values = PRESETS.get(str(preset), {})
    return {key if "." in key else f"algorithm.{key}": value for key, value in values.items()}
