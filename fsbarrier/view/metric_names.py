"""Maps a run's metrics to the names that TRL or verl use, so that existing dashboards work. Pure.

Metrics without such a name are called EVENT/FIELD: `updated/replayed`, `evaluated/pass_at_4`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsbarrier.rundir.journal import Event
from fsbarrier.view.timings import IterationTime

#: naming scheme -> event -> field of the event -> metric names
NAMES: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "trl": {
        "rolled_out": {
            "reward_mean": ("reward",),
            "reward_std": ("reward_std",),
            "without_signal_share": ("frac_reward_zero_std",),
            "answer_tokens_mean": ("completions/mean_length",),
            "answer_tokens_min": ("completions/min_length",),
            "answer_tokens_max": ("completions/max_length",),
            "truncated_share": ("completions/clipped_ratio",),
        },
        "updated": {
            "loss": ("loss",),
            "lr": ("learning_rate",),
            "grad_norm": ("grad_norm",),
            "entropy": ("entropy",),
            "kl": ("kl",),
            "clipped_low": ("clip_ratio/low_mean",),
            "clipped_high": ("clip_ratio/high_mean",),
            "clip_fraction": ("clip_ratio/region_mean",),
            "tokens": ("num_tokens",),
            "logprob_gap_mean": ("sampling/sampling_logp_difference/mean",),
            "logprob_gap_max": ("sampling/sampling_logp_difference/max",),
        },
        "evaluated": {"reward_mean": ("eval_reward",)},
        "times": {"seconds": ("step_time",)},
    },
    "verl": {
        "rolled_out": {
            "reward_mean": ("critic/score/mean", "critic/rewards/mean"),
            "answer_tokens_mean": ("response_length/mean",),
            "answer_tokens_min": ("response_length/min",),
            "answer_tokens_max": ("response_length/max",),
            "truncated_share": ("response_length/clip_ratio",),
        },
        "updated": {
            "loss": ("actor/pg_loss",),
            "lr": ("actor/lr",),
            "grad_norm": ("actor/grad_norm",),
            "entropy": ("actor/entropy",),
            "kl": ("actor/kl_loss",),
            "clip_fraction": ("actor/pg_clipfrac",),
            "clipped_low": ("actor/pg_clipfrac_lower",),
            "tokens": ("perf/total_num_tokens",),
        },
        "evaluated": {"reward_mean": ("val-core/reward/mean",)},
        "times": {
            "seconds": ("perf/time_per_step", "timing_s/step"),
            "train_rollout": ("timing_s/gen",),
            "eval_rollout": ("timing_s/testing",),
            "update": ("timing_s/update_actor",),
            "engine_start": ("timing_s/update_weights",),
        },
    },
}
#: fields that describe where or when an event happened, which are not metrics
NO_MEASURES = frozenset({"mono_s", "node_rank", "incarnation", "generation", "iteration", "phase", "seconds"})
#: prefix for the evaluation of a session's last policy
LAST_POLICY = "last_policy/"


def metrics(events: Iterable[Event], time: IterationTime | None, like: str) -> dict[str, float]:
    """The metrics of one iteration, named according to `like`."""
    fields_of: dict[str, Mapping[str, object]] = {event.name: event.fields for event in events}
    if time is not None:
        phases = {name: seconds for (_, name), seconds in time.phases.items()}
        fields_of["times"] = {**phases, "seconds": time.seconds, "coordination_s": time.coordination_s}
    found: dict[str, float] = {}
    for event, fields in fields_of.items():
        known = NAMES[like].get(event, {})
        for name, value in fields.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and (name not in NO_MEASURES or event == "times"):
                found |= dict.fromkeys(known.get(name, (_own_name(event, name),)), float(str(value)))
    return found


def last_policy_metrics(events: Iterable[Event], like: str) -> dict[str, float]:
    """The evaluation metrics of a session's last policy, if any. They have a prefix because, if the run continues, the next iteration
    evaluates the same policy again under the usual names."""
    of_last = [event for event in events if event.fields.get("final") is True]
    return {LAST_POLICY + name: value for name, value in metrics(of_last, None, like).items()}


def _own_name(event: str, name: str) -> str:
    """Both naming schemes use TRL's name for a part of the reward: `reward_parts/style` becomes `rewards/style/mean`."""
    part = name.removeprefix("reward_parts/")
    if event == "rolled_out" and part != name and not part.endswith("_failed"):
        return f"rewards/{part}/mean"
    return f"{event}/{name}"
