"""What must hold between settings, and how a wrong one is named: one line, in the chooser's words. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import ErrorDetails

from fsbarrier.errors import UsageError
from fsbarrier.protocol.wording import counted
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.settings.value_types import reward_kinds

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

#: pydantic's error types in our words
_MEANING = {
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "string_pattern_mismatch": "a name may have letters, digits, _ and -",
    "finite_number": "must be a finite number",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be {le:g} or less",
    "literal_error": "must be {expected}",
    "missing": "needs {min_length} values",
    "too_long": "needs {max_length} values",
    "too_short": "must not be empty",
}


def one_line(
    errors: Sequence[ErrorDetails], known: Collection[str], chosen: Mapping[str, ChosenValue]
) -> str:
    """The first of a validation's errors in one line, in the words of whoever chose the value."""
    first = errors[0]
    parts = [str(part) for part in first["loc"]]
    names = [part for part in parts if not part.isdigit()]
    key = ".".join(names[:2]) if ".".join(names[:2]) in known else names[0]
    # Of a table the part that somebody chose.
    key = next((part for n in (4, 3) if (part := ".".join(names[:n])) in chosen), key)
    whole = first["type"] in ("missing", "too_long", "too_short")
    meaning = _MEANING.get(first["type"], first["msg"].removeprefix("Value error, ")).format_map(
        {"min_length": 2, **first.get("ctx", {})}
    )
    where = (
        ""
        if whole
        else next((f" (number {int(part) + 1} of the list)" for part in parts if part.isdigit()), "")
    )
    source = chosen[key].source if key in chosen else f"setting {key}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    value = chosen[key].value if key in chosen and whole else first["input"]
    return f"{source}: {meaning}{where}, got {_shown(value)}{more}"


def names_of_figures(samples: int) -> list[str]:
    """What an evaluation with so many samples a task is measured by, beside its mean reward."""
    counts = [k for k in powers_up_to(samples) if k > 1]
    return [f"pass_at_{k}" for k in counts] + ([f"majority_at_{samples}"] if samples > 1 else [])


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4 and so on, and all of them."""
    return sorted({*(1 << power for power in range(samples.bit_length())), samples})


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = (
        json.dumps(value, default=str)
        if isinstance(value, str | bool | int | float | list | tuple)
        else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def check(settings: Settings, chosen: Mapping[str, ChosenValue]) -> None:
    """What must hold between settings. Raises UsageError in the words of whoever chose them, for the first rule that is broken."""
    checks = _Checks(settings, chosen)
    checks.of_the_run()
    checks.of_the_trainer()
    checks.of_the_rollouts()
    checks.of_rewards_and_evaluations()
    checks.of_the_algorithm()


@dataclass(frozen=True, slots=True)
class _Checks:
    """The rules between the settings of one run, and how each setting was chosen."""

    settings: Settings
    chosen: Mapping[str, ChosenValue]

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise UsageError(message)

    def as_chosen(self, key: str) -> str:
        """A setting with its value, as whoever chose it wrote it."""
        value: Any = self.settings
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        if isinstance(value, tuple):
            value = ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
        return self.chosen[key].written(value) if key in self.chosen else f"{key}={value}"

    @property
    def learns(self) -> bool:
        """Whether the run updates a policy by its rollouts."""
        return self.settings.rl_phase != "rollout" and self.settings.program not in ("toy", "ping")

    def of_the_run(self) -> None:
        """Nodes, phases, and the timing of heartbeats."""
        s, c = self.settings, self.settings.coordination
        weights = len(s.rank_weights)
        self.require(
            weights == s.num_nodes,
            f"{self.as_chosen('rank_weights')}: {counted(weights, 'weight')} for "
            f"{counted(s.num_nodes, 'node')} ({self.as_chosen('num_nodes')}); give one positive weight a node",
        )
        self.require(
            s.min_nodes <= s.num_nodes,
            f"{self.as_chosen('min_nodes')}: more than the run has nodes ({self.as_chosen('num_nodes')})",
        )
        self.require(
            s.rollout_split is None or s.rl_phase == "rollout",
            f"{self.as_chosen('rollout_split')}: only with --rl-phase rollout (this run: {self.as_chosen('rl_phase')})",
        )
        self.require(
            s.rollout_split != "eval-only" or s.eval_interval > 0,
            f"{self.as_chosen('eval_interval')}: evaluates nothing, and {self.as_chosen('rollout_split')} does nothing else",
        )
        self.require(
            not s.init_optimizer or s.init_from is not None,
            f"{self.as_chosen('init_optimizer')}: only with init_from, which names the run that has the state",
        )
        self.require(
            not s.init_optimizer or s.trainer.command is None,
            f"{self.as_chosen('init_optimizer')}: not with trainer.command; a trainer of your own keeps a state of its own form",
        )
        self.require(
            c.beat_s < c.suspect_s,
            f"{self.as_chosen('coordination.beat_s')}: must be below {self.as_chosen('coordination.suspect_s')}",
        )
        self.require(
            c.suspect_s < c.dead_s,
            f"{self.as_chosen('coordination.suspect_s')}: must be below {self.as_chosen('coordination.dead_s')}",
        )

    def of_the_trainer(self) -> None:
        """Lengths of sequences, and what a trainer can do."""
        s = self.settings
        for key, tokens in (
            ("rollout.max_tokens", s.rollout.max_tokens),
            ("eval.max_tokens", s.eval.max_tokens or 0),
            *((f"eval.sets.{name}.max_tokens", one.max_tokens or 0) for name, one in s.eval.sets.items()),
        ):
            self.require(
                tokens < s.engine.max_model_len,
                f"{self.as_chosen(key)}: leaves no room for a prompt in {self.as_chosen('engine.max_model_len')}",
            )
        self.require(
            s.trainer.micro_batch is None or s.trainer.micro_batch <= s.trainer.minibatch,
            f"{self.as_chosen('trainer.micro_batch')}: must not be above {self.as_chosen('trainer.minibatch')}",
        )
        self.require(
            s.trainer.attention != "flash_attention_2" or s.trainer.dtype != "float32",
            f"{self.as_chosen('trainer.attention')}: computes in bfloat16 only, not in {self.as_chosen('trainer.dtype')}",
        )
        self.require(
            s.trainer.deepspeed is None or s.trainer.backend == "deepspeed",
            f"{self.as_chosen('trainer.deepspeed')}: only with trainer.backend=deepspeed (this run: {self.as_chosen('trainer.backend')})",
        )
        if s.optimizer.kind == "adamw_8bit":
            for key, other in (
                ("trainer.backend", s.trainer.backend == "deepspeed"),
                ("trainer.offload", s.trainer.offload != "none"),
                ("trainer.command", s.trainer.command is not None),
            ):
                self.require(
                    not other,
                    f"{self.as_chosen('optimizer.kind')}: not with {self.as_chosen(key)}; leave out one of the two",
                )
        if s.trainer.backend == "deepspeed":
            self.require(
                s.trainer.shard in ("auto", "all"),
                f"{self.as_chosen('trainer.shard')}: with {self.as_chosen('trainer.backend')} zero_optimization.stage in "
                "trainer.deepspeed says what is sharded, over all processes; leave it out",
            )
            self.require(
                not s.lora.rank,
                f"{self.as_chosen('lora.rank')}: not with {self.as_chosen('trainer.backend')}; adapters are small, so "
                "trainer.backend=torch trains them",
            )

    def of_the_rollouts(self) -> None:
        """What an update needs of the rollouts that it learns from."""
        s = self.settings
        self.require(
            s.update.trajectories is None or s.rl_phase == "update",
            f"{self.as_chosen('update.trajectories')}: only with --rl-phase update (this run: {self.as_chosen('rl_phase')})",
        )
        self.require(
            not self.learns or s.rollout.temperature > 0,
            f"{self.as_chosen('rollout.temperature')}: greedy samples of a task are all alike; an update needs more than 0",
        )
        compares = s.algorithm.loss != "rft" and s.algorithm.advantage != "reinforce_plus_plus"
        self.require(
            not self.learns or not compares or s.rollout.samples > 1,
            f"{self.as_chosen('rollout.samples')}: {self.as_chosen('algorithm.loss')} compares the samples of a task; give 2 or more",
        )
        for word in s.rollout.chat_template_kwargs:
            self.require(
                word.partition("=")[0].isidentifier() and "=" in word,
                f"{self.as_chosen('rollout.chat_template_kwargs')}: {word!r} is no name=value",
            )

    def of_rewards_and_evaluations(self) -> None:
        """Rewards and their weights, the sets of held-out tasks, the figure by which the best policy is chosen."""
        s = self.settings
        self.require(
            len(s.reward.weights) in (0, len(reward_kinds(s.reward.kind))),
            f"{self.as_chosen('reward.weights')}: {counted(len(s.reward.weights), 'weight')} for "
            f"{counted(len(reward_kinds(s.reward.kind)), 'reward')} ({self.as_chosen('reward.kind')})",
        )
        self.require(
            "train" not in s.eval.sets,
            "eval.sets.train: a set of held-out tasks needs another name; that of the training tasks is train",
        )
        for name, one in s.eval_sets.items():
            where = f"eval.sets.{name}" if s.eval.sets else "eval"
            self.require(
                one.temperature != 0 or one.samples == 1,
                f"{where}.samples={one.samples}: all samples of a task are the same at {where}.temperature=0; give 1, or a temperature",
            )
        self._check_best_by()

    def of_the_algorithm(self) -> None:
        """The learning rate over time, the loss, and how rollouts must be sampled for it."""
        s, o = self.settings, self.settings.optimizer
        self.require(
            o.schedule == "constant" or o.decay_steps is not None,
            f"{self.as_chosen('optimizer.schedule')}: give optimizer.decay_steps, the step at which the learning rate is at its lowest",
        )
        self.require(
            o.decay_steps is None or o.decay_steps > o.warmup_steps,
            f"{self.as_chosen('optimizer.decay_steps')}: must be above {self.as_chosen('optimizer.warmup_steps')}",
        )
        self.require(
            s.algorithm.mismatch == "none" or s.algorithm.old_logprobs != "engine",
            f"{self.as_chosen('algorithm.mismatch')}: corrects the engine's log-probabilities by the trainer's, and with "
            f"{self.as_chosen('algorithm.old_logprobs')} there are none",
        )
        self.require(
            not s.rollout.max_refills or s.rollout.completion_threshold == 1,
            f"{self.as_chosen('rollout.completion_threshold')}: with {self.as_chosen('rollout.max_refills')} a round ends when "
            "all of it is done, since what it came to decides about the next one; give rollout.max_refills=0 or leave out "
            "rollout.completion_threshold",
        )
        self.require(
            s.algorithm.overlong_buffer is None or s.algorithm.overlong_buffer <= s.rollout.max_tokens,
            f"{self.as_chosen('algorithm.overlong_buffer')}: must not be above {self.as_chosen('rollout.max_tokens')}",
        )
        # The engine's log-probabilities are of the cut-off distribution, the trainer's of the whole one: their ratio would be no ratio of
        # two policies, and below 1 from the start.
        for key, cut_off in (
            ("rollout.top_p", s.rollout.top_p < 1),
            ("rollout.top_k", s.rollout.top_k > 0),
        ):
            self.require(
                not (self.learns and cut_off and s.algorithm.loss != "rft"),
                f"{self.as_chosen(key)}: train rollouts for {self.as_chosen('algorithm.loss')} must be sampled from the whole "
                f"distribution, else the update is biased; for evaluations there is {key.replace('rollout', 'eval')}",
            )

    def _check_best_by(self) -> None:
        """`checkpoint.best_by` names a figure that the evaluations will have."""
        s = self.settings
        figure, sets = s.checkpoint.best_by, s.eval.sets
        if figure == "reward_mean":
            return
        if sets:
            names = [
                f"{name}/{one}"
                for name, chosen in s.eval_sets.items()
                for one in ("reward", *names_of_figures(chosen.samples or 1))
            ]
        else:
            names = names_of_figures(s.eval.samples)
        by_source = tuple(f"{name}/reward/" for name in sets) or "reward/"
        self.require(
            figure in names or figure.startswith(by_source),
            f"{self.as_chosen('checkpoint.best_by')}: no evaluation has this figure; there are "
            f"{', '.join(['reward_mean', *names])}, and the mean reward of a source ({'SET/' if sets else ''}reward/SOURCE)",
        )


def check_change(settings: Settings, values: Mapping[str, object]) -> None:
    """What must hold of a change of a run's settings to `values`, by dotted names; `settings`: as they are then. Raises UsageError."""
    if "rollout.temperature" in values and settings.update.recency > 1:
        raise UsageError(
            f"rollout.temperature={values['rollout.temperature']}: cannot change while update.recency is above 1, for an update learns "
            "from trajectories of one temperature"
        )
