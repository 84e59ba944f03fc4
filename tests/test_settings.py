"""Settings: sources and their order, what is refused and in which words, the generated page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from commands import typed
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from fsbarrier.errors import UsageError
from fsbarrier.settings import resolve as resolving
from fsbarrier.settings.losses import LOSSES, LossName
from fsbarrier.settings.sections import EvalSet, Settings, known_names
from fsbarrier.settings.sources import (
    FLAGS,
    ChosenValue,
    from_file,
    from_flags,
    from_words,
    parse_text,
    setting_of,
)
from fsbarrier.settings.without_effect import RULES

ROOT = Path(__file__).resolve().parent.parent
KNOWN = known_names()


def resolve(*words: str, **more: Any) -> Settings:
    return resolving.resolve(from_words(words, KNOWN), **more)


def value(word: str) -> Any:
    nested: Any = resolve(word, cross_checks=False).as_json()
    for part in word.partition("=")[0].split("."):
        nested = nested[part]
    return nested


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rollout.temperature=0.8", 0.8),
        ("rollout.temperature=1", 1.0),
        ("optimizer.lr=3e-4", 3e-4),
        ("eval.top_k=-1", -1),
        ("reward.kind=numeric", "numeric"),
        ("reward.kind=7", "7"),
        ('model="a b"', "a b"),
        ("model=none", None),
        ("iterations=none", None),
        ("rank_weights=2", [2.0]),
        ("rank_weights=[2]", [2.0]),
        ("optimizer.betas=0.9,0.99", [0.9, 0.99]),
        ("debug_mode=True", True),
        ("trainer.command=torchrun train.py {batch} {out}", "torchrun train.py {batch} {out}"),
        ('trainer.command=["python", "my trainer.py"]', "python 'my trainer.py'"),
        ("engine.extra_args=--seed 1", ["--seed", "1"]),
        ("engine.extra_args=[]", []),
        ("lora.targets=q_proj,v_proj", ["q_proj", "v_proj"]),
        ('lora.targets=["q_proj"]', ["q_proj"]),
        ("custom.names=[1, 'a']", [1, "a"]),
        ("custom.deep.er=x=y", "x=y"),
    ],
)
def test_a_word_is_read_as_its_setting_needs_it(word: str, expected: Any) -> None:
    assert value(word) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.temperature=hot"], 'rollout.temperature: must be a number ≥ 0, got "hot"'),
        (["rollout.samples=2.5"], "rollout.samples: must be a whole number ≥ 1, got 2.5"),
        (["rollout.samples=true"], "rollout.samples: must be a whole number ≥ 1, got true"),
        (["eval.top_p=0"], "eval.top_p: must be a number > 0 and ≤ 1, got 0"),
        (["debug_mode=maybe"], 'debug_mode: must be true or false, got "maybe"'),
        (["optimizer.lr=nan"], "optimizer.lr: must be a finite number, got nan"),
        (["optimizer.betas=0.9"], "optimizer.betas: must be 2 numbers ≥ 0 and < 1, got [0.9]"),
        (["rl_phase=train"], 'rl_phase: must be one of rollout, update, both, got "train"'),
        (["rollout.temprature=1"], "rollout.temprature: unknown setting; did you mean rollout.temperature?"),
        (["temperature=1"], "did you mean rollout.temperature or eval.temperature?"),
        (["num-nodes=3"], "did you mean num_nodes?"),
        (["rollout=3"], "rollout: rollout is a group of settings: rollout.tasks"),
        (["model="], "model: must be text that is not empty, or none"),
        (["custom=1"], "custom: must be a table"),
        (["custom.a=1", "custom.a.b=2"], "custom.a.b: a is a single value, not a group of settings"),
        (["num_nodes=3", "rank_weights=1,2"], "2 weights for 3 nodes"),
        (["rank_weights=1,2"], "2 weights for 1 node (num_nodes=1)"),
        (["num_nodes=2", "rank_weights=1,0"], "rank_weights: must be a list of numbers > 0, got [1, 0]"),
        (["num_nodes=2", "rank_weights=1,inf"], "rank_weights: must be a finite number, got [1, Infinity]"),
        (["min_nodes=2"], "min_nodes=2: must not exceed the number of nodes (num_nodes=1)"),
        (["rollout_split=eval-only"], "rollout_split=eval-only: requires --rl-phase rollout"),
        (["coordination.beat_s=6"], "must be at most a third of coordination.dead_s=10"),
        (["rollout.max_tokens=2048"], "leaves no room for a prompt in engine.max_model_len=2048"),
        (
            ["rollout.max_refills=2", "rollout.completion_threshold=0.9"],
            "rollout.completion_threshold=0.9: not supported with rollout.max_refills=2, because a round must be complete",
        ),
        (["eval.max_tokens=4096"], "eval.max_tokens=4096: leaves no room"),
        (["trainer.attention=flash_attention_2", "trainer.dtype=float32"], "supports only bfloat16"),
        (["rollout.temperature=0"], "rollout.temperature=0: all samples of a task would be identical"),
        (["rollout.samples=1"], "algorithm.loss=grpo compares the samples of a task"),
        (
            ["rollout.chat_template_kwargs=thinking"],
            "rollout.chat_template_kwargs=thinking: 'thinking' must have the form name=value",
        ),
        (
            ["rollout.thinking=off", "rollout.chat_template_kwargs=enable_thinking=true"],
            "rollout.thinking=off: rollout.chat_template_kwargs=enable_thinking=true says it too; drop one of the two",
        ),
        (
            ["rollout.max_thinking_tokens=99", "eval.max_tokens=99"],
            "rollout.max_thinking_tokens=99: leaves no token for an answer in eval.max_tokens=99",
        ),
        (
            ["reward.kind=exact,numeric", "reward.weights=1"],
            "reward.weights=1: 1 weight for 2 rewards (reward.kind=exact,numeric)",
        ),
        (["optimizer.schedule=cosine"], "optimizer.schedule=cosine: requires optimizer.decay_steps"),
        (
            ["optimizer.decay_steps=4"],
            "optimizer.decay_steps=4: must be greater than optimizer.warmup_steps=4",
        ),
        (
            [
                *("algorithm.mismatch=token_tis", "rollout.ahead=1", "num_nodes=2"),
                *("placement.rollout=node:1", "placement.update=node:0"),
            ],
            "algorithm.mismatch=token_tis: has no effect with rollout.ahead=1, because an older policy",
        ),
        (
            ["algorithm.mismatch=icepop", "algorithm.old_logprobs=engine"],
            "algorithm.mismatch=icepop: needs the trainer's log-probabilities",
        ),
        (
            ["algorithm.loss=grop"],
            "algorithm.loss=grop: must be grpo, gspo, cispo, sapo, rft, distil or path/file.py:function; did you mean grpo?",
        ),
        (
            ["algorithm.loss=rft", "algorithm.truncated=shape"],
            "algorithm.truncated=shape: has no effect with",
        ),
        (
            ["algorithm.advantage=gae", "rollout.samples=1", "rollout.max_refills=2"],
            "rollout.max_refills=2: replaces groups whose rewards are all equal, and those of one sample always are",
        ),
        (
            ["algorithm.self_certainty=1", "algorithm.truncated=shape"],
            "algorithm.truncated=shape: long answers lose a part of the reward, and algorithm.self_certainty=1 counts none",
        ),
        (
            ["algorithm.kl_in_reward=0.1"],
            "algorithm.kl_in_reward=0.1: algorithm.normalize_std=true would divide the rewards by their standard deviation",
        ),
        (["critic.lr=0.1"], "critic.lr=0.1: there is no critic; set algorithm.advantage=gae"),
        (
            ["algorithm.advantage=gae", "algorithm.loss=rft"],
            "algorithm.advantage=gae: not supported with algorithm.loss=rft, which trains no critic",
        ),
        (
            ["algorithm.advantage=gae", "trainer.backend=deepspeed"],
            "algorithm.advantage=gae: not supported with trainer.backend=deepspeed, which trains no critic",
        ),
        (
            ["algorithm.advantage=gae", "trainer.command=mine {out}"],
            "algorithm.advantage=gae: only the built-in trainer computes it; drop it, or trainer.command",
        ),
        (
            ["algorithm.self_certainty=1", "trainer.command=mine {out}"],
            "algorithm.self_certainty=1: only the built-in trainer computes it; drop it, or trainer.command",
        ),
        (
            ["algorithm.kl_target=0.1"],
            "algorithm.kl_target=0.1: adapts algorithm.kl_in_reward, which is 0",
        ),
        (
            ["algorithm.kl_in_reward=0.1", "algorithm.loss=rft"],
            "algorithm.kl_in_reward=0.1: algorithm.loss=rft learns from successes alone",
        ),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"],
            "algorithm.kl_estimator=k1: in the loss its gradient is zero on average",
        ),
        (["rollout.top_k=2"], "unknown setting; did you mean eval.top_k?"),
        (["eval.sets.aime.samples=0"], "eval.sets.aime.samples: must be a whole number ≥ 1, or none, got 0"),
        (["eval.sets.aime.samlpes=3"], "unknown setting; did you mean eval.sets.NAME.samples?"),
        (["eval.sets.aime=3"], "eval.sets.aime: must be a table, got 3"),
        (["eval.sets.a b.samples=3"], "the name of a set or an engine may have letters, digits, _ and -"),
        (["train.sets.a.weight=0"], "train.sets.a.weight: must be a number > 0, got 0"),
        (
            ["rollout.tasks=2", "train.sets.a.weight=9", "train.sets.b.weight=0.1"],
            "train.sets.b.weight=0.1: the set gets none of the tasks of rollout.tasks=2; give more",
        ),
        (
            ["train.sets.a.where=level"],
            "train.sets.a.where=level: must have the form FIELD=VALUE or FIELD=A:B",
        ),
        (["train.reward_weights=1:0,0:2"], "must have the form REWARD:WEIGHT,..., the lowest reward first"),
        (["train.reward_weights=0:-1"], "train.reward_weights=0:-1: must have the form REWARD:WEIGHT"),
        (["eval.sets.train.samples=3"], 'eval.sets.train: the name "train" is reserved'),
        (
            ["eval.samples=4", "eval.sets.a.temperature=0"],
            "eval.sets.a.samples=4: all samples of a task are identical at eval.sets.a.temperature=0",
        ),
        (["hello"], "unexpected argument 'hello'; settings are written key=value"),
        (["num-nodes"], "unexpected argument 'num-nodes'; did you mean --num-nodes?"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_name(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_number_and_path_has_a_flag_of_its_setting() -> None:
    plain = {name for name in KNOWN if "." not in name} - {"custom", "init_from", "engines", "environments"}
    assert {*map(setting_of, FLAGS)} == plain


def test_help_names_the_defaults_of_the_settings() -> None:
    """`--help` loads no settings, so the numbers stand in its text too."""
    told = re.findall(
        r"^  (--[\w-]+)(?:(?!^  -).)*?\(default (\d+)", typed("run", "--help").out, re.DOTALL | re.MULTILINE
    )
    numbers, defaults = {flag: int(number) for flag, number in told}, Settings().flat()
    assert numbers == {flag: defaults[setting_of(flag)] for flag in numbers} and len(numbers) == 3


def test_later_sources_win_and_defaults_lie_below(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("num_nodes = 2\neval_interval = 5\n[rollout]\nsamples = 4\ntasks = 7\n")
    given = [
        *from_file(config),
        *from_flags(
            {"--num-nodes": "3", "--model": None, "--debug-mode": True, "--shared-group": False}, KNOWN
        ),
        *from_words(["rollout.tasks=9"], KNOWN),
    ]
    chosen = resolving.resolve(given, {"rollout.samples": 16, "rollout.max_tokens": 8})
    assert (chosen.num_nodes, chosen.eval_interval, chosen.debug_mode, chosen.shared_group) == (
        3,
        5,
        True,
        False,
    )
    assert (chosen.rollout.samples, chosen.rollout.tasks, chosen.rollout.max_tokens) == (4, 9, 8)
    assert chosen.rank_weights == (1.0, 1.0, 1.0)


def test_sets_of_held_out_tasks_come_from_a_file_and_from_words(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[eval]\nsamples = 2\n[eval.sets.aime]\nsamples = 32\ntemperature = 0.9\n[eval.sets.plain]\n"
    )
    words = ["eval.sets.aime.samples=8", "eval.sets.gsm.file=test.jsonl"]
    chosen = resolving.resolve([*from_file(config), *from_words(words, KNOWN)])
    assert chosen.eval.sets == {
        "aime": EvalSet(samples=8, temperature=0.9),
        "plain": EvalSet(),
        "gsm": EvalSet(file="test.jsonl"),
    }
    complete = chosen.eval_sets
    assert list(complete) == ["aime", "gsm", "plain"]
    assert (complete["plain"].samples, complete["plain"].max_tokens, complete["aime"].temperature) == (
        2,
        512,
        0.9,
    )
    assert Settings.from_json(json.loads(json.dumps(chosen.as_json()))) == chosen
    inline = resolve("eval.sets={aime={samples=3}}", "eval.sets.aime.tasks=7", "eval.sets.b={}").eval.sets
    assert inline == {"aime": EvalSet(samples=3, tasks=7), "b": EvalSet()}
    assert list(resolve().eval_sets) == ["test"] and resolve("eval.top_k=3").eval_sets["test"].top_k == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = [1\n", "not TOML"),
        (
            "[rollout]\ntemperture = 1\n",
            "rollout.temperture: unknown setting; did you mean rollout.temperature?",
        ),
        ("[rollout]\ntemperature = 'hot'\n", 'rollout.temperature: must be a number ≥ 0, got "hot"'),
        ("rollout = 3\n", "is a group of settings"),
    ],
)
def test_a_file_is_named_with_what_is_wrong_in_it(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(text)
    with pytest.raises(UsageError, match=r"run\.toml") as caught:
        resolving.resolve(from_file(config))
    assert message in str(caught.value)


def test_flags_speak_in_their_own_name() -> None:
    with pytest.raises(UsageError, match=r"^--rank-weights 1,1: 2 weights for 3 nodes \(--num-nodes 3\)"):
        resolving.resolve(from_flags({"--num-nodes": "3", "--rank-weights": "1,1"}, KNOWN))
    with pytest.raises(UsageError, match=r'^--num-nodes: must be a whole number ≥ 1 and ≤ 100000, got "x"$'):
        resolving.resolve(from_flags({"--num-nodes": "x"}, KNOWN))


@hypothesis_given(st.sampled_from(sorted(KNOWN)), st.text(max_size=40))
def test_no_text_does_anything_but_resolve_or_one_line(key: str, text: str) -> None:
    try:
        resolved = resolving.resolve(
            [ChosenValue(key, parse_text(text, KNOWN[key]), key)], cross_checks=False
        )
    except UsageError as error:
        assert str(error).startswith(key)
    else:
        assert resolved.digest


@hypothesis_given(st.text(max_size=60))
def test_no_file_does_anything_but_resolve_or_name_itself(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    config = tmp_path_factory.mktemp("config") / "c.toml"
    config.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        resolving.resolve(from_file(config))
    except UsageError as error:
        assert "c.toml" in str(error)


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "settings_doc.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_given_wins_over_a_preset() -> None:
    plain = resolve("algorithm.preset=gspo").algorithm
    assert (plain.loss, plain.clip_low, plain.aggregation) == ("gspo", 3e-4, "seq-mean-token-mean")
    own = resolve("algorithm.clip_low=0.1", "algorithm.preset=gspo").algorithm
    assert (own.loss, own.clip_low, own.clip_high) == ("gspo", 0.1, 4e-4)
    # Also over what the built-in task has below everything chosen.
    below = {"algorithm.loss": "rft", "rollout.samples": 4}
    assert resolve("algorithm.preset=gspo", defaults=below).algorithm.loss == "gspo"


@pytest.mark.parametrize(
    ("preset", "by_its_paper"),
    [
        (
            "grpo",
            {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04, "kl_estimator": "k3", "normalize_std": True},
        ),
        ("dr_grpo", {"clip_high": 0.2, "kl_coef": 0, "normalize_std": False, "drop_zero_signal": False}),
        (
            "dapo",
            {
                "clip_low": 0.2,
                "clip_high": 0.28,
                "aggregation": "token-mean",
                "truncated": "shape",
                "kl_coef": 0,
                "rollout.max_refills": 9,
            },
        ),
        ("gspo", {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0, "dual_clip": None}),
        ("cispo", {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"}),
        ("sapo", {"loss": "sapo", "aggregation": "seq-mean-token-mean", "kl_coef": 0}),
        # verl's values.
        (
            "ppo",
            {
                "advantage": "gae",
                "gamma": 1,
                "lam": 1,
                "clip_low": 0.2,
                "clip_high": 0.2,
                "dual_clip": 3,
                "critic.clip": 0.5,
            },
        ),
        ("reinforce_plus_plus_baseline", {"kl_coef": 0.001, "kl_estimator": "k2", "normalize_std": True}),
        ("rloo", {"advantage": "rloo", "normalize_std": False, "kl_coef": 0, "kl_in_reward": 0.03}),
        ("reinforce_plus_plus", {"advantage": "reinforce_plus_plus", "kl_coef": 0, "kl_in_reward": 0.001}),
        ("rft", {"loss": "rft", "kl_coef": 0}),
    ],
)
def test_a_preset_is_what_its_paper_says(preset: str, by_its_paper: dict[str, Any]) -> None:
    chosen = dict(resolve(f"algorithm.preset={preset}").flat())
    found = {name: chosen[name if "." in name else f"algorithm.{name}"] for name in by_its_paper}
    assert found == by_its_paper


# --- settings without an effect -------------------------------------------------------------------------------------------

#: one that has no effect with the defaults or with the words beside it, and what the refusal must say
WITHOUT_EFFECT = [
    (
        "algorithm.mismatch=icepop",
        "rollout.ahead=1 num_nodes=2 placement.rollout=node:1 placement.update=node:0",
        "algorithm.mismatch=icepop: has no effect with rollout.ahead=1, because an older policy",
    ),
    ("critic.lr=0.5", "", "critic.lr=0.5: there is no critic; set algorithm.advantage=gae"),
    ("critic.model=M", "", "there is no critic"),
    ("critic.warmup=3", "", "there is no critic"),
    ("critic.clip=none", "", "there is no critic"),
    ("algorithm.gamma=0.9", "", "there is no critic"),
    ("algorithm.lam=0.9", "", "there is no critic"),
    (
        "algorithm.clip_low=0.1",
        "algorithm.loss=sapo",
        "algorithm.clip_low=0.1: has no effect with algorithm.loss=sapo",
    ),
    ("algorithm.clip_high=0.1", "algorithm.loss=mine.py:f", "has no effect with algorithm.loss=mine.py:f"),
    ("algorithm.dual_clip=3", "algorithm.loss=cispo", "has no effect with algorithm.loss=cispo"),
    ("algorithm.advantage=rloo", "algorithm.loss=rft", "has no effect with algorithm.loss=rft"),
    ("algorithm.normalize_std=false", "algorithm.preset=rft", "has no effect with algorithm.loss=rft"),
    ("algorithm.drop_zero_signal=false", "algorithm.loss=rft", "learns from successes alone"),
    (
        "algorithm.drop_zero_signal=false",
        "algorithm.preset=ppo",
        "has no effect with algorithm.advantage=gae",
    ),
    ("algorithm.mismatch_high=3", "", "has no effect with algorithm.mismatch=none"),
    (
        "algorithm.kl_estimator=k2",
        "algorithm.kl_in_reward=0.1 algorithm.normalize_std=false",
        "give algorithm.kl_coef",
    ),
    ("algorithm.kl_target=0.1", "", "adapts algorithm.kl_in_reward, which is 0"),
    ("algorithm.distil_reward=1", "", "requires algorithm.loss=distil (this run: algorithm.loss=grpo)"),
    ("optimizer.decay_steps=50", "", "has no effect with optimizer.schedule=constant"),
    ("lora.alpha=3", "", "lora.alpha=3: there are no adapters"),
    ("lora.targets=q_proj", "", "there are no adapters"),
    ("lora.serve=adapter", "", "lora.serve=adapter: there are no adapters"),
    ("rollout.grace_s=3", "", "has no effect with rollout.completion_threshold=1"),
    ("environment.health=/h", "", "there is no environment"),
    ("environment.start_timeout_s=3", "", "there is no environment"),
    ("environment.sessions=3", "", "there is no environment"),
    ("environment.sessions_per_server=3", "", "there is no environment"),
    ("environment.replicas=3", "", "there is no environment"),
    ("environment.restarts=1", "", "there is no environment"),
    ("trainer.profile_rank=1", "", "nothing is profiled"),
    ("tracker.project=mine", "", "there is no tracker"),
    ("code.timeout_s=3", "", "is for reward.kind=code (this run: reward.kind=exact)"),
    ("code.memory_mb=64", "", "is for reward.kind=code"),
    ("code.partial=true", "reward.kind=math", "is for reward.kind=code (this run: reward.kind=math)"),
    ("rollout.tool_parser=glm45", "", "reads the turns of an agent, and there is none"),
    ("rollout.reasoning_parser=qwen3", "rollout.renderer=x", "has no effect with rollout.renderer=x, which"),
    ("rollout.max_thinking_tokens=9", "rollout.renderer=y", "has no effect with rollout.renderer=y, which"),
    ("sft.split_turns=true", "", "has no effect with program="),
]


@pytest.mark.parametrize(("idle", "beside", "said"), WITHOUT_EFFECT)
def test_a_setting_without_an_effect_is_refused_with_the_reason(idle: str, beside: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        resolve(idle, *beside.split())


def test_each_rule_about_settings_without_an_effect_has_its_example() -> None:
    shown = {idle.partition("=")[0] for idle, _, _ in WITHOUT_EFFECT}
    assert shown == {key for rule in RULES for key in rule.keys}


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.gamma=1 algorithm.mismatch_high=2 lora.alpha=32",
        "algorithm.preset=gspo algorithm.loss=sapo",
        "algorithm.preset=ppo algorithm.gamma=0.9 critic.lr=0.5",
        "algorithm.loss=cispo algorithm.clip_low=0.1",
        "algorithm.loss=mine.py:f algorithm.advantage=rloo",
        "rollout.completion_threshold=0.5 rollout.grace_s=3",
        "reward.kind=mine.py:f judge.url=http://127.0.0.1:1",
        "--debug-mode engine.max_model_len=4096",
        "eval_interval=0 eval.samples=4",
    ],
)
def test_what_is_the_default_or_a_presets_or_has_an_effect_is_accepted(words: str) -> None:
    resolve(*(word.replace("--debug-mode", "debug_mode=true") for word in words.split()))


def test_the_table_of_losses_has_each_loss_and_the_page_about_algorithms_shows_it() -> None:
    assert set(LOSSES) == set(get_args(LossName))
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for name, loss in LOSSES.items():
        bounds = ", ".join(f"`{bound}`" for bound in sorted(loss.bounds)) or "none"
        assert f"| `{name}` | {loss.summary} | {bounds} |" in page
