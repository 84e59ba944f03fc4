"""Every setting of a run: name, type, default, limits and description. `Settings`, at the end, contains all of them.

resolve.py checks user input by the annotations here. `python scripts/settings_doc.py` generates docs/settings.md, where the comment above
a setting is its description. The file is longer than others because it is one table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_type_hints

from fsbarrier.protocol import membership
from fsbarrier.protocol.codec import ready
from fsbarrier.settings.losses import LOSSES, Aggregation, KlEstimator, LossName, Mismatch
from fsbarrier.settings.placement import ROLES
from fsbarrier.settings.presets import Preset
from fsbarrier.settings.section import Changes, EachSession, EachStart, Section
from fsbarrier.settings.sources import ENGINE_NAME, ENVIRONMENT_NAME, SET_NAME, TRAIN_SET_NAME, known_as
from fsbarrier.settings.value_types import (
    SWITCHES,
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
    OneOrZero,
    Positive,
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

    #: Training tasks per iteration, capped at the number of tasks in the file.
    tasks: EachSession[Count] = 96
    #: Trajectories per task, i.e. the group size.
    samples: EachSession[Count] = 16
    #: Sampling temperature.
    temperature: EachSession[NotNegative] = 1.0
    #: Maximum number of tokens the policy may generate in one turn.
    max_tokens: EachSession[Count] = 512
    #: Texts that end an answer, such as `</answer>`, here and in evaluations. The tokens of such a text are trained on, but the
    #: scored answer ends before it.
    stop: Words = ()
    #: Extra arguments for the model's chat template, for example `enable_thinking=false`.
    chat_template_kwargs: Words = ()
    #: Whether the model thinks before it answers: `on` and `off` set the chat template's argument for it (`enable_thinking`, `thinking`);
    #: auto: as the template does by itself.
    thinking: Literal["auto", "on", "off"] = "auto"
    #: Maximum number of tokens of the thoughts in a turn, out of `rollout.max_tokens`: longer ones are closed with tokens that are not
    #: trained on, and the answer goes on; none: thoughts may take all of them.
    max_thinking_tokens: EachSession[Count | None] = None
    #: The format of thoughts, by the name of vLLM's parser for it (`vllm serve --reasoning-parser`); none: the format of the model's chat
    #: template, else `<think>`.
    reasoning_parser: Name | None = None
    #: vLLM's parser of tool calls in an agent's turns (`vllm serve --tool-call-parser`); none: the parser for the format of the model's
    #: chat template, else `hermes`.
    tool_parser: Name | None = None
    #: What appends an agent's turns to the sampled tokens, and reads all answers: `template`: the model's chat template, and vLLM's
    #: parsers; auto: what is recognised in the model's folder, which today is always `template`; or the name of a renderer of the Python
    #: package `renderers`, for example `qwen3` (docs/agents.md).
    renderer: Name = "auto"
    #: Maximum number of groups in flight on each engine replica, counted in groups of `rollout.samples` (smaller groups count for less).
    #: Other nodes cannot take over tasks that are in flight.
    concurrency: EachSession[Count] = 64
    #: Seed for the order in which tasks are drawn.
    seed: CountOrZero = 0
    #: Give each answer a seed derived from `rollout.seed`, so that a second run samples the same answers if its engine computes the same
    #: (docs/rollouts.md). Each task is then a separate request, which is slower.
    reproducible: EachSession[bool] = False
    #: A node that has finished its tasks takes over tasks that the slowest node has not started.
    take_over: EachSession[bool] = True
    #: A task fails this many seconds after it was started; with an agent the limit applies to each episode. none: no limit, or one hour
    #: with an agent.
    task_timeout_s: EachSession[Seconds | None] = None
    #: Your own agent for multi-turn episodes, `path/file.py:Class`; none: one answer per task.
    agent: Name | None = None
    #: The phase fails if the agent, its environment, or the reward failed for more than this fraction of its trajectories.
    max_error_share: EachSession[FractionOrZero] = 0.1
    #: End the training rollout `grace_s` after this fraction of the tasks is done; 1: wait for all tasks.
    completion_threshold: EachSession[Fraction] = 1.0
    #: Seconds to wait for the remaining tasks once `completion_threshold` is reached.
    grace_s: EachSession[NotNegative] = 30.0
    #: 1: while the update trains, the other nodes already roll out the next iteration's tasks, with the policy that they serve. Needs
    #: `placement.rollout` and `placement.update` without a common node.
    ahead: EachSession[OneOrZero] = 0
    #: Engines that roll out ahead load new weights as soon as the update has made them: running answers keep their tokens and continue
    #: with the new weights. Needs `rollout.ahead=1`.
    in_flight: EachSession[bool] = False
    #: Maximum number of extra rounds. Another round of tasks is rolled out while fewer than `rollout.tasks` groups have rewards that are
    #: not all equal.
    max_refills: EachSession[CountOrZero] = 0

    @property
    def named_renderer(self) -> str | None:
        """The renderer of the package `renderers`; None: the chat template and vLLM's parsers."""
        return None if self.renderer in ("auto", "template") else self.renderer

    @property
    def template_arguments(self) -> dict[str, object]:
        """`thinking` and `chat_template_kwargs` as a dictionary. Values that parse as JSON are converted; the others stay text."""
        # Templates call it one or the other; an argument that a template does not read changes nothing.
        thinks = {} if self.thinking == "auto" else dict.fromkeys(SWITCHES, self.thinking == "on")
        return thinks | {
            name: json_or_text(value)
            for name, _, value in (w.partition("=") for w in self.chat_template_kwargs)
        }


@dataclass(frozen=True, slots=True)
class TrainSet(Section):
    """One named set of training tasks.

    You choose NAME. Once you define a set, `train.jsonl` is used only if you define a set for it too.
    """

    #: Task file: an absolute path, or a path relative to the data path; none: NAME.jsonl or NAME.parquet in the data path.
    file: Name | None = None
    #: Only the tasks of the file whose FIELD is a number from A to B (`FIELD=A:B`, either may be missing) or has this value
    #: (`FIELD=VALUE`); none: all.
    where: Name | None = None
    #: The set's share of the tasks of an iteration, compared with the weights of the other sets.
    weight: EachSession[Positive] = 1.0


@dataclass(frozen=True, slots=True)
class TrainSettings(Section):
    """Which training tasks an iteration draws (phase 1)."""

    #: Named sets of training tasks, each with its own file and weight (below); empty: a single set, `train.jsonl`.
    sets: Mapping[str, TrainSet] = field(default_factory=dict)
    #: The weight of a task in the draw, by the mean reward of its last group: `REWARD:WEIGHT` for at least this reward, the lowest first.
    #: A task below the lowest reward, or without a group so far, has the weight 1. Empty: each task once before any is drawn again.
    reward_weights: EachSession[Names] = ()

    def weigher(self) -> Callable[[float | None], float]:
        """A function that returns a task's weight in the draw for the mean reward of its last group; None: no group so far."""
        steps = [tuple(map(float, step.split(":"))) for step in self.reward_weights]

        def weight_after(reward: float | None) -> float:
            return [1.0, *(weight for least, weight in steps if reward is not None and reward >= least)][-1]

        return weight_after


@dataclass(frozen=True, slots=True)
class EnvironmentSettings(Section):
    """The environment of an agent's episodes: servers that run on each node for as long as a rollout lasts.

    Further ones are `environments.NAME`, with the same settings; a task's field `environment` names the one that its episodes get.
    """

    #: Command line of one server, with an interpreter of its own; `{port}` is the port of 127.0.0.1 on which it must listen; none: no
    #: environment. Episodes get its address as `client.environment_url`.
    command: CommandLine | None = None
    #: Path of a page, for example /health, that a server answers successfully once it is ready; none: it is ready once it listens.
    health: EachSession[Name | None] = None
    #: A server has failed if it is not ready after this many seconds.
    start_timeout_s: EachSession[Seconds] = 300.0
    #: Maximum number of episodes at a time, on all nodes together; others wait. none: no limit.
    sessions: EachSession[Count | None] = None
    #: Maximum number of episodes at a time on one server; others wait. none: no limit.
    sessions_per_server: EachSession[Count | None] = None
    #: Servers on each node.
    replicas: EachSession[Count] = 1
    #: How often each node may restart servers that ended, in one rollout; after that the phase fails.
    restarts: EachSession[CountOrZero] = 3


@dataclass(frozen=True, slots=True)
class EvalSet(Section):
    """One named set of held-out tasks: its file, and the settings in which it differs from `eval`.

    You choose NAME. Once you define a set, `test.jsonl` is evaluated only if you define a set for it too.
    """

    #: Task file: an absolute path, or a path relative to the data path; none: NAME.jsonl or NAME.parquet in the data path.
    file: Name | None = None
    #: Number of tasks, the same ones in every evaluation; 0: all; none: `eval.tasks`.
    tasks: EachSession[CountOrZero | None] = None
    #: Trajectories per task; none: `eval.samples`.
    samples: EachSession[Count | None] = None
    #: Sampling temperature; 0: greedy; none: `eval.temperature`.
    temperature: EachSession[NotNegative | None] = None


@dataclass(frozen=True, slots=True)
class EvalSettings(Section):
    """Evaluation on held-out tasks (phases 5-6; the last policy is evaluated in phase 13)."""

    #: Number of test tasks, the same ones in every evaluation; 0: all.
    tasks: EachSession[CountOrZero] = 0
    #: Trajectories per test task.
    samples: EachSession[Count] = 1
    #: Sampling temperature; 0: greedy.
    temperature: EachSession[NotNegative] = 1.0
    #: Nucleus sampling: the probability mass to keep. (Training rollouts sample from the full distribution.)
    top_p: EachSession[Fraction] = 1.0
    #: Sample from the k most likely tokens; -1: from all tokens.
    top_k: EachSession[TopK] = -1
    #: Maximum tokens in one turn; none: `rollout.max_tokens`.
    max_tokens: EachSession[Count | None] = None
    #: A trajectory with at least this reward counts as solved (pass@k, majority@k).
    success: EachSession[float] = 1.0
    #: Named sets of held-out tasks, each with its own file and settings (below); empty: a single set, `test.jsonl`.
    sets: Mapping[str, EvalSet] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardSettings(Section):
    """How trajectories are scored."""

    #: `exact` match, `numeric` match, `math` (math-verify, LaTeX), `code` (the task's tests), `verl` (chosen by each task's
    #: `data_source`), `judge` (a language model), `engines.NAME` (a reward model with a classifier head), or your own
    #: `path/file.py:function`. A comma-separated list adds up several rewards.
    kind: Name = "exact"
    #: One weight for each reward in `reward.kind`; may be negative. Default: 1 each.
    weights: Numbers = ()
    #: Timeout of one call of the reward, or of one request to its judge, in seconds.
    timeout_s: EachSession[Seconds] = 60.0


@dataclass(frozen=True, slots=True)
class CodeSettings(Section):
    """How the programs of answers are tested (`reward.kind=code`). All tests of an answer together may take `reward.timeout_s`."""

    #: Time that a program may compute in one test, in seconds; it may wait three times as long.
    timeout_s: EachSession[Seconds] = 6.0
    #: Memory that it may use, in MiB.
    memory_mb: EachSession[Count] = 1024
    #: The reward is the share of passed tests; false: 1 if all pass, else 0.
    partial: EachSession[bool] = False


@dataclass(frozen=True, slots=True)
class JudgeSettings(Section):
    """A language model that scores answers through an OpenAI-compatible API, for `reward.kind=judge` or your own reward function: one
    of `engines`, or one elsewhere."""

    #: One of this run's engines, `engines.NAME`, or the name of a model at `judge.url`.
    model: Name | None = None
    #: Base URL of the API, for example https://host/v1.
    url: EachSession[Name | None] = None
    #: Environment variable that contains the API key; none: send no key.
    api_key_env: Name | None = None
    #: Which of the images that the policy saw `reward.kind=judge` sends along: `none`, the `last` one, or `all`.
    images: EachSession[Literal["none", "last", "all"]] = "none"


@dataclass(frozen=True, slots=True)
class AlgorithmSettings(Section):
    """The training objective (phases 8 and 10)."""

    #: A published recipe that supplies the settings you do not set yourself; `--dry-run` shows its values.
    preset: Preset | None = None
    #: `grpo`: policy gradient with a clipped token ratio; `gspo`: one clipped ratio per sequence; `cispo`: the clipped ratio is a
    #: detached weight; `sapo`: a soft gate instead of clipping; `rft`: fine-tuning on successful answers; `distil`: as `grpo`,
    #: with the advantages of a teacher (`engines.teacher`); or your own `path/file.py:function`.
    loss: Name = "grpo"
    #: The probability ratio is clipped at 1 - clip_low.
    clip_low: EachSession[Fraction] = 0.2
    #: The probability ratio is clipped at 1 + clip_high.
    clip_high: EachSession[Positive] = 0.28
    #: Upper bound of the ratio where the advantage is negative; none: no bound.
    dual_clip: EachSession[AboveOne | None] = 10.0
    #: How token losses are reduced to the minibatch loss: `token-mean`: mean over all tokens; `seq-mean-token-mean`: mean over sequences
    #: of their token means; `seq-mean-token-sum`: mean over sequences of their token sums; `seq-mean-token-sum-norm`: the same, divided
    #: by `rollout.max_tokens` (Dr.GRPO).
    aggregation: Aggregation = "token-mean"
    #: The baseline that is subtracted from a reward: `grpo`: the group mean; `rloo`: the mean of the other samples in the group;
    #: `reinforce_plus_plus`: the batch mean; `reinforce_plus_plus_baseline`: the group mean, then the batch mean; `gae`: the values of a
    #: critic, token by token (PPO).
    advantage: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"] = "grpo"
    #: With `advantage=gae`: the discount of a later token's reward.
    gamma: EachSession[Fraction] = 1.0
    #: With `advantage=gae`: the λ of the advantage estimate: 1: the return minus the value; 0: the one-step TD error.
    lam: EachSession[FractionOrZero] = 1.0
    #: Divide advantages by the standard deviation of the group's rewards, or of the batch's advantages.
    normalize_std: bool = True
    #: Drop groups whose rewards are all equal. A critic learns from them too, so not with `advantage=gae`.
    drop_zero_signal: bool = True
    #: Answers cut off at the token limit: `keep`: train on them with their reward; `mask`: use their reward in the group's baseline but
    #: do not train on them; `shape`: keep them, and subtract 1 from their reward, and up to 1 from the reward of every answer in the last
    #: fifth before `rollout.max_tokens` (DAPO).
    truncated: Literal["keep", "mask", "shape"] = "keep"
    #: Log-probabilities in the denominator of the ratio: `trainer`: computed by the trainer before the first step; `engine`: returned by
    #: the engine; auto: the engine's if both compute in float32 and `mismatch` is `none`.
    old_logprobs: Literal["auto", "trainer", "engine"] = "auto"
    #: Importance weights for the difference between trainer and engine probabilities, with w = trainer / engine. `token_tis`: each token
    #: is weighted with w, capped at `mismatch_high`; `icepop`: with w between 0.5 and `mismatch_high`, otherwise 0; `sequence_mask`:
    #: each sequence is weighted with the product of its w, or 0 above `mismatch_high`.
    mismatch: Mismatch = "none"
    #: The upper bound of the correction.
    mismatch_high: EachSession[Positive] = 2.0
    #: Share of the self-certainty in the reward that advantages are computed from (Intuitor): 1: only self-certainty; 0: none. The trainer
    #: computes it from all logits; rollouts and evaluations report the reward without it.
    self_certainty: FractionOrZero = 0.0
    #: Weight of the KL divergence from the reference policy in the loss; 0: none.
    kl_coef: NotNegative = 0.0
    #: Weight of the KL divergence from the reference policy in the reward: each token's log-ratio is subtracted from the returns of this
    #: token and of those before it; 0: none.
    kl_in_reward: NotNegative = 0.0
    #: Adapt `kl_in_reward` so that the mean KL divergence of a token from the reference policy approaches this; none: it is fixed.
    kl_target: EachSession[Positive | None] = None
    #: How `kl_coef` estimates the KL divergence: `k2`: half the squared log-ratio; `k3`: low-variance and never negative. `k1`, the
    #: log-ratio, is refused, because its gradient is zero on average.
    kl_estimator: KlEstimator = "k3"
    #: With `algorithm.loss=distil`: the weight of the reward's advantages beside the teacher's; 0: the teacher alone.
    distil_reward: NotNegative = 0.0
    #: Weight of the entropy bonus in the loss.
    entropy_coef: EachSession[NotNegative] = 0.0
    #: The update fails if, on the first minibatch, the sampled tokens' log-probabilities from trainer and engine differ by more than
    #: this on average; none: a limit that depends on the precision.
    max_logprob_gap: EachSession[Positive | None] = None

    @property
    def built_in_loss(self) -> LossName | None:
        """`loss`, unless it is the user's own."""
        return next((name for name in LOSSES if name == self.loss), None)

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage == "gae"


@dataclass(frozen=True, slots=True)
class CriticSettings(Section):
    """The critic of `algorithm.advantage=gae`. Its optimizer has the settings `optimizer.*`, except for the learning rate."""

    #: The model that it is initialised from, named like `model`; it need not have a critic's output head. none: the policy's first model.
    model: Name | None = None
    #: Learning rate.
    lr: EachSession[Positive] = 1e-5
    #: Updates at the start of the run that train the critic alone.
    warmup: EachSession[CountOrZero] = 0
    #: PPO's clipping range for values, around each value before the update; none: no clipping.
    clip: EachSession[Positive | None] = 0.5


@dataclass(frozen=True, slots=True)
class OptimizerSettings(Section):
    """AdamW."""

    #: Learning rate.
    lr: EachSession[Positive] = 1e-6
    #: Decay rates of the two moment estimates.
    betas: Betas = (0.9, 0.95)
    #: Decoupled weight decay; not applied to norms and biases.
    weight_decay: EachSession[NotNegative] = 0.0
    #: Optimizer steps of linear warm-up, once at the start of the run.
    warmup_steps: EachSession[CountOrZero] = 4
    #: Learning rate after the warm-up: constant, or falling until `decay_steps`.
    schedule: EachSession[Literal["constant", "linear", "cosine"]] = "constant"
    #: Optimizer step, counted from the start of the run, at which the learning rate reaches its minimum and stays there.
    decay_steps: EachSession[Count | None] = None
    #: Maximum gradient norm.
    grad_clip: EachSession[Positive] = 1.0


@dataclass(frozen=True, slots=True)
class TrainerSettings(Section):
    """The trainer of phase 10: the built-in one, started with torchrun, or your own command."""

    #: Passes over each iteration's batch.
    epochs: EachSession[Count] = 2
    #: Trajectories per optimizer step, across all nodes.
    minibatch: EachSession[Count] = 256
    #: Maximum tokens in one micro-batch of one process; a longer trajectory gets a micro-batch of its own.
    max_tokens_per_micro_batch: EachSession[Count] = 8192
    #: Recompute each block's activations in the backward pass instead of storing them; about a third slower. none: only on accelerators.
    gradient_checkpointing: EachSession[bool | None] = None
    #: `sdpa`: PyTorch's attention, or transformers' own if PyTorch's does not support the model; `flash_attention_2`: needs the package
    #: flash-attn, and micro-batches then have no padding.
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    #: Precision; auto: bfloat16 on accelerators that support it, otherwise float32.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: Library that shards the policy and runs the optimizer: PyTorch, or DeepSpeed (`zero_stage`).
    backend: Literal["torch", "deepspeed"] = "torch"
    #: With `trainer.backend=deepspeed`, what is sharded: 1: the optimizer state; 2: the gradients too; 3: the policy too.
    zero_stage: ZeroStage = 3
    #: Shard the policy, its gradients and the optimizer state: `none`: not at all; `node`: across the processes of each node; `all`:
    #: across all processes; auto: the first of these that fits into memory.
    shard: Literal["auto", "none", "node", "all"] = "auto"
    #: The part of a vision model that is not trained: `vision`: everything except the language model; `none`: everything is trained.
    freeze: Literal["vision", "none"] = "vision"
    #: Keep in host memory instead of accelerator memory: `optimizer`: the optimizer state between steps; `all`: everything that is
    #: sharded. No effect on a CPU.
    offload: Literal["none", "optimizer", "all"] = "none"
    #: Training processes per node; 0: one per accelerator, or 1 without accelerators.
    processes_per_node: CountOrZero = 0
    #: What is kept between updates: `process`: the training processes, with their process group, policy and optimizer state; `nothing`:
    #: processes are started anew for each update; auto: `process` on CPUs, otherwise `nothing`. On an accelerator without room for both
    #: trainer and engine, the processes end after each update in any case.
    keep: Literal["auto", "process", "nothing"] = "auto"
    #: Run PyTorch's profiler in the update of this iteration; on an accelerator also record its memory. The files are beside the update's
    #: log (docs/training.md). none: no iteration.
    profile: EachSession[Count | None] = None
    #: The training process that is profiled; they are numbered over all nodes.
    profile_rank: EachSession[CountOrZero] = 0
    #: If one node trains, give the built-in trainer's processes a network of their own, which other users of the host do not reach. false:
    #: for a loss of your own that needs the network, or if you trust these users.
    private_network: bool = True
    #: Your own trainer: a command line, or a list of words, with the placeholders {node_rank} {num_nodes} {master_addr} {master_port}
    #: {batch} {out} {model} {trainer_state} {spec}; none: the built-in one.
    command: CommandLine | None = None


@dataclass(frozen=True, slots=True)
class LoraSettings(Section):
    """LoRA: train low-rank adapters instead of the full policy. They are published alone; each node merges them into what it serves."""

    #: Rank of the adapters; 0: no adapters, train the full policy.
    rank: CountOrZero = 0
    #: The adapters' output is scaled by alpha / rank.
    alpha: Positive = 32.0
    #: Linear layers that get an adapter, for example q_proj,v_proj; empty: all except the output head.
    targets: Names = ()
    #: What engines serve: `merged`: each version's weights with its adapters merged; `adapter`: the first model, with the adapters of each
    #: version beside it. Then nodes merge and copy nothing, but engines sample more slowly, on a CPU five to eight times.
    serve: Literal["merged", "adapter"] = "merged"


@dataclass(frozen=True, slots=True)
class UpdateSettings(Section):
    """The rollouts that an update trains on (phase 8)."""

    #: Draw the batch from the rollouts of the last N iterations, preferring recent ones; 1: only this iteration.
    recency: EachSession[Count] = 1


@dataclass(frozen=True, slots=True)
class PlacementSettings(Section):
    """Which accelerators have which role: `all`; accelerators, numbered over all nodes in rank order, such as `0-19`; or whole nodes, such
    as `node:0-1`. Ranges are inclusive."""

    #: Where the engines sample (phases 2, 6 and 13).
    rollout: EachSession[Name] = "all"
    #: Where the update trains (phase 10).
    update: EachSession[Name] = "all"


@dataclass(frozen=True, slots=True)
class ServerSettings(Section):
    """Settings that the servers of the policy and of other models have in common."""

    #: Precision of the served weights; auto: float32 on a CPU, otherwise bfloat16.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Maximum length of prompt plus answer, in tokens.
    max_model_len: Count = 2048
    #: Accelerators per server (tensor parallelism).
    tensor_parallel_size: Count = 1
    #: Servers per node, each on its own accelerators (on a CPU: its own cores); 0: as many as the accelerators allow, or 1 on a CPU.
    replicas: CountOrZero = 0
    #: Fraction of the accelerator's memory that the engine may use.
    gpu_memory_utilization: Fraction = 0.85
    #: Additional arguments for the vLLM server.
    extra_args: Words = ()
    #: Give the processes of a server on one host a network of their own, which other users of the host do not reach. false: for
    #: `extra_args` that need the network, or if you trust these users.
    private_network: bool = True
    #: Timeout for a started server to become ready, in seconds.
    start_timeout_s: Seconds = 900.0

    @property
    def over(self) -> int:
        """How many nodes share a server."""
        return 1

    @property
    def accelerators(self) -> int:
        """The number of accelerators that a server uses on each of its nodes."""
        return self.tensor_parallel_size // self.over


@dataclass(frozen=True, slots=True)
class EngineSettings(ServerSettings):
    """The vLLM servers on each node that serve the policy."""

    #: Number of nodes that one server spans, with `engine.tensor_parallel_size` accelerators on all of them together: consecutive nodes of
    #: `placement.rollout`, of which the first rolls out.
    nodes: Count = 1
    #: URL, as seen from each node, of an existing server that fsbarrier uses but does not start or stop; none: fsbarrier starts its own,
    #: or uses http://127.0.0.1:8000 with `--debug-mode`.
    url: str | None = None
    #: Environment variable that contains the API key of the server at `engine.url`.
    api_key_env: str | None = None

    @property
    def over(self) -> int:
        return self.nodes


@dataclass(frozen=True, slots=True)
class FrozenEngineSettings(ServerSettings):
    """A model beside the policy that is served and never trained: a judge, a reward model, a teacher. You choose NAME. Its servers are
    started with the first rollout."""

    #: Hugging Face model: a folder, a folder inside the data path, or the name of a model in the local cache.
    model: Name | None = None
    #: Accelerators or nodes of its servers, as in `placement`; may be written `placement.NAME`. none: as `placement.rollout`.
    placement: Name | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSettings(Section):
    """Saved policies."""

    #: Number of recent policy versions and training batches to keep on disk (of batches at least as many as may be trained again).
    keep: EachSession[Count] = 3
    #: Keep every N-th policy version permanently; 0: none.
    keep_every: EachSession[CountOrZero] = 0
    #: Publish every N-th policy version whole, and the others as what has changed since the last whole one. Only with copies of weights on
    #: each node (`weights_dir`), and weights in bfloat16. Adapters (`lora.rank`) are published alone until a session ends.
    whole_every: EachSession[Count] = 10
    #: Save the trainer state with every N-th policy version; none: with every whole one (`whole_every`), and always with adapters. In
    #: between the trainer's processes hold it, or if they end (`trainer.keep`), their nodes, or if these have no room, it is saved all the
    #: same. After a node leaves or comes back, or a restart, up to N - 1 updates are trained again from their batches; none if N is 1.
    trainer_every: EachSession[Count | None] = None
    #: Folder on each node for a local copy of new weights, from which its engines load them; none: engines read the run directory; auto:
    #: /dev/shm if the run directory is on a network mount, otherwise none.
    weights_dir: str = "auto"
    #: Number of recent iterations whose trajectories stay on disk (at least `update.recency`); 0: all.
    keep_trajectories: EachSession[CountOrZero] = 0


@dataclass(frozen=True, slots=True)
class CoordinationSettings(Section):
    """Heartbeats and time-outs."""

    #: Seconds between a node's heartbeats.
    beat_s: Seconds = membership.BEAT_S
    #: A node is declared lost after this many seconds without a new heartbeat, and suspected after six tenths of it. A node whose shared
    #: directory fails tries again for twelve times as long, then exits with code 3.
    dead_s: Seconds = membership.DEAD_S
    #: Once `min_nodes` nodes have joined, start the run when no further node has joined for this many seconds; later nodes join at the
    #: next iteration. none: wait up to half an hour for all nodes. `--num-nodes A:B` sets it to 10.
    last_call_s: EachSession[Seconds | None] = None
    #: A program counts as stalled after this many seconds without progress.
    stall_timeout_s: Seconds = 1800.0

    @property
    def suspect_s(self) -> float:
        """A node is suspected after this many seconds without a new heartbeat."""
        return 0.6 * self.dead_s

    @property
    def outage_s(self) -> float:
        """How long a node retries while the shared directory fails. The default outlasts the restart of a server: GlusterFS fails its
        clients for 42 s, and an NFS server has a grace period of 90 s."""
        return 12 * self.dead_s


@dataclass(frozen=True, slots=True)
class NotifySettings(Section):
    """Notifications about the run."""

    #: Command to run when the run starts, finishes, stops or fails, after an evaluation, and when a node is lost. It gets the event as a
    #: JSON object on standard input and in $FSBARRIER_EVENT. It runs on one node, without a shell.
    command: Name | None = None


@dataclass(frozen=True, slots=True)
class TrackerSettings(Section):
    """Experiment trackers that receive the metrics of each iteration (docs/trackers.md)."""

    #: Trackers to use; each needs its own package in addition to accelerate.
    names: EachSession[Trackers] = ()
    #: Project (or experiment) under which the run is listed.
    project: EachSession[Name] = "fsbarrier"
    #: The name under which trackers show the run; none: the run's id.
    run_name: Name | None = None
    #: Also send sample answers of each iteration as a table: the best and the worst, with their prompts, as in the report.
    samples: EachSession[bool] = False


@dataclass(frozen=True, slots=True)
class FineTuningSettings(Section):
    """The program `sft`: supervised fine-tuning (docs/fine_tuning.md)."""

    #: Make each answer of a conversation a separate example, which ends with it; for chat templates that leave out earlier thoughts.
    split_turns: bool = False


@dataclass(frozen=True, slots=True)
class ToySettings(Section):
    """The program `toy`: the same phases without a model."""

    #: Tasks per iteration.
    tasks: EachSession[Count] = 64
    #: Duration of each working phase, in seconds.
    phase_s: EachSession[NotNegative] = 0.5


@ready
@dataclass(frozen=True, slots=True)
class Settings(Section):
    """All settings of a run."""

    #: Folder with train and test as .jsonl or .parquet, or `hf:ORG/NAME`, a data set on the Hugging Face Hub that is in the local
    #: cache or downloaded; none: use the built-in task.
    data_path: Name | None = None
    #: The run directory, the same on all nodes.
    log_path: EachStart[Name | None] = None
    #: Hugging Face model: a folder, a folder inside the data path, or the name of a model in the local cache.
    model: Name | None = None
    #: Fetch a model `ORG/NAME`, or tasks `hf:ORG/NAME`, that are not in the local Hugging Face cache from the hub.
    download: EachStart[bool] = False
    #: Start from a policy of another run instead of `model`: `RUN_DIRECTORY@VERSION`, or `RUN_DIRECTORY` for the version it currently
    #: serves.
    init_from: Name | None = None
    #: `rl`, `sft`, `toy`, `ping`, or your own FILE.py.
    program: Name = "rl"
    #: `rollout`: phases 0-6; `update`: phases 7-13; `both`: all phases.
    rl_phase: EachStart[RlPhase] = "both"
    #: With `rl_phase=rollout`: only the training rollout, or only the evaluation; none: both.
    rollout_split: EachStart[Literal["train-only", "eval-only"] | None] = None
    #: Evaluate when iteration % N == 1 (1: every iteration; 0: never, no test tasks needed).
    eval_interval: EachSession[CountOrZero] = 1
    #: Number of nodes.
    num_nodes: EachSession[Nodes] = 1
    #: One positive weight per node: its share of the tasks. Default: all equal.
    rank_weights: EachSession[Weights] = (1.0,)
    #: The run ends with exit code 5 when fewer nodes than this are left.
    min_nodes: EachSession[Count] = 1
    #: Refuse to start if all nodes together have fewer accelerators than this; the error names the nodes that lack them.
    expect_gpus: EachStart[Count | None] = None
    #: Start although `placement` leaves accelerators or nodes without a role.
    allow_idle: EachSession[bool] = False
    #: When a node is lost: `shrink`: continue with the others; `wait`: hold the phase until it is back; `abort`: end the run.
    on_node_failure: EachSession[Literal["shrink", "wait", "abort"]] = "shrink"
    #: Do not start or stop vLLM; use the server that is already running (`engine.url`).
    debug_mode: bool = False
    #: Stop after this iteration; none: run until stopped. Each start of node 0 may give a new number.
    iterations: EachStart[Count | None] = None
    #: Stop after this many passes over the training tasks, instead of naming the last iteration. A pass has as many iterations as
    #: `rollout.tasks` fits into the number of tasks.
    epochs: EachStart[Count | None] = None
    #: Give the owner's group read and write access to the run directory (modes 0770 and 0660).
    shared_group: bool = False
    #: Trust a mount that sets all modes itself (such as Azure Files: 0777), because nobody else can write to its export.
    trust_mount: EachStart[bool] = False
    rollout: RolloutSettings = RolloutSettings()
    train: TrainSettings = TrainSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    eval: EvalSettings = EvalSettings()
    reward: RewardSettings = RewardSettings()
    code: CodeSettings = CodeSettings()
    judge: JudgeSettings = JudgeSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: TrainerSettings = TrainerSettings()
    lora: LoraSettings = LoraSettings()
    update: UpdateSettings = UpdateSettings()
    engine: EngineSettings = EngineSettings()
    #: Models beside the policy, by names that you choose, each with its own settings (below).
    engines: Mapping[str, FrozenEngineSettings] = field(default_factory=dict)
    #: Further environments, by names that you choose, each with its own settings (below). A task's field `environment` names the one that
    #: its episodes get.
    environments: Mapping[str, EnvironmentSettings] = field(default_factory=dict)
    placement: PlacementSettings = PlacementSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    coordination: CoordinationSettings = CoordinationSettings()
    notify: NotifySettings = NotifySettings()
    tracker: TrackerSettings = TrackerSettings()
    sft: FineTuningSettings = FineTuningSettings()
    toy: ToySettings = ToySettings()
    #: Arbitrary values (`custom.name=value`) for your own program, reward or trainer. Names that begin with `custom.secret` are not
    #: displayed.
    custom: Mapping[str, Any] = field(default_factory=dict)

    @property
    def eval_sets(self) -> dict[str, EvalSettings]:
        """How each set of held-out tasks is evaluated, by its name; `test` alone if the user defined none."""
        own = self.eval
        common = replace(own, max_tokens=own.max_tokens or self.rollout.max_tokens, sets={})
        return {
            name: replace(
                common,
                tasks=own.tasks if eval_set.tasks is None else eval_set.tasks,
                samples=eval_set.samples or own.samples,
                temperature=own.temperature if eval_set.temperature is None else eval_set.temperature,
            )
            for name, eval_set in sorted((own.sets or {"test": EvalSet()}).items())
        }

    @property
    def placed(self) -> dict[str, str]:
        """All placements by the names of their settings."""
        own = {f"placement.{name}": engine.placement for name, engine in sorted(self.engines.items())}
        roles = {f"placement.{role}": getattr(self.placement, role) for role in ROLES}
        return roles | {name: text for name, text in own.items() if text is not None}

    @property
    def all_environments(self) -> dict[str, EnvironmentSettings]:
        """The environments by name; "" is the one of `environment.*`."""
        default = {"": self.environment} if self.environment.command is not None else {}
        return {**default, **self.environments}

    @staticmethod
    def environment_key(name: str, setting: str) -> str:
        """The dotted name of a setting of one of `all_environments`."""
        return f"environments.{name}.{setting}" if name else f"environment.{setting}"

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


#: tables whose keys the user chooses, by the group after which docs/settings.md describes them
NAMED: Mapping[type[Section], dict[str, type[Section]]] = {
    TrainSettings: {f"{TRAIN_SET_NAME}.": TrainSet},
    EvalSettings: {f"{SET_NAME}.": EvalSet},
    EngineSettings: {f"{ENGINE_NAME}.": FrozenEngineSettings},
    EnvironmentSettings: {f"{ENVIRONMENT_NAME}.": EnvironmentSettings},
}


@cache
def known_names() -> Mapping[str, Kind]:
    """Every setting by its dotted name. "custom" covers all names below it, and NAME any name (see `known_as`)."""
    groups = sections()
    tables: dict[str, type[Section]] = {"": Settings}
    for name, group in groups.items():
        tables |= {f"{name}.": group} | NAMED.get(group, {})
    kinds: dict[str, Kind] = {}
    for prefix, group in tables.items():
        hints = get_type_hints(group, include_extras=True)
        declared = [item for item in fields(group) if prefix or item.name not in groups]  # type: ignore[arg-type]
        kinds |= {
            f"{prefix}{item.name}": Kind.of(hints[item.name], {} if item.default is MISSING else item.default)
            for item in declared
        }
    return kinds


def changes_of(name: str) -> Changes:
    """Whether, and when, the setting with this dotted name may change."""
    kind = known_names().get(known_as(name))
    return kind.changes if kind is not None else Changes.NEVER


def sections() -> dict[str, type[Section]]:
    """The groups of settings by name, in order of definition."""
    return {item.name: type(item.default) for item in fields(Settings) if isinstance(item.default, Section)}
