"""Refuses settings that have no effect with the other settings, and says why. Pure.

Only settings that a start names itself are refused, and only if the value is not the default: defaults, presets and the settings that a
program supplies may have no effect. There are no rules for switches that turn a whole part off for one start (`--debug-mode`,
`--eval-interval 0`), because a file of settings must work with them too; nor for `judge.*`, which a user's own code may use. Rules that
say more than "no effect" are in checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

from fsbarrier.settings.losses import BOUNDS, LOSSES
from fsbarrier.settings.sections import Settings
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.settings.value_types import reward_kinds

#: dotted name -> the setting with its value, as the user wrote it
AsChosen = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Idle:
    """Settings that depend on another one."""

    keys: tuple[str, ...]
    has_effect: Callable[[Settings], bool]
    #: ends the refusal: what the settings depend on, and what to change; `{}` is replaced by `depends_on` as the user wrote it
    why: str
    depends_on: str


def _bounds(bound: str, s: Settings) -> bool:
    """Whether this setting bounds the ratio. A user's own loss gets none of the bounds."""
    loss = s.algorithm.built_in_loss
    return loss is not None and bound in LOSSES[loss].bounds


def _has_advantages(s: Settings) -> bool:
    loss = s.algorithm.built_in_loss
    return loss is None or LOSSES[loss].has_advantages


ENVIRONMENT = ("health", "start_timeout_s", "sessions", "sessions_per_server", "replicas", "restarts")
RULES = (
    Idle(
        ("code.timeout_s", "code.memory_mb", "code.partial"),
        lambda s: not {"code", "verl"}.isdisjoint(reward_kinds(s.reward.kind)),
        "is for reward.kind=code (this run: {})",
        "reward.kind",
    ),
    Idle(
        ("critic.model", "critic.lr", "critic.warmup", "critic.clip", "algorithm.gamma", "algorithm.lam"),
        lambda s: s.algorithm.has_critic,
        "there is no critic; set algorithm.advantage=gae",
        "algorithm.advantage",
    ),
    *(
        Idle(
            (f"algorithm.{bound}",),
            partial(_bounds, bound),
            "has no effect with {}, which does not bound its ratio by it; drop it",
            "algorithm.loss",
        )
        for bound in sorted(BOUNDS)
    ),
    Idle(
        ("algorithm.advantage", "algorithm.normalize_std", "algorithm.drop_zero_signal"),
        _has_advantages,
        "has no effect with {}, which learns from successes alone; drop it",
        "algorithm.loss",
    ),
    Idle(
        ("algorithm.drop_zero_signal",),
        lambda s: not s.algorithm.has_critic,
        "has no effect with {}: a critic learns from every group; drop it",
        "algorithm.advantage",
    ),
    Idle(
        ("algorithm.mismatch",),
        lambda s: not s.rollout.ahead,
        "has no effect with {}, because an older policy samples what is trained on, whose log-probabilities the trainer does not compute; "
        "use algorithm.mismatch=none",
        "rollout.ahead",
    ),
    Idle(
        ("algorithm.mismatch_high",),
        lambda s: s.algorithm.mismatch != "none",
        "has no effect with {}; drop it, or choose a correction",
        "algorithm.mismatch",
    ),
    Idle(
        ("algorithm.kl_estimator",),
        lambda s: s.algorithm.kl_coef > 0,
        "has no effect with {}; drop it, or give algorithm.kl_coef",
        "algorithm.kl_coef",
    ),
    Idle(
        ("algorithm.kl_target",),
        lambda s: s.algorithm.kl_in_reward > 0,
        "adapts algorithm.kl_in_reward, which is 0; give that a first value",
        "algorithm.kl_in_reward",
    ),
    Idle(
        ("algorithm.distil_reward",),
        lambda s: s.algorithm.loss == "distil",
        "requires algorithm.loss=distil (this run: {})",
        "algorithm.loss",
    ),
    Idle(
        ("optimizer.decay_steps",),
        lambda s: s.optimizer.schedule != "constant",
        "has no effect with {}; drop it, or choose a schedule that falls",
        "optimizer.schedule",
    ),
    Idle(
        ("lora.alpha", "lora.targets", "lora.serve"),
        lambda s: s.lora.rank > 0,
        "there are no adapters; drop it, or give lora.rank",
        "lora.rank",
    ),
    Idle(
        ("rollout.grace_s",),
        lambda s: s.rollout.completion_threshold < 1,
        "has no effect with {}, which waits for all tasks; drop it, or lower the threshold",
        "rollout.completion_threshold",
    ),
    Idle(
        ("rollout.tool_parser",),
        lambda s: s.rollout.agent is not None,
        "reads the turns of an agent, and there is none; drop it, or give rollout.agent",
        "rollout.agent",
    ),
    Idle(
        ("rollout.tool_parser", "rollout.reasoning_parser", "rollout.max_thinking_tokens"),
        lambda s: s.rollout.named_renderer is None,
        "has no effect with {}, which reads answers without vLLM's parsers and closes no thoughts; drop one of the two",
        "rollout.renderer",
    ),
    Idle(
        ("sft.split_turns",),
        lambda s: s.program not in ("rl", "toy", "ping"),
        "has no effect with {}; drop it, or give --program sft",
        "program",
    ),
    Idle(
        tuple(f"environment.{name}" for name in ENVIRONMENT),
        lambda s: s.environment.command is not None,
        "there is no environment; give environment.command",
        "environment.command",
    ),
    Idle(
        ("trainer.profile_rank",),
        lambda s: s.trainer.profile is not None,
        "nothing is profiled; drop it, or give trainer.profile",
        "trainer.profile",
    ),
    Idle(
        ("tracker.project",),
        lambda s: bool(s.tracker.names),
        "there is no tracker; drop it, or give tracker.names",
        "tracker.names",
    ),
)


@cache
def _defaults() -> Mapping[str, object]:
    return Settings().flat()


def without_effect(settings: Settings, chosen: Mapping[str, ChosenValue], named: AsChosen) -> Iterator[str]:
    """A message for each chosen setting that has no effect."""
    for key, rule in idle_settings(settings, chosen):
        yield f"{named(key)}: {rule.why.format(named(rule.depends_on))}"


def idle_settings(settings: Settings, chosen: Container[str]) -> Iterator[tuple[str, Idle]]:
    """The settings among the `chosen` ones that have no effect, by dotted name, each with its rule."""
    flat, defaults = settings.flat(), _defaults()
    for rule in RULES:
        for key in rule.keys:
            if key in chosen and flat[key] != defaults[key] and not rule.has_effect(settings):
                yield key, rule
