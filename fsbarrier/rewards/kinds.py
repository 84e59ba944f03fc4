"""Resolves `reward.kind`: one of KINDS, a judge, or a user's function (`path/file.py:function`).

A reward that fails or exceeds `reward.timeout_s` marks its trajectory as failed; if more than `rollout.max_error_share` fail, the phase
fails.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.data.tasks import Task, task_error
from fsbarrier.errors import UsageError
from fsbarrier.rewards.matching import MatchReward, exact, numeric, unusable
from fsbarrier.rewards.math_verify import MathReward
from fsbarrier.rewards.score import AddedRewards, Reward
from fsbarrier.rewards.user_function import (
    VERLS_PARAMETERS,
    FunctionReward,
    GroupFunctionReward,
    is_verls,
    takes_groups,
)
from fsbarrier.settings.sections import RewardSettings
from fsbarrier.settings.sources import nearest
from fsbarrier.settings.value_types import ENGINE, frozen_engine, reward_kinds
from fsbarrier.user_code import load_named

if TYPE_CHECKING:
    from fsbarrier.engine.openai_http import EngineAddress
    from fsbarrier.rewards.judge import Judge
    from fsbarrier.settings.sections import JudgeSettings

#: rewards that compare with the task's answer, and therefore require one
KINDS = ("exact", "numeric", "math")


def open_reward(
    kinds: str,
    *,
    weights: Sequence[float] = (),
    timeout_s: float | None = None,
    judge: JudgeSettings | None = None,
    engines: Mapping[str, EngineAddress] | None = None,
) -> Reward:
    """The reward for `reward.kind` and `reward.weights`. `timeout_s=None`: the setting's default. `engines`: the frozen ones.

    Raises UsageError if its file or function is missing or broken, or if it needs a judge and none is configured.
    """
    if timeout_s is None:
        timeout_s = RewardSettings().timeout_s
    opened = [_open_one(kind, timeout_s, judge, engines or {}) for kind in reward_kinds(kinds)]
    if len(opened) == 1 and not weights:
        return opened[0]
    return AddedRewards([*zip(weights or [1.0] * len(opened), opened, strict=True)])


def _open_one(
    kind: str, timeout_s: float, judge: JudgeSettings | None, engines: Mapping[str, EngineAddress]
) -> Reward:
    match kind:
        case "exact":
            return MatchReward(kind, exact)
        case "numeric":
            return MatchReward(kind, numeric)
        case "math":
            return MathReward(timeout_s)
        case "judge":
            # Imported late: only a judge needs httpx, which the checks before a run do not load.
            from fsbarrier.rewards.judge import JudgeReward

            shows = judge.images if judge is not None else "none"
            return JudgeReward(_open_judge(kind, judge, timeout_s, engines), shows)
    if kind.startswith(ENGINE):
        from fsbarrier.rewards.model_server import ClassifierReward

        return ClassifierReward(engines[kind.removeprefix(ENGINE)], timeout_s)
    if ":" not in kind:
        known = (*KINDS, "judge")
        raise UsageError(
            f"reward.kind={kind}: must be {', '.join(known)}, engines.NAME or path/file.py:function{nearest(kind, known)}"
        )
    name, function = kind.rpartition(":")[2], load_function(kind)
    asked = _open_judge(kind, judge, timeout_s, engines) if asks(function, "judge") else None
    return (GroupFunctionReward if takes_groups(function) else FunctionReward)(
        name, function, timeout_s, asked, engines if asks(function, "engines") else None
    )


def load_function(kind: str) -> Callable[..., object]:
    """Load the user's function ("path/file.py:function"). Raises UsageError, also for a wrong signature."""
    function = load_named("reward.kind", kind)
    if not callable(function):
        raise UsageError(f"reward.kind={kind}: {kind.rpartition(':')[2]} is not a function")
    more = {name: None for name in ("judge", "engines") if asks(function, name)}
    try:
        if is_verls(function):
            inspect.signature(function).bind(**dict.fromkeys(VERLS_PARAMETERS), **more)
        else:
            inspect.signature(function).bind("prompt", "response", "answer", {}, **more)
    except TypeError as error:
        called = ", ".join(VERLS_PARAMETERS) if is_verls(function) else "prompt, response, answer, metadata"
        raise UsageError(f"reward.kind={kind}: must accept a call reward({called}): {error}") from None
    return function


def asks(function: Callable[..., object], name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def _open_judge(
    kind: str, settings: JudgeSettings | None, timeout_s: float, engines: Mapping[str, EngineAddress]
) -> Judge:
    from fsbarrier.rewards.judge import Judge

    if settings is not None and (name := frozen_engine(settings.model)) is not None:
        return Judge(settings, timeout_s, engines[name])
    if settings is None or not settings.url or not settings.model:
        raise UsageError(
            f"reward.kind={kind}: uses a judge, which needs judge.model=engines.NAME, or judge.url and judge.model"
        )
    if not settings.url.startswith(("http://", "https://")):
        raise UsageError(f"judge.url={settings.url}: must be a URL such as https://host/v1")
    if settings.api_key_env is not None and not os.environ.get(settings.api_key_env):
        raise UsageError(
            f"judge.api_key_env={settings.api_key_env}: this variable is not set on this node; export it"
        )
    return Judge(settings, timeout_s)


def check_answers(kinds: str, tasks: Iterable[Task], path: Path, *, agent: bool = False) -> None:
    """Raises UsageError naming the first task whose answer is unusable for one of `kinds`. `agent`: it may give the reward itself, so there
    may be tasks without an answer."""
    compared = [kind for kind in reward_kinds(kinds) if kind in KINDS]
    for kind, task in product(compared, tasks):
        problem = unusable(kind, task.answer)
        if problem is not None and not (agent and task.answer is None):
            fields = ", ".join(["prompt", *task.metadata])
            raise task_error(path, task.index, f"{problem} (its fields: {fields})")
