"""Resolves `reward.kind`: one of KINDS, a judge, or a user's function (`path/file.py:function`).

A reward that fails or exceeds `reward.timeout_s` marks its trajectory as failed; if more than `rollout.max_error_share` fail, the phase
fails.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.data.tasks import Task
from fsbarrier.errors import UsageError
from fsbarrier.rewards.matching import MatchReward, exact, last_number, numeric
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
from fsbarrier.settings.value_types import reward_kinds
from fsbarrier.user_code import load_named

if TYPE_CHECKING:
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
) -> Reward:
    """The reward for `reward.kind` and `reward.weights`. `timeout_s=None`: the setting's default.

    Raises UsageError if its file or function is missing or broken, or if it needs a judge and none is configured.
    """
    if timeout_s is None:
        timeout_s = RewardSettings().timeout_s
    opened = [_open_one(kind, timeout_s, judge) for kind in reward_kinds(kinds)]
    if len(opened) == 1 and not weights:
        return opened[0]
    return AddedRewards([*zip(weights or [1.0] * len(opened), opened, strict=True)])


def _open_one(kind: str, timeout_s: float, judge: JudgeSettings | None) -> Reward:
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

            return JudgeReward(_open_judge(kind, judge, timeout_s))
    if ":" not in kind:
        known = (*KINDS, "judge")
        raise UsageError(
            f"reward.kind={kind}: must be {', '.join(known)} or path/file.py:function{nearest(kind, known)}"
        )
    name, function = kind.rpartition(":")[2], load_function(kind)
    asked = _open_judge(kind, judge, timeout_s) if asks_judge(function) else None
    return (GroupFunctionReward if takes_groups(function) else FunctionReward)(
        name, function, timeout_s, asked
    )


def load_function(kind: str) -> Callable[..., object]:
    """Load the user's function ("path/file.py:function"). Raises UsageError, also for a wrong signature."""
    function = load_named("reward.kind", kind)
    if not callable(function):
        raise UsageError(f"reward.kind={kind}: {kind.rpartition(':')[2]} is not a function")
    judge = {"judge": None} if asks_judge(function) else {}
    try:
        if is_verls(function):
            inspect.signature(function).bind(**dict.fromkeys(VERLS_PARAMETERS), **judge)
        else:
            inspect.signature(function).bind("prompt", "response", "answer", {}, **judge)
    except TypeError as error:
        called = ", ".join(VERLS_PARAMETERS) if is_verls(function) else "prompt, response, answer, metadata"
        raise UsageError(f"reward.kind={kind}: must accept a call reward({called}): {error}") from None
    return function


def asks_judge(function: Callable[..., object]) -> bool:
    """Whether the function has a `judge` parameter."""
    return "judge" in inspect.signature(function).parameters


def _open_judge(kind: str, settings: JudgeSettings | None, timeout_s: float) -> Judge:
    from fsbarrier.rewards.judge import Judge

    if settings is None or not settings.url or not settings.model:
        raise UsageError(f"reward.kind={kind}: uses a judge, which needs judge.url and judge.model")
    if not settings.url.startswith(("http://", "https://")):
        raise UsageError(f"judge.url={settings.url}: must be a URL such as https://host/v1")
    if settings.api_key_env is not None and not os.environ.get(settings.api_key_env):
        raise UsageError(
            f"judge.api_key_env={settings.api_key_env}: this variable is not set on this node; export it"
        )
    return Judge(settings, timeout_s)


def check_answers(kinds: str, tasks: Iterable[Task], path: Path) -> None:
    """Raises UsageError naming the first task whose answer is unusable for one of `kinds`."""
    compared = [kind for kind in reward_kinds(kinds) if kind in KINDS]
    for kind, task in product(compared, tasks):
        place = f"{path}, task {task.index}: reward.kind={kind}"
        if task.answer is None or not str(task.answer).strip():
            raise UsageError(f"{place} needs an answer, but the task has none")
        if kind == "numeric" and last_number(str(task.answer)) is None:
            raise UsageError(f"{place}, but the answer contains no number: {task.answer!r}")
