"""The values of every setting that complete runs are made with, and the runs: together they contain each pair of values.

A *group* holds settings that depend on each other. Each of its alternatives is a part of a command line, and any alternative of one
group goes with any of another one. `{bench}` is a folder with a model, tasks and a user's own code (complete_runs.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import combinations
from random import Random

from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import known_names
from fsbarrier.settings.sources import from_words
from fsbarrier.settings.without_effect import idle_settings

GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        "model={bench}/model",
        "model=model lora.rank=0",
        "init_from={bench}/first@1",
        "init_from={bench}/first lora.rank=1 lora.targets=",
        "model={bench}/model lora.rank=2 lora.alpha=4 lora.targets=q_proj,v_proj lora.serve=merged",
    ),
    "tasks": (
        "data_path={bench}/data",
        "data_path={bench}/chat rollout.chat_template_kwargs=thinking=false",
        "data_path={bench}/parquet",
    ),
    "nodes": (
        "num_nodes=1 on_node_failure=shrink min_nodes=1 rank_weights=1",
        "num_nodes=2 on_node_failure=wait rank_weights=1,2 min_nodes=2",
        "num_nodes=2 on_node_failure=abort coordination.last_call_s=30 rank_weights=3,1",
        "num_nodes=1 coordination.last_call_s=none placement.rollout=all placement.update=all",
        "num_nodes=2 rank_weights=1,1 placement.rollout=node:1 placement.update=node:0 rollout.ahead=1"
        " rollout.in_flight=false",
        "num_nodes=2 rank_weights=1,1 placement.rollout=node:0 placement.update=all rollout.ahead=0",
    ),
    "group access": (
        "shared_group=false trust_mount=false allow_idle=false",
        "shared_group=true trust_mount=true allow_idle=true",
    ),
    "evaluation": (
        "eval_interval=1 eval.tasks=0 eval.samples=2 eval.temperature=0.5 eval.top_p=0.9 eval.top_k=-1 eval.max_tokens=8"
        "",
        "eval_interval=0",
        "eval_interval=2 eval.tasks=1 eval.samples=1 eval.temperature=0 eval.top_k=5 eval.success=0.5"
        " eval.max_tokens=none",
        "eval.sets.easy.file=easy.jsonl eval.sets.easy.samples=2 eval.sets.easy.tasks=1 eval.sets.easy.temperature=0.3"
        " eval.sets.hard.file={bench}/data/test.jsonl",
        "eval.sets.mine.file=none eval.sets.mine.tasks=none eval.sets.mine.samples=none eval.sets.mine.temperature=none",
    ),
    "how many": (
        "rollout.tasks=1 train.reward_weights=",
        "rollout.tasks=3 train.reward_weights=0:1,0.5:3 train.sets.a.file={bench}/data/train.jsonl train.sets.a.where=level=1:2"
        " train.sets.a.weight=2 train.sets.b.file={bench}/data/test.jsonl train.sets.b.where=none",
        "rollout.tasks=9 train.sets.mine.file=none",
    ),
    "samples": ("rollout.samples=2", "rollout.samples=3"),
    "temperature": ("rollout.temperature=1.0", "rollout.temperature=0.7"),
    "length": (
        "rollout.max_tokens=16 rollout.max_thinking_tokens=3",
        "rollout.max_tokens=40 rollout.max_thinking_tokens=none",
    ),
    "rollouts": (
        "rollout.concurrency=1",
        "rollout.concurrency=64",
    ),
    "seed": ("rollout.seed=0 rollout.reproducible=false", "rollout.seed=7"),
    "take over": ("rollout.take_over=true", "rollout.take_over=false"),
    "early end": (
        "rollout.completion_threshold=1 rollout.max_refills=1",
        "rollout.completion_threshold=0.3 rollout.grace_s=0 rollout.max_refills=0",
        "rollout.completion_threshold=0.5 rollout.grace_s=5 rollout.max_refills=0",
        "rollout.max_refills=0",
    ),
    "agent": (
        "rollout.agent=none",
        "rollout.agent={bench}/mine.py:Agent rollout.max_error_share=0",
        "rollout.max_error_share=1",
    ),
    "task timeout": ("rollout.task_timeout_s=none", "rollout.task_timeout_s=60"),
    "reward": (
        "reward.kind=exact",
        "reward.kind=numeric,exact reward.weights=-0.5,1",
        "reward.kind={bench}/mine.py:reward reward.timeout_s=20 custom.any=1",
        "reward.kind=math,exact",
        "reward.kind=judge,exact judge.url={judge} judge.model=m judge.api_key_env=JUDGE_KEY judge.images=last",
        "reward.kind={bench}/mine.py:judged judge.url={judge} judge.model=m judge.api_key_env=none",
        "reward.kind=engines.rm,judge judge.model=engines.wise engines.rm.model={bench}/rm engines.rm.placement=all engines.rm.replicas=2"
        " engines.rm.max_model_len=64 engines.rm.start_timeout_s=30 engines.rm.tensor_parallel_size=1 engines.wise.model={bench}/model"
        " engines.wise.extra_args='--max-num-seqs 4' engines.wise.gpu_memory_utilization=0.5",
    ),
    "preset": (
        "algorithm.preset=none",
        *(
            f"algorithm.preset={name}"
            for name in (
                "grpo",
                "dr_grpo",
                "dapo",
                "gspo",
                "cispo",
                "sapo",
                "rft",
                "reinforce_plus_plus_baseline",
            )
        ),
        # Their KL in the reward goes with few values of other groups.
        *(f"algorithm.preset={name} algorithm.kl_in_reward=0" for name in ("rloo", "reinforce_plus_plus")),
    ),
    "loss": (
        "algorithm.truncated=keep",
        "algorithm.truncated=mask",
        *(f"algorithm.loss={name} algorithm.truncated=shape" for name in ("grpo", "gspo", "cispo", "sapo")),
        *(f"algorithm.loss=rft algorithm.truncated={name}" for name in ("keep", "mask")),
        "algorithm.loss={bench}/mine.py:loss algorithm.truncated=keep",
    ),
    "clip": (
        "algorithm.clip_low=0.1 algorithm.clip_high=0.5 algorithm.dual_clip=none",
        "algorithm.clip_low=1 algorithm.dual_clip=3",
    ),
    "aggregation": (
        "algorithm.aggregation=token-mean",
        "algorithm.aggregation=seq-mean-token-mean",
        "algorithm.aggregation=seq-mean-token-sum",
        "algorithm.aggregation=seq-mean-token-sum-norm",
    ),
    "advantage": tuple(
        f"algorithm.advantage={name}"
        for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ),
    "advantages": (
        "algorithm.normalize_std=true algorithm.drop_zero_signal=true",
        "algorithm.normalize_std=false algorithm.drop_zero_signal=false",
    ),
    "old log-probabilities": (
        "algorithm.old_logprobs=auto algorithm.mismatch=token_tis algorithm.mismatch_high=3",
        "algorithm.old_logprobs=trainer algorithm.mismatch=icepop",
        "algorithm.old_logprobs=engine algorithm.mismatch=none",
        "algorithm.mismatch=sequence_mask",
    ),
    "reference": (
        "algorithm.kl_coef=0",
        "algorithm.kl_coef=0.1 algorithm.kl_estimator=k2",
        "algorithm.kl_coef=0.1 algorithm.kl_estimator=k3",
    ),
    "entropy": ("algorithm.entropy_coef=0", "algorithm.entropy_coef=0.01"),
    "gap": ("algorithm.max_logprob_gap=none", "algorithm.max_logprob_gap=0.5"),
    "optimizer": (
        "optimizer.lr=1e-6",
        "optimizer.lr=1e-5 optimizer.betas=0.8,0.9",
    ),
    "decay": (
        "optimizer.weight_decay=0 optimizer.grad_clip=1",
        "optimizer.weight_decay=0.1 optimizer.grad_clip=0.01",
    ),
    "schedule": (
        "optimizer.schedule=constant optimizer.warmup_steps=0 optimizer.decay_steps=none",
        "optimizer.schedule=linear optimizer.warmup_steps=1 optimizer.decay_steps=3",
        "optimizer.schedule=cosine optimizer.warmup_steps=2 optimizer.decay_steps=100",
    ),
    "batches": (
        "trainer.minibatch=1 trainer.epochs=2",
        "trainer.minibatch=256 trainer.epochs=1",
        "trainer.minibatch=3 trainer.max_tokens_per_micro_batch=1",
    ),
    "memory": (
        "trainer.gradient_checkpointing=none",
        "trainer.gradient_checkpointing=true",
        "trainer.gradient_checkpointing=false",
    ),
    "precision": (
        "trainer.dtype=auto engine.dtype=auto trainer.attention=sdpa",
        "trainer.dtype=float32 engine.dtype=float32",
        "trainer.dtype=bfloat16 engine.dtype=bfloat16",
        "engine.dtype=float16",
    ),
    "trainer": (
        "trainer.backend=torch trainer.shard=auto trainer.processes_per_node=0 trainer.freeze=vision",
        "trainer.shard=none trainer.offload=none trainer.processes_per_node=1",
        "trainer.shard=node trainer.processes_per_node=2",
        "trainer.shard=all trainer.offload=all",
        "trainer.offload=optimizer trainer.freeze=none",
    ),
    "kept": (
        "trainer.keep=auto trainer.private_network=false",
        "trainer.keep=process",
        "trainer.keep=nothing",
    ),
    "replay": (
        "update.recency=1",
        "update.recency=2",
        "update.recency=3",
    ),
    "engines": (
        "engine.replicas=0 engine.nodes=1 engine.tensor_parallel_size=1",
        "engine.replicas=2 engine.start_timeout_s=30",
        "engine.extra_args='--max-num-seqs 8' engine.private_network=false",
        "engine.gpu_memory_utilization=0.5 engine.tensor_parallel_size=2",
        "engine.url={engine} engine.api_key_env=ENGINE_KEY",
        "debug_mode=true engine.url={engine} engine.api_key_env=ENGINE_KEY",
    ),
    "longest": ("engine.max_model_len=64", "engine.max_model_len=4096"),
    "checkpoints": (
        "checkpoint.keep=1 checkpoint.keep_every=1 checkpoint.trainer_every=none checkpoint.whole_every=1",
        "checkpoint.keep=3 checkpoint.keep_every=2 checkpoint.trainer_every=2 checkpoint.keep_trajectories=1 checkpoint.whole_every=3",
        "checkpoint.keep_every=0 checkpoint.keep_trajectories=0",
    ),
    "copies": (
        "checkpoint.weights_dir=auto",
        "checkpoint.weights_dir={bench}/copies",
        "checkpoint.weights_dir=none",
    ),
    "coordination": (
        "coordination.beat_s=0.2 coordination.dead_s=30",
        "coordination.stall_timeout_s=60",
    ),
    "notify": ("notify.command=none", "notify.command={bench}/notify.sh"),
    "trackers": ("tracker.project=fsbarrier",),
}

#: Settings, or values of settings, that no run here is made with, and why.
ELSEWHERE = {
    "log_path": "each run has one",
    "program": "the table is about `rl`; the others: test_toy_run.py, test_bench.py",
    "iterations": "each run has two, and one more when it goes on",
    "epochs": "test_cli.py: a start makes iterations of it",
    "download": "test_export.py: from a hub of the test's",
    "rl_phase": "test_complete_runs.py",
    "rollout_split": "test_complete_runs.py",
    "expect_gpus": "test_placement.py",
    "trainer.attention=flash_attention_2": "needs an accelerator and its package",
    "trainer.backend=deepspeed": "test_update_processes.py",
    "trainer.zero_stage": "test_update_processes.py",
    "trainer.command": "test_complete_runs.py",
    "lora.serve=adapter": "test_moved_in_runs.py: a server of the user's serves no adapters",
    "trainer.private_network=true": "what all runs have that do not give it",
    "engine.api_key_env=none": "the table's server of a user has a key",
    "engine.url=none": "what all runs have that do not give one",
    "algorithm.distil_reward": "only with a teacher (test_teachers.py)",
    "algorithm.kl_estimator=k1": "is refused with a KL in the loss (test_settings.py), and has no other use",
    **dict.fromkeys(("trainer.profile", "trainer.profile=none", "trainer.profile_rank"), "test_profiling.py"),
    "rollout.tool_parser": "test_bad_input.py",
    "rollout.renderer": "test_renderer.py: its package is not installed",
    **dict.fromkeys(("rollout.thinking", "rollout.reasoning_parser"), "test_thinking.py, test_bad_input.py"),
    "rollout.stop": "test_rollout.py: an agent names its own",
    "rollout.in_flight=true": "test_in_flight.py: a server of the user's takes no weights",
    "rollout.reproducible=true": "test_complete_runs.py: an agent has no seeds",
    "algorithm.self_certainty": "test_teachers.py: it goes with few values of other groups",
    "algorithm.kl_target": "test_complete_runs.py",
    **dict.fromkeys(("algorithm.preset=ppo", "algorithm.advantage=gae"), "test_complete_runs.py"),
    **dict.fromkeys(("algorithm.gamma", "algorithm.lam"), "only with a critic (test_complete_runs.py)"),
    **dict.fromkeys(("critic.model", "critic.lr", "critic.warmup", "critic.clip"), "test_complete_runs.py"),
    "tracker.names": "test_trackers.py: their packages are not installed",
    **dict.fromkeys(("tracker.run_name", "tracker.samples"), "only with tracker.names (test_trackers.py)"),
    **dict.fromkeys(
        (
            f"{table}.{name}"
            for table in ("environment", "environments.NAME")
            for name in (
                "command",
                "health",
                "start_timeout_s",
                "sessions_per_server",
                "replicas",
                "restarts",
            )
        ),
        "test_environment.py",
    ),
    **dict.fromkeys(("environment.sessions", "environments.NAME.sessions"), "test_claims.py"),
    "environments": "each environment has settings of its own",
    "sft.split_turns": "test_sft.py",
    "toy.tasks": "test_toy_run.py",
    "toy.phase_s": "test_toy_run.py",
    "data_path=none": "the demo (test_real_run.py)",
    "model=none": "the demo (test_real_run.py)",
    "init_from=none": "what all runs have that do not give one",
    "debug_mode=false": "what all runs have that do not give it",
    "engines": "each engine has settings of its own",
    "engines.NAME.dtype": "as engine.dtype",
    "engine.private_network=true": "what all runs have that do not give it",
    **dict.fromkeys(
        (f"engines.NAME.private_network{value}" for value in ("", "=true", "=false")),
        "as engine.private_network",
    ),
    "engines.NAME.model=none": "is refused (test_frozen.py)",
    "engines.NAME.placement=none": "what engines have that do not give one",
    **dict.fromkeys(
        ("code.timeout_s", "code.memory_mb", "code.partial", "code.partial=true", "code.partial=false"),
        "test_code_reward.py: the table's tasks have no tests",
    ),
    "judge.images=none": "what all runs have that do not give one",
    "judge.images=all": "test_rewards.py",
    "judge.url=none": "what all runs have that do not give one",
    "judge.model=none": "what all runs have that do not give one",
}

#: settings on which the programs of a run do not act themselves, or only beside some others, and why
NOT_ALWAYS_ACTED_ON = {
    "trainer.private_network": "where an update spans nodes, only a start reads it",
    **dict.fromkeys(("data_path", "model", "init_from", "debug_mode"), "a start resolves it"),
    **dict.fromkeys(("trust_mount", "allow_idle"), "a start checks it"),
    **dict.fromkeys(
        ("eval.sets.NAME.file", "train.sets.NAME.file", "train.sets.NAME.where"), "a start resolves it"
    ),
    "algorithm.preset": "it chooses the values of others",
    "custom": "it is for a user's own code (test_agents.py)",
    "rollout.chat_template_kwargs": "a table of the user's own (test_chat_templates.py)",
    "tracker.project": "only with tracker.names (test_trackers.py)",
    "engine.gpu_memory_utilization": "only on accelerators (test_engine.py)",
    "engines.NAME.gpu_memory_utilization": "only on accelerators (test_engine.py)",
    "optimizer.decay_steps": "only where the learning rate falls (test_losses.py)",
    **dict.fromkeys(
        (
            "algorithm.advantage",
            "algorithm.normalize_std",
            "algorithm.drop_zero_signal",
            "algorithm.dual_clip",
        ),
        "not by every loss (test_losses.py)",
    ),
}

Choice = tuple[str, str]


class AnyText(dict[str, str]):
    """Stands for what the placeholders of the words become."""

    def __missing__(self, key: str) -> str:
        return f"/{key}"


def with_effect(row: Mapping[str, str]) -> list[str]:
    """The words of a row without those that the others make idle, which a start refuses (settings/without_effect.py)."""
    words = [word for group in row.values() for word in shlex.split(group)]
    while True:
        chosen = from_words([word.format_map(AnyText()) for word in words], known_names())
        settings = resolve(chosen, cross_checks=False)
        idle = {key for key, _ in idle_settings(settings, {item.key for item in chosen})}
        if not idle:
            return words
        words = [word for word in words if word.partition("=")[0] not in idle]


def gain(
    one: Choice, row: dict[str, str], alone: set[Choice], pairs: set[frozenset[Choice]]
) -> tuple[bool, int]:
    """What a choice adds to a row: whether it was in no row yet, and how many new pairs."""
    return one in alone, sum(frozenset((one, other)) in pairs for other in row.items())


def covering_rows(seed: int = 0) -> tuple[list[dict[str, str]], int]:
    """Rows with one alternative of each group that together contain each pair of alternatives of two groups; and how many of the first
    rows contain each alternative at least once."""
    dice, rows, all_once = Random(seed), list[dict[str, str]](), 0
    pairs = {
        frozenset(((a, x), (b, y))) for a, b in combinations(GROUPS, 2) for x in GROUPS[a] for y in GROUPS[b]
    }
    alone = {(name, value) for name, values in GROUPS.items() for value in values}
    while pairs:
        row: dict[str, str] = {}
        for name in dice.sample(list(GROUPS), len(GROUPS)):
            values = dice.sample(GROUPS[name], len(GROUPS[name]))
            row[name] = max(values, key=lambda value: gain((name, value), row, alone, pairs))
        before = len(alone) + len(pairs)
        staying = {*with_effect(row)} if alone else set()
        alone -= {choice for choice in row.items() if {*shlex.split(choice[1])} <= staying}
        pairs -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        if len(alone) + len(pairs) == before:
            # By chance this row had nothing new: begin with a pair that is missing.
            first, second = sorted(min(pairs, key=sorted))
            row |= dict((first, second))
            pairs -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append(row)
        all_once = all_once if alone else all_once or len(rows)
    assert not alone, f"has an effect in no row: {alone}"
    return rows, all_once
