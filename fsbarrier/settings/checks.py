"""What must hold between settings, and how a wrong one is named: one line, in the chooser's words. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
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
    # Where somebody chose an entry deeper in a table, the message names that entry.
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
    for rules in (_run, _trainer, _rollouts, _rewards_and_evaluations, _algorithm):
        for broken in rules(settings, partial(_as_chosen, settings, chosen)):
            raise UsageError(broken)


#: a setting with its value, as whoever chose it wrote it
AsChosen = Callable[[str], str]


def _as_chosen(settings: Settings, chosen: Mapping[str, ChosenValue], key: str) -> str:
    value: Any = settings
    for part in key.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    if isinstance(value, tuple):
        value = ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return chosen[key].written(value) if key in chosen else f"{key}={value}"


# --- the rules: each group gives a line for every one that is broken ----------------------------------------------------------


def _run(s: Settings, named: AsChosen) -> Iterator[str]:
    """Nodes, phases, and the timing of heartbeats."""
    c, weights = s.coordination, len(s.rank_weights)
    if weights != s.num_nodes:
        yield (
            f"{named('rank_weights')}: {counted(weights, 'weight')} for {counted(s.num_nodes, 'node')} "
            f"({named('num_nodes')}); give one positive weight a node"
        )
    if s.min_nodes > s.num_nodes:
        yield f"{named('min_nodes')}: more than the run has nodes ({named('num_nodes')})"
    if s.rollout_split is not None and s.rl_phase != "rollout":
        yield f"{named('rollout_split')}: only with --rl-phase rollout (this run: {named('rl_phase')})"
    if s.rollout_split == "eval-only" and s.eval_interval == 0:
        yield f"{named('eval_interval')}: evaluates nothing, and {named('rollout_split')} does nothing else"
    if s.init_optimizer and s.init_from is None:
        yield f"{named('init_optimizer')}: only with init_from, which names the run that has the state"
    if s.init_optimizer and s.trainer.command is not None:
        yield f"{named('init_optimizer')}: not with trainer.command; a trainer of your own keeps a state of its own form"
    if c.beat_s >= c.suspect_s:
        yield f"{named('coordination.beat_s')}: must be below {named('coordination.suspect_s')}"
    if c.suspect_s >= c.dead_s:
        yield f"{named('coordination.suspect_s')}: must be below {named('coordination.dead_s')}"


def _trainer(s: Settings, named: AsChosen) -> Iterator[str]:
    """Lengths of sequences, and what a trainer can do."""
    trainer, deepspeed = s.trainer, s.trainer.backend == "deepspeed"
    for key, tokens in answer_lengths(s):
        if tokens >= s.engine.max_model_len:
            yield f"{named(key)}: leaves no room for a prompt in {named('engine.max_model_len')}"
    if trainer.micro_batch is not None and trainer.micro_batch > trainer.minibatch:
        yield f"{named('trainer.micro_batch')}: must not be above {named('trainer.minibatch')}"
    if trainer.attention == "flash_attention_2" and trainer.dtype == "float32":
        yield f"{named('trainer.attention')}: computes in bfloat16 only, not in {named('trainer.dtype')}"
    if trainer.deepspeed is not None and not deepspeed:
        yield (
            f"{named('trainer.deepspeed')}: only with trainer.backend=deepspeed (this run: {named('trainer.backend')})"
        )
    if s.optimizer.kind == "adamw_8bit":
        others = {
            "trainer.backend": deepspeed,
            "trainer.offload": trainer.offload != "none",
            "trainer.command": trainer.command is not None,
        }
        for key in (key for key, chosen in others.items() if chosen):
            yield f"{named('optimizer.kind')}: not with {named(key)}; leave out one of the two"
    if deepspeed and trainer.shard not in ("auto", "all"):
        yield (
            f"{named('trainer.shard')}: with {named('trainer.backend')} zero_optimization.stage in trainer.deepspeed says what is "
            "sharded, over all processes; leave it out"
        )
    if deepspeed and s.lora.rank:
        yield (
            f"{named('lora.rank')}: not with {named('trainer.backend')}; adapters are small, so trainer.backend=torch trains them"
        )


def tied_head(targets: Collection[str]) -> str:
    """Why adapters cannot be put into an output head that is the embedding."""
    return (
        f"lora.targets={','.join(targets)}: the output head of this model is its embedding (tie_word_embeddings), so adapters in the head "
        "would be trained and not served; leave it out"
    )


def answer_lengths(settings: Settings) -> Iterator[tuple[str, int]]:
    """Each setting that says how long answers may be, by its dotted name; 0 where it follows another one."""
    yield "rollout.max_tokens", settings.rollout.max_tokens
    yield "eval.max_tokens", settings.eval.max_tokens or 0
    for name, one in settings.eval.sets.items():
        yield f"eval.sets.{name}.max_tokens", one.max_tokens or 0


def _learns(s: Settings) -> bool:
    """Whether the run updates a policy by its rollouts."""
    return s.rl_phase != "rollout" and s.program not in ("toy", "ping")


def _rollouts(s: Settings, named: AsChosen) -> Iterator[str]:
    """What an update needs of the rollouts that it learns from."""
    if s.update.trajectories is not None and s.rl_phase != "update":
        yield f"{named('update.trajectories')}: only with --rl-phase update (this run: {named('rl_phase')})"
    if _learns(s) and s.rollout.temperature <= 0:
        yield (
            f"{named('rollout.temperature')}: greedy samples of a task are all alike; an update needs more than 0"
        )
    compares = s.algorithm.loss != "rft" and s.algorithm.advantage != "reinforce_plus_plus"
    if _learns(s) and compares and s.rollout.samples == 1:
        yield f"{named('rollout.samples')}: {named('algorithm.loss')} compares the samples of a task; give 2 or more"
    for word in s.rollout.chat_template_kwargs:
        if "=" not in word or not word.partition("=")[0].isidentifier():
            yield f"{named('rollout.chat_template_kwargs')}: {word!r} is no name=value"


def _rewards_and_evaluations(s: Settings, named: AsChosen) -> Iterator[str]:
    """Rewards and their weights, the sets of held-out tasks, the figure by which the best policy is chosen."""
    weights, rewards = len(s.reward.weights), len(reward_kinds(s.reward.kind))
    if weights not in (0, rewards):
        yield (
            f"{named('reward.weights')}: {counted(weights, 'weight')} for {counted(rewards, 'reward')} ({named('reward.kind')})"
        )
    if "train" in s.eval.sets:
        yield "eval.sets.train: a set of held-out tasks needs another name; that of the training tasks is train"
    for name, one in s.eval_sets.items():
        where = f"eval.sets.{name}" if s.eval.sets else "eval"
        if one.temperature == 0 and one.samples != 1:
            yield (
                f"{where}.samples={one.samples}: all samples of a task are the same at {where}.temperature=0; give 1, or a temperature"
            )
    yield from _best_by(s, named)


def _best_by(s: Settings, named: AsChosen) -> Iterator[str]:
    """`checkpoint.best_by` names a figure that the evaluations will have."""
    figure, sets = s.checkpoint.best_by, s.eval.sets
    if figure == "reward_mean":
        return
    names = names_of_figures(s.eval.samples)
    if sets:
        figures = {name: ("reward", *names_of_figures(one.samples or 1)) for name, one in s.eval_sets.items()}
        names = [f"{name}/{one}" for name, known in figures.items() for one in known]
    by_source = tuple(f"{name}/reward/" for name in sets) or "reward/"
    if figure not in names and not figure.startswith(by_source):
        yield (
            f"{named('checkpoint.best_by')}: no evaluation has this figure; there are {', '.join(['reward_mean', *names])}, "
            f"and the mean reward of a source ({'SET/' if sets else ''}reward/SOURCE)"
        )


def _algorithm(s: Settings, named: AsChosen) -> Iterator[str]:
    """The learning rate over time, the loss, and how rollouts must be sampled for it."""
    o, a = s.optimizer, s.algorithm
    if o.schedule != "constant" and o.decay_steps is None:
        yield (
            f"{named('optimizer.schedule')}: give optimizer.decay_steps, the step at which the learning rate is at its lowest"
        )
    if o.decay_steps is not None and o.decay_steps <= o.warmup_steps:
        yield f"{named('optimizer.decay_steps')}: must be above {named('optimizer.warmup_steps')}"
    if a.mismatch != "none" and a.old_logprobs == "engine":
        yield (
            f"{named('algorithm.mismatch')}: corrects the engine's log-probabilities by the trainer's, and with "
            f"{named('algorithm.old_logprobs')} there are none"
        )
    if s.rollout.max_refills and s.rollout.completion_threshold != 1:
        yield (
            f"{named('rollout.completion_threshold')}: with {named('rollout.max_refills')} a round ends when all of it is done, "
            "since what it came to decides about the next one; give rollout.max_refills=0 or leave out rollout.completion_threshold"
        )
    if a.overlong_buffer is not None and a.overlong_buffer > s.rollout.max_tokens:
        yield f"{named('algorithm.overlong_buffer')}: must not be above {named('rollout.max_tokens')}"
    # The engine's log-probabilities are of the cut-off distribution, the trainer's of the whole one: their ratio would be no ratio of
    # two policies, and below 1 from the start.
    cut_off = {"rollout.top_p": s.rollout.top_p < 1, "rollout.top_k": s.rollout.top_k > 0}
    for key in (key for key, cuts in cut_off.items() if cuts and _learns(s) and a.loss != "rft"):
        yield (
            f"{named(key)}: train rollouts for {named('algorithm.loss')} must be sampled from the whole distribution, else the "
            f"update is biased; for evaluations there is {key.replace('rollout', 'eval')}"
        )


def check_change(settings: Settings, values: Mapping[str, object]) -> None:
    """What must hold of a change of a run's settings to `values`, by dotted names; `settings`: as they are then. Raises UsageError."""
    if "rollout.temperature" in values and settings.update.recency > 1:
        raise UsageError(
            f"rollout.temperature={values['rollout.temperature']}: cannot change while update.recency is above 1, for an update learns "
            "from trajectories of one temperature"
        )
