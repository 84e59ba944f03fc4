"""Every setting of a run: its name, type, default, limits and meaning. `Settings` at the end is the whole of them.

Plain dataclasses, because every program and every command reads settings; what people chose is checked once, by resolve.py, and the
annotations here say how. docs/settings.md is generated from the descriptions: `python scripts/settings_doc.py`.
The file is longer than others because it is one table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal

from fsbarrier.protocol import timing
from fsbarrier.settings.section import (
    AT_ONCE,
    EACH_START,
    NEXT_ITERATION,
    Changes,
    Section,
    setting,
    table_of,
)
from fsbarrier.settings.sources import SET_NAME, SETS, known_as
from fsbarrier.settings.value_types import (
    Betas,
    Bounds,
    CommandLine,
    Count,
    CountOrZero,
    Fraction,
    FractionOrZero,
    Name,
    Names,
    Nodes,
    NotNegative,
    Numbers,
    Positive,
    Preset,
    RlPhase,
    Seconds,
    Trackers,
    Weights,
    Words,
    json_or_text,
)


@dataclass(frozen=True, slots=True)
class RolloutSettings(Section):
    """Sampling trajectories from the current policy (phases 1-4)."""

    FIXED_BECAUSE = "trajectories before and after would not be of one kind"

    tasks: Count = setting(96, "Train tasks an iteration; more than there are: all.", NEXT_ITERATION)
    samples: Count = setting(16, "Trajectories a task: the size of its group.", NEXT_ITERATION)
    temperature: NotNegative = setting(1.0, "Sampling temperature.", NEXT_ITERATION)
    top_p: Fraction = setting(1.0, "Nucleus sampling: the probability mass that is kept.", NEXT_ITERATION)
    top_k: Annotated[int, Bounds(ge=-1)] = setting(
        -1, "Sample among the k likeliest tokens; -1: all.", NEXT_ITERATION
    )
    max_tokens: Count = setting(512, "Most tokens the policy may write in one turn.", NEXT_ITERATION)
    chat_template_kwargs: Words = setting(
        (), "What the model's chat template is told beside the messages, like `enable_thinking=false`."
    )
    concurrency: Count = setting(
        64,
        "Groups of `rollout.samples` in flight on each engine replica, and more of smaller ones; what is in flight is not taken over.",
        AT_ONCE,
    )
    prompts_per_request: CountOrZero = setting(
        0, "Prompts that share a request to the engine; 0: as many as make about 128 sequences.", AT_ONCE
    )
    request_timeout_s: Seconds = setting(
        600.0, "Seconds without a sign of life after which a request counts as failed.", AT_ONCE
    )
    retries: CountOrZero = setting(3, "How often a failed request is tried again, with back-off.", AT_ONCE)
    seed: CountOrZero = setting(0, "Decides which tasks are drawn when.")
    take_over: bool = setting(
        True,
        "A node that has run out of tasks takes over those that the slowest has not begun.",
        NEXT_ITERATION,
    )
    task_timeout_s: Seconds | None = setting(
        None,
        "Seconds after which a task that was begun counts as failed, with an agent each of its episodes; none: no limit, "
        "with an agent an hour.",
        AT_ONCE,
    )
    turn_timeout_s: Seconds | None = setting(
        None,
        "Seconds that one answer to an agent may take; none: as long as the engine shows signs of life.",
        AT_ONCE,
    )
    agent: Name | None = setting(
        None, "Your own agent for episodes of several turns, `path/file.py:Class`; none: one answer a task."
    )
    max_error_share: FractionOrZero = setting(
        0.1, "The phase fails where the agent failed in more than this share of its trajectories.", AT_ONCE
    )
    completion_threshold: Fraction = setting(
        1.0,
        "Train rollouts end once this share of the tasks is done and `grace_s` has passed; 1: when all are done.",
        NEXT_ITERATION,
    )
    grace_s: NotNegative = setting(
        30.0, "Seconds that tasks get to be finished after `completion_threshold` is reached.", NEXT_ITERATION
    )
    carry_over: bool = setting(
        False,
        "Tasks that were cut off at the end of an iteration are rolled out in the next one, beside its own.",
        NEXT_ITERATION,
    )
    oversample: Annotated[float, Bounds(ge=1, le=100)] = setting(
        1.0,
        "Roll out this many times `rollout.tasks`, and keep the first `rollout.tasks` whose rewards are not all equal.",
        NEXT_ITERATION,
    )
    max_refills: CountOrZero = setting(
        0,
        "How often as many further tasks are rolled out while fewer than `rollout.tasks` groups have rewards that are not all equal.",
        NEXT_ITERATION,
    )

    @property
    def template_arguments(self) -> dict[str, object]:
        """`chat_template_kwargs` by name; a value that is JSON as what it stands for, else as text."""
        return {
            name: json_or_text(value)
            for name, _, value in (w.partition("=") for w in self.chat_template_kwargs)
        }


@dataclass(frozen=True, slots=True)
class EvalSet(Section):
    """One of several sets of held-out tasks: its file, and what is otherwise for it than `eval` says.

    NAME is any name of yours; with sets of your own, `test.jsonl` is evaluated only if you name it.
    """

    file: Name | None = setting(
        None,
        "Its task file, an absolute path or one in the data path; none: NAME.jsonl or NAME.parquet there.",
    )
    tasks: CountOrZero | None = setting(
        None, "Its tasks, always the same ones, 0: all; none: as `eval.tasks`.", NEXT_ITERATION
    )
    samples: Count | None = setting(None, "Trajectories a task; none: as `eval.samples`.", NEXT_ITERATION)
    temperature: NotNegative | None = setting(
        None, "Sampling temperature, 0: greedy; none: as `eval.temperature`.", NEXT_ITERATION
    )
    top_p: Fraction | None = setting(None, "Nucleus sampling; none: as `eval.top_p`.", NEXT_ITERATION)
    top_k: Annotated[int, Bounds(ge=-1)] | None = setting(
        None, "Sample among the k likeliest tokens, -1: all; none: as `eval.top_k`.", NEXT_ITERATION
    )
    max_tokens: Count | None = setting(
        None, "Most tokens in one turn; none: as `eval.max_tokens`.", NEXT_ITERATION
    )
    success: float | None = setting(
        None, "From this reward on a trajectory counts as solved; none: as `eval.success`.", NEXT_ITERATION
    )


@dataclass(frozen=True, slots=True)
class EvalSettings(Section):
    """Evaluation on held-out tasks (phases 5-6, and of the last policy 13)."""

    FIXED_BECAUSE = "the run's record names the sets and their task files"

    tasks: CountOrZero = setting(0, "Test tasks an evaluation, always the same ones; 0: all.", NEXT_ITERATION)
    samples: Count = setting(1, "Trajectories a test task.", NEXT_ITERATION)
    temperature: NotNegative = setting(1.0, "Sampling temperature; 0: greedy.", NEXT_ITERATION)
    top_p: Fraction | None = setting(None, "Nucleus sampling; none: as `rollout.top_p`.", NEXT_ITERATION)
    top_k: Annotated[int, Bounds(ge=-1)] | None = setting(
        None, "Sample among the k likeliest tokens, -1: all; none: as `rollout.top_k`.", NEXT_ITERATION
    )
    max_tokens: Count | None = setting(
        None, "Most tokens in one turn; none: as `rollout.max_tokens`.", NEXT_ITERATION
    )
    success: float = setting(
        1.0, "From this reward on a trajectory counts as solved (pass@k, majority@k).", NEXT_ITERATION
    )
    sets: Mapping[str, EvalSet] = table_of(
        EvalSet,
        "Several sets of held-out tasks by name, each with a file and settings of its own (below); empty: one, `test.jsonl`.",
    )


@dataclass(frozen=True, slots=True)
class RewardSettings(Section):
    """How a trajectory is judged."""

    FIXED_BECAUSE = "rewards before and after could not be compared"

    kind: Name = setting(
        "exact",
        "`exact` match, `numeric` match, `math` (math-verify, LaTeX), `judge` (a language model), or your own "
        "`path/file.py:function`; several with commas between them are added up.",
    )
    weights: Numbers = setting((), "What each of several counts, which may be below 0; not given: 1 each.")
    timeout_s: Seconds = setting(60.0, "Seconds after which one call of a reward counts as failed.", AT_ONCE)
    max_error_share: FractionOrZero = setting(
        0.1,
        "The phase fails where the reward could not be computed for more than this share of its trajectories.",
        AT_ONCE,
    )


@dataclass(frozen=True, slots=True)
class JudgeSettings(Section):
    """A language model that judges answers, behind an OpenAI-compatible address (`reward.kind=judge`, or a function that asks it)."""

    FIXED_BECAUSE = "rewards before and after could not be compared"

    url: Name | None = setting(None, "Its base address, like https://host/v1.", AT_ONCE)
    model: Name | None = setting(None, "Its name there.")
    api_key_env: Name | None = setting(None, "Environment variable with its key; none: no key.")
    concurrency: Count = setting(16, "Requests to it under way at once, on each node.", AT_ONCE)
    timeout_s: Seconds = setting(60.0, "Seconds after which one request counts as failed.", AT_ONCE)
    retries: CountOrZero = setting(3, "How often a failed request is tried again, with back-off.", AT_ONCE)


@dataclass(frozen=True, slots=True)
class AlgorithmSettings(Section):
    """What the update optimises (phases 8 and 10)."""

    FIXED_BECAUSE = "the run would go on with another algorithm than it began with"

    preset: Preset | None = setting(
        None, "A published recipe, whose values hold where you give none; `--dry-run` shows what it sets."
    )
    loss: Literal["grpo", "gspo", "cispo", "sapo", "rft"] = setting(
        "grpo",
        "`grpo`: policy gradient with a clipped ratio; `gspo`: with one ratio a sequence; `cispo`: with a clipped weight; `sapo`: with "
        "a soft gate; `rft`: fine-tuning on successes.",
    )
    clip_low: Fraction = setting(0.2, "The probability ratio is clipped at 1 - clip_low.", NEXT_ITERATION)
    clip_high: Positive = setting(0.28, "The probability ratio is clipped at 1 + clip_high.", NEXT_ITERATION)
    dual_clip: Annotated[float, Bounds(gt=1)] | None = setting(
        10.0, "What a ratio counts at most where the advantage is negative; none: no bound.", NEXT_ITERATION
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = setting(
        "token-mean",
        "What a minibatch's loss is of its tokens': the mean, the mean of sequences' means, or of their sums, or that divided by "
        "`aggregation_length`.",
    )
    aggregation_length: Count | None = setting(
        None, "The constant that stands for a length (Dr.GRPO); none: `rollout.max_tokens`."
    )
    advantage: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = setting(
        "grpo",
        "What a reward is held against: the group's mean; the mean of the group's others; the batch's mean; the group's mean, and then "
        "the batch's.",
    )
    length_penalty: NotNegative = setting(
        0.0, "The reward that an answer of `rollout.max_tokens` tokens loses, a shorter one in proportion."
    )
    normalize_std: bool = setting(
        True,
        "Divide advantages by the standard deviation of the group's rewards, or of the batch's advantages.",
    )
    drop_zero_signal: bool = setting(True, "Leave out groups whose rewards are all equal.")
    truncated: Literal["keep", "mask", "shape"] = setting(
        "keep",
        "Answers that were cut off: `keep`, trained on with the reward that they got; `mask`, counted in their group but not trained "
        "on; `shape`, kept, and every answer loses reward as it nears `rollout.max_tokens`.",
    )
    overlong_buffer: Count | None = setting(
        None, "With `shape`: how many tokens before the limit the loss begins; none: a fifth of the limit."
    )
    overlong_penalty: Positive = setting(1.0, "With `shape`: the reward that is lost at the limit.")
    old_logprobs: Literal["auto", "trainer", "engine"] = setting(
        "auto",
        "What the ratio is to: log-probabilities that the trainer computes before the first step, or those that the engine gave; auto: "
        "the engine's where both compute in float32 and nothing is corrected.",
    )
    mismatch: Literal["none", "token_tis", "icepop", "sequence_mask"] = setting(
        "none",
        "Correction for what trainer and engine give different probabilities (the weight w is their ratio): tokens weigh w, but "
        "mismatch_high at most; w within the two bounds, else nothing; or a sequence weighs the product of its tokens', and nothing "
        "above mismatch_high.",
    )
    mismatch_low: FractionOrZero = setting(0.5, "The lower bound of `icepop`.", NEXT_ITERATION)
    mismatch_high: Positive = setting(2.0, "The upper bound of the correction.", NEXT_ITERATION)
    kl_coef: NotNegative = setting(0.0, "Weight of the distance to a reference policy in the loss.")
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3",
        "How that distance is estimated: the log-ratio, half its square, or the one that is never negative.",
    )
    kl_reference_every: CountOrZero = setting(
        0, "The reference is the newest policy version that this divides; 0: the first policy, for good."
    )
    entropy_coef: NotNegative = setting(
        0.0, "Weight of the policy's entropy, which the loss then rewards.", NEXT_ITERATION
    )
    max_logprob_gap: Positive | None = setting(
        None,
        "The update fails where, on the first minibatch, trainer and engine disagree by more than this on "
        "average about the sampled tokens' log-probabilities; none: a limit that fits the precision.",
        AT_ONCE,
    )


@dataclass(frozen=True, slots=True)
class OptimizerSettings(Section):
    """AdamW."""

    FIXED_BECAUSE = "the optimizer's state is that of the value that the run began with"

    kind: Literal["adamw", "adamw_8bit"] = setting(
        "adamw",
        "`adamw_8bit`: moments take two bytes a weight instead of eight; needs the package torchao on every node.",
    )
    lr: Positive = setting(1e-6, "Learning rate.", NEXT_ITERATION)
    betas: Betas = setting((0.9, 0.95), "Decay of the two moment estimates.")
    eps: Positive = setting(1e-8, "What is added to the root of the second moment estimate.")
    weight_decay: NotNegative = setting(
        0.0, "Decoupled weight decay, of all but norms and biases.", NEXT_ITERATION
    )
    warmup_steps: CountOrZero = setting(
        4, "Optimizer steps over which the learning rate rises, once a run.", NEXT_ITERATION
    )
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "How the learning rate goes on after that: it stays, or falls until `decay_steps`.",
        NEXT_ITERATION,
    )
    decay_steps: Count | None = setting(
        None,
        "The run's optimizer step at which a falling learning rate is at its lowest, and stays there.",
        NEXT_ITERATION,
    )
    min_lr_ratio: FractionOrZero = setting(
        0.0, "The lowest learning rate, as a share of `lr`.", NEXT_ITERATION
    )
    grad_clip: Positive = setting(1.0, "Largest norm of the gradient.", NEXT_ITERATION)


@dataclass(frozen=True, slots=True)
class TrainerSettings(Section):
    """The update's program (phase 10): the built-in one on torchrun, or your own command."""

    FIXED_BECAUSE = "the trainer's saved state and its processes depend on it"

    epochs: Count = setting(2, "Passes over each iteration's batch.", NEXT_ITERATION)
    minibatch: Count = setting(
        256, "Trajectories an optimizer step, over all nodes together.", NEXT_ITERATION
    )
    max_tokens_per_micro_batch: Count = setting(
        8192,
        "Tokens that one process takes through the model at a time; a longer trajectory is alone.",
        AT_ONCE,
    )
    micro_batch: Count | None = setting(
        None,
        "Trajectories that one process takes through the model at a time, at most; none: any number.",
        AT_ONCE,
    )
    max_logits_mb: Count = setting(
        512,
        "What the logits of a micro-batch may take at once, in MiB; they are computed in slices.",
        AT_ONCE,
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Compute each block's activations a second time instead of keeping them, which is slower by a third; none: on "
        "accelerators.",
        AT_ONCE,
    )
    attention: Literal["sdpa", "flash_attention_2"] = setting(
        "sdpa",
        "PyTorch's own attention, or flash-attention where it is installed; with it micro-batches have no padding.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Precision; auto: bfloat16 on accelerators that have it, else float32."
    )
    backend: Literal["torch", "deepspeed"] = setting(
        "torch",
        "Who shards the policy and steps the optimizer: PyTorch alone, or DeepSpeed's ZeRO-1, 2 or 3.",
    )
    deepspeed: Name | None = setting(
        None,
        "A DeepSpeed configuration, `path/file.json`: what it leaves open or to `auto` these settings fill in, and what contradicts "
        "them is refused; none: ZeRO-3.",
    )
    shard: Literal["auto", "none", "node", "all"] = setting(
        "auto",
        "Over which processes the policy, its gradients and the optimizer's state are sharded: `none`, those of each `node`, or "
        "`all`; auto: the least that fits into memory.",
    )
    offload: Literal["none", "optimizer", "all"] = setting(
        "none",
        "What is kept in the host's memory instead of the accelerator's: the `optimizer`'s state between steps, or `all` that is "
        "sharded; on a CPU everything is there anyway.",
    )
    processes_per_node: CountOrZero = setting(0, "Training processes a node; 0: one an accelerator, else 1.")
    keep: Literal["auto", "process", "nothing"] = setting(
        "auto",
        "What stays from one update to the next: each training `process`, with the process group, the policy and the optimizer's state, "
        "or `nothing`; auto: the process on CPUs. On an accelerator that has no room for both, they wait in the host's memory while the "
        "engine works; that is untried.",
    )
    timeout_s: Seconds = setting(1800.0, "Seconds after which a silent peer ends the process group.", AT_ONCE)
    command: CommandLine | None = setting(
        None,
        "Your own trainer: a command line or a list of words, with placeholders {node_rank} {num_nodes} "
        "{master_addr} {master_port} {batch} {out} {model} {trainer_state} {spec}; none: the built-in one.",
    )


@dataclass(frozen=True, slots=True)
class LoraSettings(Section):
    """Low-rank adapters (LoRA), which are trained in the policy's place. What is served and published has them merged."""

    FIXED_BECAUSE = "the checkpoints hold adapters of that shape"

    rank: CountOrZero = setting(0, "Their rank; 0: none, and the policy itself is trained.")
    alpha: Positive = setting(32.0, "What they add counts alpha / rank times.")
    targets: Names = setting(
        (), "The linear layers that get one, like q_proj,v_proj; not given: all but the output head."
    )


@dataclass(frozen=True, slots=True)
class UpdateSettings(Section):
    """Which rollouts an update learns from (phase 8)."""

    FIXED_BECAUSE = "the run's own rollouts are what it goes on from"

    recency: Count = setting(
        1,
        "Learn from the rollouts of the last so many iterations, the later the likelier; 1: of this iteration only.",
        NEXT_ITERATION,
    )
    recency_power: NotNegative = setting(
        2.0,
        "How much likelier: a group of the n-th last of N iterations is drawn with weight ((N - n + 1) / N) ** this.",
        NEXT_ITERATION,
    )
    groups: Count | None = setting(
        None,
        "Groups that are drawn for a batch; none: as many as this iteration has with something to learn from.",
        NEXT_ITERATION,
    )
    trajectories: Name | None = setting(
        None,
        "With `--rl-phase update`: a run directory, of which iteration n's rollouts are learned from in iteration n, or "
        "one merged file, in every iteration; none: this run's own.",
    )


@dataclass(frozen=True, slots=True)
class EngineSettings(Section):
    """The local vLLM servers of each node."""

    FIXED_BECAUSE = "each node makes its engines with it when it starts"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Precision of the served weights; auto: float32 on CPU, else bfloat16."
    )
    max_model_len: Count = setting(2048, "Longest prompt and answer together, in tokens.")
    tensor_parallel_size: Count = setting(1, "Accelerators of a node that share one copy of the model.")
    replicas: CountOrZero = setting(
        0,
        "Servers on each node, each on accelerators of its own (on a CPU: on cores of its own); 0: as many as there are accelerators "
        "for, 1 on a CPU.",
    )
    gpu_memory_utilization: Fraction = setting(0.85, "Share of an accelerator's memory the engine may take.")
    kv_cache_mb: Count | None = setting(
        None,
        "Key-value cache in MiB; none: room for 16 full sequences on a CPU (64 MiB to an eighth of the memory), else "
        "the engine decides.",
    )
    extra_args: Words = setting((), "More arguments for the vLLM server.")
    start_timeout_s: Seconds = setting(900.0, "Seconds within which a started server must answer.")
    release: Literal["auto", "sleep", "stop", "keep"] = setting(
        "auto", "How its accelerator memory is freed for the update; auto: keep on CPU, else what frees it."
    )
    url: str | None = setting(
        None,
        "A server that is there already, seen from each node, to be used but not managed; none: one of "
        "one's own, or with `--debug-mode` http://127.0.0.1:8000.",
    )
    api_key_env: str | None = setting(None, "Environment variable with that server's key.")


@dataclass(frozen=True, slots=True)
class CheckpointSettings(Section):
    """Saved policies."""

    FIXED_BECAUSE = "the nodes have put files where it says"

    keep: Count = setting(3, "How many policy versions, and training batches, stay on disk.", AT_ONCE)
    keep_every: CountOrZero = setting(
        0, "Every so-many-th policy version stays for good; 0: none does.", AT_ONCE
    )
    keep_best: bool = setting(True, "The policy version with the best evaluation so far stays, too.", AT_ONCE)
    best_by: Name = setting(
        "reward_mean",
        "The figure of the `evaluated` event that decides which evaluation is best, like `pass_at_8`, or `aime/pass_at_8` of a set.",
        AT_ONCE,
    )
    trainer_every: CountOrZero = setting(
        0,
        "The trainer's state goes to the shared directory every so many updates; 0: as often as that is cheap (2 s, or a tenth).",
        AT_ONCE,
    )
    local_dir: str = setting(
        "",
        "Where nodes keep their part in between, and before they bring one that takes long to the shared directory; empty: in their "
        "temporary folder.",
    )
    weights_dir: str = setting(
        "auto",
        "Folder on each node for a copy of the new weights, from which its engines load them; auto: /dev/shm where the run directory is "
        "on a network mount, else none; none: they read the run directory.",
    )
    keep_trajectories: CountOrZero = setting(
        0,
        "Of how many iterations up to the newest update the trajectories stay on disk, `update.recency` at least; 0: all.",
        AT_ONCE,
    )


@dataclass(frozen=True, slots=True)
class CoordinationSettings(Section):
    """How nodes watch and wait for each other."""

    FIXED_BECAUSE = "all nodes must judge each other's silence alike"

    beat_s: Seconds = setting(timing.BEAT_S, "Seconds between a node's heartbeats.")
    suspect_s: Seconds = setting(
        timing.SUSPECT_S, "Seconds without a new heartbeat until a node is suspected."
    )
    dead_s: Seconds = setting(timing.DEAD_S, "Seconds without a new heartbeat until a node counts as lost.")
    join_timeout_s: Seconds = setting(
        timing.JOIN_TIMEOUT_S,
        "Seconds that nodes wait for each other at the start; on a worker, for the run's record too.",
        EACH_START,
    )
    last_call_s: Seconds | None = setting(
        None,
        "Once `min_nodes` are there, the run begins when no further node has come for so many seconds; those that come later are taken in "
        "at the next iteration. none: it waits for all of them up to `join_timeout_s`. `--num-nodes A:B` sets it to 10.",
    )
    rejoin_timeout_s: Seconds = setting(
        timing.REJOIN_TIMEOUT_S, "Seconds that `--on-node-failure wait` waits for a lost node."
    )
    outage_s: Seconds = setting(
        timing.OUTAGE_S,
        "Seconds that a node holds out while the shared directory fails, before it ends with exit code 3.",
    )
    stall_timeout_s: Seconds = setting(1800.0, "Seconds without progress until a program counts as wedged.")
    retries: CountOrZero = setting(2, "How often a failed phase is tried again before exit code 4.", AT_ONCE)
    poll_max_s: Seconds = setting(
        0.05,
        "Longest pause between two looks at the shared directory in a short wait; after that 1 % of what was waited, at most a beat.",
    )


@dataclass(frozen=True, slots=True)
class NotifySettings(Section):
    """Who is told what happens to the run."""

    FIXED_BECAUSE = "each node reads it when it starts"

    command: Name | None = setting(
        None,
        "A command that gets one JSON object in its standard input (and in $FSBARRIER_EVENT) when the run has started, was evaluated, "
        "lost a node, and when it finished, stopped or broke. It is started on one node, without a shell.",
    )


@dataclass(frozen=True, slots=True)
class TrackerSettings(Section):
    """Trackers that are told what each iteration measured (docs/trackers.md)."""

    names: Trackers = setting((), "Which ones; each needs its package beside accelerate.", AT_ONCE)
    names_like: Literal["trl", "verl"] = setting("trl", "Whose names the figures get.", AT_ONCE)
    project: Name = setting("fsbarrier", "The project, or experiment, that the run is listed in.", AT_ONCE)


@dataclass(frozen=True, slots=True)
class ToySettings(Section):
    """The program `toy`: the same phases without a model."""

    tasks: Count = setting(64, "Tasks an iteration.", NEXT_ITERATION)
    phase_s: NotNegative = setting(0.5, "Seconds that each working phase takes.", AT_ONCE)
    speeds: Weights = setting(
        (), "How fast each node is, beside what its weight says: 0.5 is half; not given: all 1.", AT_ONCE
    )


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """A run's settings, complete."""

    data_path: Name | None = setting(
        None, "Folder with train and test as .jsonl or .parquet; none: the built-in task."
    )
    log_path: Name | None = setting(None, "The run directory, the same on all nodes.", EACH_START)
    model: Name | None = setting(
        None, "Hugging Face model folder, a folder below the data path, or a name in the local cache."
    )
    init_from: Name | None = setting(
        None,
        "Begin with another run's policy, `RUN_DIRECTORY@VERSION` (without @VERSION: the one that it serves), in place of `model`.",
    )
    init_optimizer: bool = setting(
        False,
        "With `init_from`: take over the state of that version's optimizer too, and how many steps it has made.",
    )
    program: Name = setting("rl", "`rl`, `toy`, `ping`, or your own FILE.py.")
    rl_phase: RlPhase = setting("both", "Phases 0-6, 7-13, or all.", EACH_START)
    rollout_split: Literal["train-only", "eval-only"] | None = setting(
        None, "With `rl_phase=rollout`: only train rollouts, or only the evaluation; none: both.", EACH_START
    )
    eval_interval: CountOrZero = setting(
        1,
        "Evaluate when iteration % N == 1 (1: every iteration; 0: never, and no test tasks are needed).",
        NEXT_ITERATION,
    )
    num_nodes: Nodes = setting(1, "Nodes of the run.", AT_ONCE)
    rank_weights: Weights = setting(
        (1.0,), "One positive weight a node, its share of the tasks; not given: all equal.", AT_ONCE
    )
    min_nodes: Count = setting(1, "With fewer nodes left the run ends with exit code 5.", AT_ONCE)
    expect_gpus: Count | None = setting(
        None,
        "Refuse to start with fewer accelerators than this on all nodes together, and name who lacks them; each start may say anew.",
        EACH_START,
    )
    on_node_failure: Literal["shrink", "wait", "abort"] = setting(
        "shrink",
        "When a node is lost: go on with the others, hold the phase until it is back, or end.",
        AT_ONCE,
    )
    debug_mode: bool = setting(False, "Do not manage vLLM: use the server that is there (`engine.url`).")
    iterations: Count | None = setting(
        None,
        "Do iterations up to this one; none: endless. Each start of node 0 may name another number.",
        EACH_START,
    )
    shared_group: bool = setting(
        False, "Let the group read and write the run directory (0770, 0660), not only its owner."
    )
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    reward: RewardSettings = RewardSettings()
    judge: JudgeSettings = JudgeSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: TrainerSettings = TrainerSettings()
    lora: LoraSettings = LoraSettings()
    update: UpdateSettings = UpdateSettings()
    engine: EngineSettings = EngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    coordination: CoordinationSettings = CoordinationSettings()
    notify: NotifySettings = NotifySettings()
    tracker: TrackerSettings = TrackerSettings()
    toy: ToySettings = ToySettings()
    custom: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "description": "Anything (`custom.name=value`), passed on to your own program, reward or trainer. "
            "What begins with `custom.secret` is not shown.",
            "changes": Changes.NEVER,
        },
    )

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """The sets of held-out tasks by name, with nothing left open but the file; without any of the user's own it is `test`."""
        own, rollout = self.eval, self.rollout
        common = EvalSet(
            tasks=own.tasks,
            samples=own.samples,
            temperature=own.temperature,
            top_p=rollout.top_p if own.top_p is None else own.top_p,
            top_k=rollout.top_k if own.top_k is None else own.top_k,
            max_tokens=rollout.max_tokens if own.max_tokens is None else own.max_tokens,
            success=own.success,
        )
        return {
            name: replace(
                common,
                **{field: value for field in one.__slots__ if (value := getattr(one, field)) is not None},
            )
            for name, one in sorted((self.eval.sets or {"test": EvalSet()}).items())
        }

    @property
    def manages_engine(self) -> bool:
        """Whether the vLLM server is the daemon's to start and stop; else it is one that is there already."""
        return not self.debug_mode and self.engine.url is None

    @property
    def choices(self) -> dict[str, object]:
        """What node 0 chooses anew for all nodes at each start."""
        return {name: getattr(self, name) for name in ("rl_phase", "rollout_split", "expect_gpus")}

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal. Where the run directory is mounted is each node's own affair, so it is left out."""
        told = {name: value for name, value in self.as_json().items() if name != "log_path"}
        return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def changes_of(name: str) -> Changes:
    """Whether and when the setting with this dotted name may change."""
    return _changes().get(known_as(name), Changes.NEVER)


def fixed_because(name: str) -> str:
    """Why the setting with this dotted name never changes."""
    section = sections().get(name.partition(".")[0], Settings)
    return section.FIXED_BECAUSE


def names_that_change(settings: Settings) -> list[str]:
    """The settings that a later start of node 0 may change, by their dotted names; `settings`: whose sets of held-out tasks there are."""
    names = [name for name, kind in _changes().items() if kind in (NEXT_ITERATION, AT_ONCE)]
    one_each = [name.removeprefix(SET_NAME) for name in names if name.startswith(SET_NAME)]
    of_sets = [f"{SETS}.{own}{leaf}" for own in settings.eval.sets for leaf in one_each]
    return [*(name for name in names if not name.startswith(SET_NAME)), *of_sets]


@cache
def _changes() -> dict[str, Changes]:
    groups = sections()
    found: dict[str, Changes] = {}
    for item in fields(Settings):
        if item.name in groups:
            inside = fields(groups[item.name])  # type: ignore[arg-type]
            found |= {f"{item.name}.{one.name}": one.metadata["changes"] for one in inside}
        else:
            found[item.name] = item.metadata["changes"]
    of_a_set = fields(EvalSet)
    return found | {f"{SET_NAME}.{one.name}": one.metadata["changes"] for one in of_a_set}


def sections() -> dict[str, type[Section]]:
    """The dotted groups, in order of their definition."""
    return {item.name: type(item.default) for item in fields(Settings) if isinstance(item.default, Section)}
