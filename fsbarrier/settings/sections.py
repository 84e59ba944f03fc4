"""Every setting of a run: name, type, default, limits and description. `Settings`, at the end, contains all of them.

resolve.py checks user input by the annotations here. `python scripts/settings_doc.py` generates docs/settings.md from the descriptions.
The file is longer than others because it is one table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_type_hints

from fsbarrier.protocol import timing
from fsbarrier.settings.section import (
    EACH_SESSION,
    EACH_START,
    Changes,
    Section,
    setting,
    table,
)
from fsbarrier.settings.sources import SET_NAME, known_as
from fsbarrier.settings.value_types import (
    AboveOne,
    Betas,
    CommandLine,
    Count,
    CountOrZero,
    Fraction,
    FractionOrZero,
    Kind,
    Name,
    Names,
    Nodes,
    NotNegative,
    Numbers,
    Positive,
    Preset,
    RlPhase,
    Seconds,
    TopK,
    Trackers,
    Weights,
    Words,
    ZeroStage,
    json_or_text,
)


@dataclass(frozen=True, slots=True)
class RolloutSettings(Section):
    """Sampling trajectories from the current policy (phases 1-4)."""

    FIXED_BECAUSE = "trajectories from before and after the change would not be comparable"

    tasks: Count = setting(
        96, "Training tasks per iteration, capped at the number of tasks in the file.", EACH_SESSION
    )
    samples: Count = setting(16, "Trajectories per task, i.e. the group size.", EACH_SESSION)
    temperature: NotNegative = setting(1.0, "Sampling temperature.", EACH_SESSION)
    top_p: Fraction = setting(1.0, "Nucleus sampling: the probability mass to keep.", EACH_SESSION)
    top_k: TopK = setting(-1, "Sample from the k most likely tokens; -1: from all tokens.", EACH_SESSION)
    max_tokens: Count = setting(
        512, "Maximum number of tokens the policy may generate in one turn.", EACH_SESSION
    )
    chat_template_kwargs: Words = setting(
        (), "Extra arguments for the model's chat template, for example `enable_thinking=false`."
    )
    concurrency: Count = setting(
        64,
        "Maximum number of groups in flight on each engine replica, counted in groups of `rollout.samples` (smaller groups count for "
        "less). Other nodes cannot take over tasks that are in flight.",
        EACH_SESSION,
    )
    seed: CountOrZero = setting(0, "Seed for the order in which tasks are drawn.")
    take_over: bool = setting(
        True,
        "A node that has finished its tasks takes over tasks that the slowest node has not started.",
        EACH_SESSION,
    )
    task_timeout_s: Seconds | None = setting(
        None,
        "A task fails this many seconds after it was started; with an agent the limit applies to each episode. none: no limit, or one "
        "hour with an agent.",
        EACH_SESSION,
    )
    agent: Name | None = setting(
        None, "Your own agent for multi-turn episodes, `path/file.py:Class`; none: one answer per task."
    )
    max_error_share: FractionOrZero = setting(
        0.1,
        "The phase fails if the agent failed in more than this fraction of its trajectories.",
        EACH_SESSION,
    )
    completion_threshold: Fraction = setting(
        1.0,
        "End the training rollout `grace_s` after this fraction of the tasks is done; 1: wait for all tasks.",
        EACH_SESSION,
    )
    grace_s: NotNegative = setting(
        30.0,
        "Seconds to wait for the remaining tasks once `completion_threshold` is reached.",
        EACH_SESSION,
    )
    max_refills: CountOrZero = setting(
        0,
        "Maximum number of extra rounds. Another round of tasks is rolled out while fewer than `rollout.tasks` groups have rewards that "
        "are not all equal.",
        EACH_SESSION,
    )

    @property
    def template_arguments(self) -> dict[str, object]:
        """`chat_template_kwargs` as a dictionary. Values that parse as JSON are converted; the others stay text."""
        return {
            name: json_or_text(value)
            for name, _, value in (w.partition("=") for w in self.chat_template_kwargs)
        }


@dataclass(frozen=True, slots=True)
class EvalSet(Section):
    """One named set of held-out tasks: its file, and the settings in which it differs from `eval`.

    You choose NAME. Once you define a set, `test.jsonl` is evaluated only if you define a set for it too.
    """

    file: Name | None = setting(
        None,
        "Task file: an absolute path, or a path relative to the data path; none: NAME.jsonl or NAME.parquet in the data path.",
    )
    tasks: CountOrZero | None = setting(
        None,
        "Number of tasks, the same ones in every evaluation; 0: all; none: `eval.tasks`.",
        EACH_SESSION,
    )
    samples: Count | None = setting(None, "Trajectories per task; none: `eval.samples`.", EACH_SESSION)
    temperature: NotNegative | None = setting(
        None, "Sampling temperature; 0: greedy; none: `eval.temperature`.", EACH_SESSION
    )


@dataclass(frozen=True, slots=True)
class EvalSettings(Section):
    """Evaluation on held-out tasks (phases 5-6; the last policy is evaluated in phase 13)."""

    FIXED_BECAUSE = "the run's record names the sets and their task files"

    tasks: CountOrZero = setting(
        0, "Number of test tasks, the same ones in every evaluation; 0: all.", EACH_SESSION
    )
    samples: Count = setting(1, "Trajectories per test task.", EACH_SESSION)
    temperature: NotNegative = setting(1.0, "Sampling temperature; 0: greedy.", EACH_SESSION)
    top_p: Fraction | None = setting(None, "Nucleus sampling; none: `rollout.top_p`.", EACH_SESSION)
    top_k: TopK | None = setting(
        None,
        "Sample from the k most likely tokens; -1: from all tokens; none: `rollout.top_k`.",
        EACH_SESSION,
    )
    max_tokens: Count | None = setting(
        None, "Maximum tokens in one turn; none: `rollout.max_tokens`.", EACH_SESSION
    )
    success: float = setting(
        1.0,
        "A trajectory with at least this reward counts as solved (pass@k, majority@k).",
        EACH_SESSION,
    )
    sets: Mapping[str, EvalSet] = table(
        "Named sets of held-out tasks, each with its own file and settings (below); empty: a single set, `test.jsonl`.",
    )


@dataclass(frozen=True, slots=True)
class RewardSettings(Section):
    """How trajectories are scored."""

    FIXED_BECAUSE = "rewards from before and after the change would not be comparable"

    kind: Name = setting(
        "exact",
        "`exact` match, `numeric` match, `math` (math-verify, LaTeX), `judge` (a language model), or your own "
        "`path/file.py:function`. A comma-separated list adds several rewards up.",
    )
    weights: Numbers = setting(
        (), "One weight for each reward in `reward.kind`; may be negative. Default: 1 each."
    )
    timeout_s: Seconds = setting(
        60.0, "Timeout of one call of the reward, or of one request to its judge, in seconds.", EACH_SESSION
    )
    max_error_share: FractionOrZero = setting(
        0.1,
        "The phase fails if the reward could not be computed for more than this fraction of its trajectories.",
        EACH_SESSION,
    )


@dataclass(frozen=True, slots=True)
class JudgeSettings(Section):
    """A language model that scores answers through an OpenAI-compatible API, for `reward.kind=judge` or your own reward function."""

    FIXED_BECAUSE = "rewards from before and after the change would not be comparable"

    url: Name | None = setting(None, "Base URL of the API, for example https://host/v1.", EACH_SESSION)
    model: Name | None = setting(None, "Model name to request.")
    api_key_env: Name | None = setting(
        None, "Environment variable that contains the API key; none: send no key."
    )
    concurrency: Count = setting(16, "Maximum concurrent requests from each node.", EACH_SESSION)


@dataclass(frozen=True, slots=True)
class AlgorithmSettings(Section):
    """The training objective (phases 8 and 10)."""

    FIXED_BECAUSE = "the run would continue with a different algorithm"

    preset: Preset | None = setting(
        None,
        "A published recipe that supplies the settings you do not set yourself; `--dry-run` shows its values.",
    )
    loss: Literal["grpo", "gspo", "cispo", "sapo", "rft"] = setting(
        "grpo",
        "`grpo`: policy gradient with a clipped token ratio; `gspo`: one clipped ratio per sequence; `cispo`: the clipped ratio is a "
        "detached weight; `sapo`: a soft gate instead of clipping; `rft`: fine-tuning on successful answers.",
    )
    clip_low: Fraction = setting(0.2, "The probability ratio is clipped at 1 - clip_low.", EACH_SESSION)
    clip_high: Positive = setting(0.28, "The probability ratio is clipped at 1 + clip_high.", EACH_SESSION)
    dual_clip: AboveOne | None = setting(
        10.0, "Upper bound of the ratio where the advantage is negative; none: no bound.", EACH_SESSION
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = setting(
        "token-mean",
        "How token losses are reduced to the minibatch loss: `token-mean`: mean over all tokens; `seq-mean-token-mean`: mean over "
        "sequences of their token means; `seq-mean-token-sum`: mean over sequences of their token sums; `seq-mean-token-sum-norm`: the "
        "same, divided by `rollout.max_tokens` (Dr.GRPO).",
    )
    advantage: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = setting(
        "grpo",
        "The baseline that is subtracted from a reward: `grpo`: the group mean; `rloo`: the mean of the other samples in the group; "
        "`reinforce_plus_plus`: the batch mean; `reinforce_plus_plus_baseline`: the group mean, then the batch mean.",
    )
    normalize_std: bool = setting(
        True,
        "Divide advantages by the standard deviation of the group's rewards, or of the batch's advantages.",
    )
    drop_zero_signal: bool = setting(True, "Drop groups whose rewards are all equal.")
    truncated: Literal["keep", "mask", "shape"] = setting(
        "keep",
        "Answers cut off at the token limit: `keep`: train on them with their reward; `mask`: use their reward in the group's baseline "
        "but do not train on them; `shape`: keep them, and subtract up to 1 from the reward of every answer in the last fifth before "
        "`rollout.max_tokens` (DAPO).",
    )
    old_logprobs: Literal["auto", "trainer", "engine"] = setting(
        "auto",
        "Log-probabilities in the denominator of the ratio: `trainer`: computed by the trainer before the first step; `engine`: "
        "returned by the engine; auto: the engine's if both compute in float32 and `mismatch` is `none`.",
    )
    mismatch: Literal["none", "token_tis", "icepop", "sequence_mask"] = setting(
        "none",
        "Importance weights for the difference between trainer and engine probabilities, with w = trainer / engine. `token_tis`: each "
        "token is weighted with w, capped at `mismatch_high`; `icepop`: with w between 0.5 and `mismatch_high`, otherwise 0; "
        "`sequence_mask`: each sequence is weighted with the product of its w, or 0 above `mismatch_high`.",
    )
    mismatch_high: Positive = setting(2.0, "The upper bound of the correction.", EACH_SESSION)
    kl_coef: NotNegative = setting(
        0.0, "Weight of the KL divergence from the reference policy in the loss; 0: no reference policy."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3",
        "Estimator of the KL divergence: `k1`: the log-ratio; `k2`: half its square; `k3`: low-variance and never negative.",
    )
    entropy_coef: NotNegative = setting(0.0, "Weight of the entropy bonus in the loss.", EACH_SESSION)
    max_logprob_gap: Positive | None = setting(
        None,
        "The update fails if, on the first minibatch, the sampled tokens' log-probabilities from trainer and engine differ by more than "
        "this on average; none: a limit that depends on the precision.",
        EACH_SESSION,
    )


@dataclass(frozen=True, slots=True)
class OptimizerSettings(Section):
    """AdamW."""

    FIXED_BECAUSE = "the saved optimizer state depends on it"

    lr: Positive = setting(1e-6, "Learning rate.", EACH_SESSION)
    betas: Betas = setting((0.9, 0.95), "Decay rates of the two moment estimates.")
    weight_decay: NotNegative = setting(
        0.0, "Decoupled weight decay; not applied to norms and biases.", EACH_SESSION
    )
    warmup_steps: CountOrZero = setting(
        4, "Optimizer steps of linear warm-up, once at the start of the run.", EACH_SESSION
    )
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "Learning rate after the warm-up: constant, or falling until `decay_steps`.",
        EACH_SESSION,
    )
    decay_steps: Count | None = setting(
        None,
        "Optimizer step, counted from the start of the run, at which the learning rate reaches its minimum and stays there.",
        EACH_SESSION,
    )
    grad_clip: Positive = setting(1.0, "Maximum gradient norm.", EACH_SESSION)


@dataclass(frozen=True, slots=True)
class TrainerSettings(Section):
    """The trainer of phase 10: the built-in one, started with torchrun, or your own command."""

    FIXED_BECAUSE = "the trainer's saved state and its processes depend on it"

    epochs: Count = setting(2, "Passes over each iteration's batch.", EACH_SESSION)
    minibatch: Count = setting(256, "Trajectories per optimizer step, across all nodes.", EACH_SESSION)
    max_tokens_per_micro_batch: Count = setting(
        8192,
        "Maximum tokens in one micro-batch of one process; a longer trajectory gets a micro-batch of its own.",
        EACH_SESSION,
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Recompute each block's activations in the backward pass instead of storing them; about a third slower. none: only on "
        "accelerators.",
        EACH_SESSION,
    )
    attention: Literal["sdpa", "flash_attention_2"] = setting(
        "sdpa",
        "`sdpa`: PyTorch's attention; `flash_attention_2`: needs the package flash-attn, and micro-batches then have no padding.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Precision; auto: bfloat16 on accelerators that support it, otherwise float32."
    )
    backend: Literal["torch", "deepspeed"] = setting(
        "torch",
        "Library that shards the policy and runs the optimizer: PyTorch, or DeepSpeed (`zero_stage`).",
    )
    zero_stage: ZeroStage = setting(
        3,
        "With `trainer.backend=deepspeed`, what is sharded: 1: the optimizer state; 2: the gradients too; 3: the policy too.",
    )
    shard: Literal["auto", "none", "node", "all"] = setting(
        "auto",
        "Shard the policy, its gradients and the optimizer state: `none`: not at all; `node`: across the processes of each node; `all`: "
        "across all processes; auto: the first of these that fits into memory.",
    )
    offload: Literal["none", "optimizer", "all"] = setting(
        "none",
        "Keep in host memory instead of accelerator memory: `optimizer`: the optimizer state between steps; `all`: everything that is "
        "sharded. No effect on a CPU.",
    )
    processes_per_node: CountOrZero = setting(
        0, "Training processes per node; 0: one per accelerator, or 1 without accelerators."
    )
    keep: Literal["auto", "process", "nothing"] = setting(
        "auto",
        "What is kept between updates: `process`: the training processes, with their process group, policy and optimizer state; "
        "`nothing`: processes are started anew for each update; auto: `process` on CPUs, otherwise `nothing`. On an accelerator without "
        "room for both trainer and engine, the processes end after each update in any case.",
    )
    command: CommandLine | None = setting(
        None,
        "Your own trainer: a command line, or a list of words, with the placeholders {node_rank} {num_nodes} "
        "{master_addr} {master_port} {batch} {out} {model} {trainer_state} {spec}; none: the built-in one.",
    )


@dataclass(frozen=True, slots=True)
class LoraSettings(Section):
    """LoRA: train low-rank adapters instead of the full policy. The adapters are merged into the weights that are served and published."""

    FIXED_BECAUSE = "the checkpoints contain adapters of that shape"

    rank: CountOrZero = setting(0, "Rank of the adapters; 0: no adapters, train the full policy.")
    alpha: Positive = setting(32.0, "The adapters' output is scaled by alpha / rank.")
    targets: Names = setting(
        (),
        "Linear layers that get an adapter, for example q_proj,v_proj; empty: all except the output head.",
    )


@dataclass(frozen=True, slots=True)
class UpdateSettings(Section):
    """The rollouts that an update trains on (phase 8)."""

    FIXED_BECAUSE = "the run would switch to rollouts of another origin"

    recency: Count = setting(
        1,
        "Draw the batch from the rollouts of the last N iterations, preferring recent ones; 1: only this iteration.",
        EACH_SESSION,
    )
    trajectories: Name | None = setting(
        None,
        "With `--rl-phase update`: train on another run's rollouts. A run directory: iteration n uses that run's iteration n. A merged "
        "file: every iteration uses this file. none: this run's own rollouts.",
    )


@dataclass(frozen=True, slots=True)
class EngineSettings(Section):
    """The vLLM servers on each node."""

    FIXED_BECAUSE = "each node configures its engines when it starts"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Precision of the served weights; auto: float32 on a CPU, otherwise bfloat16."
    )
    max_model_len: Count = setting(2048, "Maximum length of prompt plus answer, in tokens.")
    tensor_parallel_size: Count = setting(1, "Accelerators per server (tensor parallelism within a node).")
    replicas: CountOrZero = setting(
        0,
        "Servers per node, each on its own accelerators (on a CPU: its own cores); 0: as many as the accelerators allow, or 1 on a CPU.",
    )
    gpu_memory_utilization: Fraction = setting(
        0.85, "Fraction of the accelerator's memory that the engine may use."
    )
    extra_args: Words = setting((), "Additional arguments for the vLLM server.")
    start_timeout_s: Seconds = setting(900.0, "Timeout for a started server to become ready, in seconds.")
    url: str | None = setting(
        None,
        "URL, as seen from each node, of an existing server that fsbarrier uses but does not start or stop; none: fsbarrier starts its "
        "own, or uses http://127.0.0.1:8000 with `--debug-mode`.",
    )
    api_key_env: str | None = setting(
        None, "Environment variable that contains the API key of the server at `engine.url`."
    )


@dataclass(frozen=True, slots=True)
class CheckpointSettings(Section):
    """Saved policies."""

    FIXED_BECAUSE = "the nodes have already stored files there"

    keep: Count = setting(
        3, "Number of recent policy versions and training batches to keep on disk.", EACH_SESSION
    )
    keep_every: CountOrZero = setting(0, "Keep every N-th policy version permanently; 0: none.", EACH_SESSION)
    trainer_every: Count = setting(
        1,
        "Save the trainer state with every N-th policy version; processes that end after an update (`trainer.keep`) save it each time. If "
        "N > 1, a node that leaves or comes back, or a restart, costs up to N - 1 updates.",
        EACH_SESSION,
    )
    weights_dir: str = setting(
        "auto",
        "Folder on each node for a local copy of new weights, from which its engines load them; none: engines read the run directory; "
        "auto: /dev/shm if the run directory is on a network mount, otherwise none.",
    )
    keep_trajectories: CountOrZero = setting(
        0,
        "Number of recent iterations whose trajectories stay on disk (at least `update.recency`); 0: all.",
        EACH_SESSION,
    )


@dataclass(frozen=True, slots=True)
class CoordinationSettings(Section):
    """Heartbeats and time-outs."""

    FIXED_BECAUSE = "all nodes must use the same failure-detection timeouts"

    beat_s: Seconds = setting(timing.BEAT_S, "Seconds between a node's heartbeats.")
    dead_s: Seconds = setting(
        timing.DEAD_S,
        "A node is declared lost after this many seconds without a new heartbeat, and suspected after six tenths of it. A node whose "
        "shared directory fails tries again for twelve times as long, then exits with code 3.",
    )
    last_call_s: Seconds | None = setting(
        None,
        "Once `min_nodes` nodes have joined, start the run when no further node has joined for this many seconds; later nodes join at the "
        "next iteration. none: wait up to half an hour for all nodes. `--num-nodes A:B` sets it to 10.",
        EACH_SESSION,
    )
    stall_timeout_s: Seconds = setting(
        1800.0, "A program counts as stalled after this many seconds without progress."
    )

    @property
    def suspect_s(self) -> float:
        """A node is suspected after this many seconds without a new heartbeat."""
        return 0.6 * self.dead_s

    @property
    def outage_s(self) -> float:
        """How long a node puts up with errors of the shared directory. By default a restarted server is back by then: GlusterFS fails
        its clients for 42 s, and an NFS server has a grace period of 90 s."""
        return 12 * self.dead_s


@dataclass(frozen=True, slots=True)
class NotifySettings(Section):
    """Notifications about the run."""

    FIXED_BECAUSE = "each node reads it when it starts"

    command: Name | None = setting(
        None,
        "Command to run when the run starts, finishes, stops or fails, after an evaluation, and when a node is lost. It gets the event as "
        "a JSON object on standard input and in $FSBARRIER_EVENT. It runs on one node, without a shell.",
    )


@dataclass(frozen=True, slots=True)
class TrackerSettings(Section):
    """Experiment trackers that receive the metrics of each iteration (docs/trackers.md)."""

    names: Trackers = setting(
        (), "Trackers to use; each needs its own package in addition to accelerate.", EACH_SESSION
    )
    project: Name = setting(
        "fsbarrier", "Project (or experiment) under which the run is listed.", EACH_SESSION
    )


@dataclass(frozen=True, slots=True)
class ToySettings(Section):
    """The program `toy`: the same phases without a model."""

    tasks: Count = setting(64, "Tasks per iteration.", EACH_SESSION)
    phase_s: NotNegative = setting(0.5, "Duration of each working phase, in seconds.", EACH_SESSION)
    speeds: Weights = setting(
        (),
        "Relative speed of each node, independent of its weight (0.5: half as fast); empty: 1 for all nodes.",
        EACH_SESSION,
    )


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """All settings of a run."""

    data_path: Name | None = setting(
        None, "Folder with train and test as .jsonl or .parquet; none: use the built-in task."
    )
    log_path: Name | None = setting(None, "The run directory, the same on all nodes.", EACH_START)
    model: Name | None = setting(
        None,
        "Hugging Face model: a folder, a folder inside the data path, or the name of a model in the local cache.",
    )
    init_from: Name | None = setting(
        None,
        "Start from a policy of another run instead of `model`: `RUN_DIRECTORY@VERSION`, or `RUN_DIRECTORY` for the version it currently "
        "serves.",
    )
    program: Name = setting("rl", "`rl`, `toy`, `ping`, or your own FILE.py.")
    rl_phase: RlPhase = setting(
        "both", "`rollout`: phases 0-6; `update`: phases 7-13; `both`: all phases.", EACH_START
    )
    rollout_split: Literal["train-only", "eval-only"] | None = setting(
        None,
        "With `rl_phase=rollout`: only the training rollout, or only the evaluation; none: both.",
        EACH_START,
    )
    eval_interval: CountOrZero = setting(
        1,
        "Evaluate when iteration % N == 1 (1: every iteration; 0: never, no test tasks needed).",
        EACH_SESSION,
    )
    num_nodes: Nodes = setting(1, "Number of nodes.", EACH_SESSION)
    rank_weights: Weights = setting(
        (1.0,), "One positive weight per node: its share of the tasks. Default: all equal.", EACH_SESSION
    )
    min_nodes: Count = setting(
        1, "The run ends with exit code 5 when fewer nodes than this are left.", EACH_SESSION
    )
    expect_gpus: Count | None = setting(
        None,
        "Refuse to start if all nodes together have fewer accelerators than this; the error names the nodes that lack them.",
        EACH_START,
    )
    on_node_failure: Literal["shrink", "wait", "abort"] = setting(
        "shrink",
        "When a node is lost: `shrink`: continue with the others; `wait`: hold the phase until it is back; `abort`: end the run.",
        EACH_SESSION,
    )
    debug_mode: bool = setting(
        False, "Do not start or stop vLLM; use the server that is already running (`engine.url`)."
    )
    iterations: Count | None = setting(
        None,
        "Stop after this iteration; none: run until stopped. Each start of node 0 may give a new number.",
        EACH_START,
    )
    shared_group: bool = setting(
        False, "Give the owner's group read and write access to the run directory (modes 0770 and 0660)."
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
    custom: Mapping[str, Any] = table(
        "Arbitrary values (`custom.name=value`) for your own program, reward or trainer. Names that begin with `custom.secret` are not "
        "displayed."
    )

    @property
    def eval_sets(self) -> dict[str, EvalSettings]:
        """How each set of held-out tasks is evaluated, by its name; `test` alone if the user defined none."""
        own, rollout = self.eval, self.rollout
        common = replace(
            own,
            top_p=rollout.top_p if own.top_p is None else own.top_p,
            top_k=rollout.top_k if own.top_k is None else own.top_k,
            max_tokens=own.max_tokens or rollout.max_tokens,
            sets={},
        )
        return {
            name: replace(
                common,
                tasks=own.tasks if one.tasks is None else one.tasks,
                samples=one.samples or own.samples,
                temperature=own.temperature if one.temperature is None else one.temperature,
            )
            for name, one in sorted((own.sets or {"test": EvalSet()}).items())
        }

    @property
    def manages_engine(self) -> bool:
        """Whether the daemon starts and stops the vLLM server; if not, it uses an existing one."""
        return not self.debug_mode and self.engine.url is None

    @property
    def choices(self) -> dict[str, object]:
        """The settings that node 0 chooses for all nodes at each start."""
        return {name: getattr(self, name) for name in ("rl_phase", "rollout_split", "expect_gpus")}

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal, without `log_path`, because nodes may mount the run directory in different places."""
        shared = {name: value for name, value in self.as_json().items() if name != "log_path"}
        return hashlib.sha256(json.dumps(shared, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@cache
def known_names() -> Mapping[str, Kind]:
    """Every setting by its dotted name. "custom" covers all names below it, and NAME any name (see `known_as`)."""
    groups = sections()
    tables: dict[str, type[Section]] = {"": Settings}
    for name, group in groups.items():
        tables |= {f"{name}.": group} | ({f"{SET_NAME}.": EvalSet} if group is EvalSettings else {})
    found: dict[str, Kind] = {}
    for prefix, group in tables.items():
        hints = get_type_hints(group, include_extras=True)
        declared = [item for item in fields(group) if prefix or item.name not in groups]  # type: ignore[arg-type]
        found |= {f"{prefix}{item.name}": Kind.of(hints[item.name], item) for item in declared}
    return found


def changes_of(name: str) -> Changes:
    """Whether, and when, the setting with this dotted name may change."""
    kind = known_names().get(known_as(name))
    return kind.changes if kind is not None else Changes.NEVER


def fixed_because(name: str) -> str:
    """Why the setting with this dotted name cannot change."""
    return sections().get(name.partition(".")[0], Settings).FIXED_BECAUSE


def sections() -> dict[str, type[Section]]:
    """The groups of settings by name, in order of definition."""
    return {item.name: type(item.default) for item in fields(Settings) if isinstance(item.default, Section)}
