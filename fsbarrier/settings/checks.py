"""Checks between settings, and one-line error messages that quote the user's own flag or setting. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fsbarrier.errors import UsageError
from fsbarrier.protocol.assign import split_by_weight
from fsbarrier.settings.engine_checks import served_adapters, spanning
from fsbarrier.settings.losses import LOSSES
from fsbarrier.settings.placement import ROLES, Ranges
from fsbarrier.settings.secrecy import check_credentials
from fsbarrier.settings.sources import ChosenValue, nearest, stored_as
from fsbarrier.settings.value_types import SWITCHES, TEACHER, frozen_engine, reward_kinds, scoring_engines
from fsbarrier.settings.without_effect import AsChosen, without_effect
from fsbarrier.wording import counted, setting_text

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

#: a stage that other frameworks place, and that fsbarrier does not have
INFERENCE = "inference"


def shown(value: object) -> str:
    """A value for a message, shortened, as a user would write it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = (
        json.dumps(value, default=str)
        if isinstance(value, str | bool | int | float | list | tuple)
        else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def check(settings: Settings, chosen: Mapping[str, ChosenValue]) -> None:
    """Checks the rules between settings. Raises UsageError for the first broken one, quoting the settings as the user wrote them."""
    # First, because the other messages quote the settings.
    check_credentials(settings)
    for rules in (_run, _engines, _trainer, _rollouts, _rewards_and_evaluations, _algorithm):
        for broken in rules(settings, partial(_as_chosen, settings, chosen)):
            raise UsageError(broken)
    for idle in without_effect(settings, chosen, partial(_as_chosen, settings, chosen)):
        raise UsageError(idle)


def _as_chosen(settings: Settings, chosen: Mapping[str, ChosenValue], key: str) -> str:
    value: Any = settings
    for part in key.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    text = setting_text(value)
    return chosen[key].written(text) if key in chosen else f"{key}={text}"


# --- the rules: each group yields one message per broken rule -----------------------------------------------------------------


def _run(s: Settings, named: AsChosen) -> Iterator[str]:
    """Nodes, phases and heartbeat timing."""
    c, weights = s.coordination, len(s.rank_weights)
    if weights != s.num_nodes:
        yield (
            f"{named('rank_weights')}: {counted(weights, 'weight')} for {counted(s.num_nodes, 'node')} "
            f"({named('num_nodes')}); give one positive weight per node"
        )
    if s.min_nodes > s.num_nodes:
        yield f"{named('min_nodes')}: must not exceed the number of nodes ({named('num_nodes')})"
    if s.rollout_split is not None and s.rl_phase != "rollout":
        yield f"{named('rollout_split')}: requires --rl-phase rollout (this run: {named('rl_phase')})"
    if s.rollout_split == "eval-only" and s.eval_interval == 0:
        yield f"{named('eval_interval')}: disables evaluation, so {named('rollout_split')} would do nothing; drop one"
    yield from _placement(s, named)
    if c.beat_s > c.dead_s / 3:
        yield f"{named('coordination.beat_s')}: must be at most a third of {named('coordination.dead_s')}"


def _placement(s: Settings, named: AsChosen) -> Iterator[str]:
    """Ranges of nodes and accelerators. How many accelerators there are is only known once the nodes have joined (run/admission.py)."""
    ranges: dict[str, Ranges] = {}
    for name, text in s.placed.items():
        try:
            ranges[name] = Ranges.parse(text)
        except ValueError as error:
            yield f"{named(stored_as(name))}: {error}"
            return
        beyond = ranges[name].beyond(s.num_nodes) if ranges[name].nodes else None
        if beyond is not None:
            yield f"{named(stored_as(name))}: there is no node {beyond}; nodes are 0 to {s.num_nodes - 1} ({named('num_nodes')})"
    if (idle := _idle(s, [*ranges.values()])) and not s.allow_idle:
        yield f"{named('placement.rollout')} and {named('placement.update')}: {idle} would have nothing to do; give a role or --allow-idle"
    roles = [ranges[f"placement.{role}"] for role in ROLES]
    named_nodes = [{n for n in range(s.num_nodes) if n in role} for role in roles if role.nodes]
    both = set.intersection(*named_nodes) if len(named_nodes) == len(ROLES) else set()
    if s.rollout.ahead and (both or any(role.everything for role in roles)):
        yield (
            f"{named('rollout.ahead')}: the nodes that train and those that roll out must be different ones; give each node to one of "
            f"{named('placement.rollout')} and {named('placement.update')} (one host can be two nodes)"
        )
    if s.rollout.in_flight and not s.rollout.ahead:
        yield f"{named('rollout.in_flight')}: requires rollout.ahead=1 (this run: {named('rollout.ahead')})"
    if s.rollout.in_flight and s.rollout.reproducible:
        yield f"{named('rollout.in_flight')}: answers would depend on when the weights come; drop rollout.reproducible"
    if s.rollout.in_flight and not s.manages_engine:
        yield f"{named('rollout.in_flight')}: the server is not this run's; drop {'--debug-mode' if s.debug_mode else named('engine.url')}"


def _idle(s: Settings, ranges: Sequence[Ranges]) -> str:
    """Name the nodes or accelerators without a role, or "". Only --expect-gpus tells how many accelerators there are before nodes join."""
    if any(ranges_of_role.everything for ranges_of_role in ranges):
        return ""
    if all(ranges_of_role.nodes for ranges_of_role in ranges):
        what, most = "node", s.num_nodes
    elif s.expect_gpus and not any(ranges_of_role.nodes for ranges_of_role in ranges):
        what, most = "accelerator", s.expect_gpus
    else:
        return ""
    idle = [
        str(number)
        for number in range(most)
        if not any(number in ranges_of_role for ranges_of_role in ranges)
    ]
    return f"{what}{'s' * (len(idle) > 1)} {', '.join(idle[:8])}{', ...' * (len(idle) > 8)}" if idle else ""


def _engines(s: Settings, named: AsChosen) -> Iterator[str]:
    """Engines over several nodes; frozen engines need a model, and those that other settings name must exist."""
    yield from spanning(s, named)
    yield from served_adapters(s, named)
    for name, engine in s.engines.items():
        if engine.model is None:
            placed = f"engines.{name}.placement"
            if name == INFERENCE and engine.placement is not None:
                yield (
                    f"{named(placed)}: there is no such stage: the trainer computes the log-probabilities of the policy and of "
                    "its reference in the update (placement.update); drop it, give these accelerators another role"
                )
                continue
            where = f"{named(placed)}: there" if engine.placement is not None else f"engines.{name}: there"
            yield f"{where} is no engine {name}; give engines.{name}.model, or name a role ({', '.join(ROLES)})"
    scores = scoring_engines(s.reward.kind)
    judge = frozen_engine(s.judge.model)
    judges = [judge] if judge is not None else []
    asked = [*(("reward.kind", name) for name in scores), *(("judge.model", name) for name in judges)]
    for setting, name in asked:
        if name not in s.engines:
            hint = f"; there is {', '.join(s.engines)}" if s.engines else ""
            yield f"{named(setting)}: there is no engine {name}; give engines.{name}.model{hint}"
    if judge is not None and s.judge.url is not None:
        yield f"{named('judge.model')}: contradicts {named('judge.url')}; drop one of the two"
    if s.judge.images != "none" and "judge" not in reward_kinds(s.reward.kind):
        yield f"{named('judge.images')}: is for reward.kind=judge, and this run has {named('reward.kind')}"


def _trainer(s: Settings, named: AsChosen) -> Iterator[str]:
    """Sequence lengths, and combinations that the trainer does not support."""
    trainer, deepspeed = s.trainer, s.trainer.backend == "deepspeed"
    for key, tokens in answer_lengths(s):
        if tokens >= s.engine.max_model_len:
            yield f"{named(key)}: leaves no room for a prompt in {named('engine.max_model_len')}"
        if 0 < tokens <= (s.rollout.max_thinking_tokens or 0):
            yield f"{named('rollout.max_thinking_tokens')}: leaves no token for an answer in {named(key)}"
    if trainer.attention == "flash_attention_2" and trainer.dtype == "float32":
        yield f"{named('trainer.attention')}: supports only bfloat16, not {named('trainer.dtype')}; change one of the two"
    if trainer.zero_stage != 3 and not deepspeed:
        yield (
            f"{named('trainer.zero_stage')}: requires trainer.backend=deepspeed (this run: {named('trainer.backend')})"
        )
    if deepspeed and trainer.shard != "auto":
        yield (
            f"{named('trainer.shard')}: not supported with {named('trainer.backend')}, where trainer.zero_stage controls "
            "sharding; drop it"
        )
    if deepspeed and trainer.zero_stage != 3 and trainer.offload == "all":
        yield f"{named('trainer.offload')}: requires trainer.zero_stage=3 (this run: {named('trainer.zero_stage')})"
    if deepspeed and s.lora.rank:
        yield (
            f"{named('lora.rank')}: not supported with {named('trainer.backend')}; use trainer.backend=torch for adapters"
        )


def answer_lengths(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Each setting that limits the length of answers, by dotted name; 0 if it falls back to another setting."""
    rollout, evaluation = settings.rollout, settings.eval
    return ("rollout.max_tokens", rollout.max_tokens), ("eval.max_tokens", evaluation.max_tokens or 0)


def _learns(s: Settings) -> bool:
    """Whether the run trains a policy."""
    return s.rl_phase != "rollout" and s.program not in ("toy", "ping")


def _rollouts(s: Settings, named: AsChosen) -> Iterator[str]:
    """Requirements on the rollouts that an update trains on."""
    if _learns(s) and s.rollout.temperature <= 0:
        yield (
            f"{named('rollout.temperature')}: all samples of a task would be identical; training needs a temperature above 0"
        )
    alone = s.algorithm.loss == "distil" and not s.algorithm.distil_reward
    one_is_enough = s.algorithm.advantage in ("reinforce_plus_plus", "gae")
    compares = s.algorithm.loss != "rft" and not alone and not one_is_enough
    if _learns(s) and compares and s.rollout.samples == 1:
        yield f"{named('rollout.samples')}: {named('algorithm.loss')} compares the samples of a task; give 2 or more"
    if s.rollout.max_refills and s.rollout.samples == 1:
        yield (
            f"{named('rollout.max_refills')}: replaces groups whose rewards are all equal, and those of one sample always are "
            f"({named('rollout.samples')}); set it to 0"
        )
    if s.rollout.reproducible and s.rollout.agent is not None:
        yield f"{named('rollout.reproducible')}: the turns of {named('rollout.agent')} have no seeds; drop one of the two"
    if s.rollout.stop and s.rollout.agent is not None:
        yield f"{named('rollout.stop')}: {named('rollout.agent')} names its own stop texts in each request; drop one of the two"
    yield from _drawing(s, named)
    for name, environment in s.all_environments.items():
        key = s.environment_key(name, "command")
        if environment.command is None:
            yield f"environments.{name}: needs a command; give {key}"
        elif s.rollout.agent is None:
            yield f"{named(key)}: is for the episodes of an agent; give rollout.agent too"
        elif "{port}" not in environment.command:
            yield f"{named(key)}: needs {{port}}, the port on which the server must listen"
        if environment.health is not None and not environment.health.startswith("/"):
            yield f"{named(s.environment_key(name, 'health'))}: must begin with /"
    for word in s.rollout.chat_template_kwargs:
        if "=" not in word or not word.partition("=")[0].isidentifier():
            yield f"{named('rollout.chat_template_kwargs')}: {word!r} must have the form name=value"
        if s.rollout.thinking != "auto" and word.partition("=")[0] in SWITCHES:
            yield f"{named('rollout.thinking')}: {named('rollout.chat_template_kwargs')} says it too; drop one of the two"


def _drawing(s: Settings, named: AsChosen) -> Iterator[str]:
    """How training tasks are drawn."""
    shares = split_by_weight(
        range(s.rollout.tasks), [train_set.weight for train_set in s.train.sets.values()] or [1]
    )
    for (name, train_set), share in zip(s.train.sets.items(), shares, strict=False):
        if not share:
            yield f"{named(f'train.sets.{name}.weight')}: the set gets none of the tasks of {named('rollout.tasks')}; give more"
        if train_set.where is not None and not all(train_set.where.partition("=")):
            yield f"{named(f'train.sets.{name}.where')}: must have the form FIELD=VALUE or FIELD=A:B"
    steps = [re.fullmatch(r"(-?\d+(?:\.\d+)?):\d+(?:\.\d+)?", step) for step in s.train.reward_weights]
    least = [float(step[1]) for step in steps if step]
    if len(least) < len(steps) or least != sorted({*least}):
        yield f"{named('train.reward_weights')}: must have the form REWARD:WEIGHT,..., the lowest reward first"


def _rewards_and_evaluations(s: Settings, named: AsChosen) -> Iterator[str]:
    """Reward weights, evaluation sets, and the metric that selects the best policy."""
    weights, rewards = len(s.reward.weights), len(reward_kinds(s.reward.kind))
    if weights not in (0, rewards):
        yield (
            f"{named('reward.weights')}: {counted(weights, 'weight')} for {counted(rewards, 'reward')} ({named('reward.kind')})"
        )
    if "train" in s.eval.sets:
        yield 'eval.sets.train: the name "train" is reserved for the training tasks; choose another name'
    for name, eval_set in s.eval_sets.items():
        where = f"eval.sets.{name}" if s.eval.sets else "eval"
        if eval_set.temperature == 0 and eval_set.samples != 1:
            yield (
                f"{where}.samples={eval_set.samples}: all samples of a task are identical at {where}.temperature=0; use 1 sample or a "
                "temperature above 0"
            )


def _algorithm(s: Settings, named: AsChosen) -> Iterator[str]:
    """Learning-rate schedule, loss, and sampling requirements of the loss."""
    o, a = s.optimizer, s.algorithm
    yield from _critic(s, named)
    if s.trainer.command is not None:
        for key, wanted in (
            ("algorithm.advantage", a.has_critic),
            ("algorithm.self_certainty", a.self_certainty),
            ("algorithm.kl_in_reward", a.kl_in_reward),
        ):
            if wanted:
                yield f"{named(key)}: only the built-in trainer computes it; drop it, or trainer.command"
    if o.schedule != "constant" and o.decay_steps is None:
        yield (
            f"{named('optimizer.schedule')}: requires optimizer.decay_steps, the step at which the learning rate reaches its minimum"
        )
    if o.decay_steps is not None and o.decay_steps <= o.warmup_steps:
        yield f"{named('optimizer.decay_steps')}: must be greater than {named('optimizer.warmup_steps')}"
    if a.loss not in LOSSES and ":" not in a.loss:
        yield f"{named('algorithm.loss')}: must be {', '.join(LOSSES)} or path/file.py:function{nearest(a.loss, LOSSES)}"
    yield from _distillation(s, named)
    if a.mismatch != "none" and a.old_logprobs == "engine":
        yield (
            f"{named('algorithm.mismatch')}: needs the trainer's log-probabilities, which {named('algorithm.old_logprobs')} does not "
            "compute; change one of the two"
        )
    if a.loss == "rft" and a.truncated == "shape":
        yield (
            f"{named('algorithm.truncated')}: has no effect with {named('algorithm.loss')}, which trains on successes whatever their "
            "length; use mask or keep"
        )
    if a.self_certainty and a.loss == "rft":
        yield f"{named('algorithm.self_certainty')}: {named('algorithm.loss')} learns from successes alone; drop one of the two"
    elif a.self_certainty and a.truncated == "mask":
        yield (
            f"{named('algorithm.self_certainty')}: its baseline needs all answers, and {named('algorithm.truncated')} leaves some out; "
            "use keep"
        )
    elif a.self_certainty == 1 and a.truncated == "shape":
        yield (
            f"{named('algorithm.truncated')}: long answers lose a part of the reward, and {named('algorithm.self_certainty')} counts none "
            "of it; use keep"
        )
    elif a.self_certainty and s.rollout.max_refills:
        yield (
            f"{named('algorithm.self_certainty')}: no group is without signal, and {named('rollout.max_refills')} would replace those with "
            "equal rewards; set rollout.max_refills=0"
        )
    if a.kl_in_reward and a.loss == "rft":
        yield f"{named('algorithm.kl_in_reward')}: {named('algorithm.loss')} learns from successes alone; drop one of the two"
    elif a.kl_in_reward and a.advantage in ("grpo", "rloo") and a.normalize_std:
        yield (
            f"{named('algorithm.kl_in_reward')}: {named('algorithm.normalize_std')} would divide the rewards by their standard deviation "
            "and not the KL divergence; set algorithm.normalize_std=false"
        )
    if a.kl_coef and a.kl_estimator == "k1":
        yield (
            f"{named('algorithm.kl_estimator')}: in the loss its gradient is zero on average, so {named('algorithm.kl_coef')} would add "
            "nothing but noise; use k2 or k3"
        )
    if s.rollout.max_refills and s.rollout.completion_threshold != 1:
        yield (
            f"{named('rollout.completion_threshold')}: not supported with {named('rollout.max_refills')}, because a round must be "
            "complete before the next one can be decided; set rollout.max_refills=0 or drop rollout.completion_threshold"
        )


def _distillation(s: Settings, named: AsChosen) -> Iterator[str]:
    """What distillation from a teacher requires, and what does not work with it."""
    a, loss, teacher = s.algorithm, named("algorithm.loss"), s.engines.get(TEACHER)
    if a.loss != "distil":
        return
    if teacher is None:
        yield f"{loss}: requires a teacher; give engines.{TEACHER}.model"
    elif teacher.max_model_len <= s.engine.max_model_len:
        length = f"engines.{TEACHER}.max_model_len"
        yield f"{named(length)}: must be greater than {named('engine.max_model_len')}: the teacher reads a whole answer, and says one token"
    if s.rollout.temperature != 1:
        yield f"{named('rollout.temperature')}: must be 1 with {loss}, because the teacher's log-probabilities have no temperature"
    if s.rollout.max_refills:
        yield f"{named('rollout.max_refills')}: no group is without signal with {loss}; set it to 0"
    of_reward = {
        "kl_in_reward": a.kl_in_reward,
        "self_certainty": a.self_certainty,
        "truncated": a.truncated == "shape",
    }
    for name in [name for name, changed in of_reward.items() if changed and not a.distil_reward]:
        yield (
            f"{named(f'algorithm.{name}')}: changes the reward, which {loss} does not learn from; give algorithm.distil_reward too, "
            "or drop it"
        )


def _critic(s: Settings, named: AsChosen) -> Iterator[str]:
    """Settings that do not work with a critic."""
    a = s.algorithm
    if not a.has_critic:
        return
    for key, wanted in (
        ("algorithm.loss", a.loss not in ("rft", "distil")),
        ("trainer.backend", s.trainer.backend == "torch"),
    ):
        if not wanted:
            yield f"{named('algorithm.advantage')}: not supported with {named(key)}, which trains no critic; change one of the two"


def check_change(settings: Settings, values: Mapping[str, object]) -> None:
    """Checks a change of a run's settings to `values` (by dotted name); `settings`: the result. Raises UsageError."""
    if "rollout.temperature" in values and settings.update.recency > 1:
        raise UsageError(
            f"rollout.temperature={values['rollout.temperature']}: cannot change while update.recency is above 1, because a batch must "
            "not mix trajectories of different temperatures"
        )
