"""Resolves `reward.kind`: one of KINDS, a judge, or a user's function (`path/file.py:function`).

A reward that fails or exceeds `reward.timeout_s` marks its trajectory as failed; if more than `rollout.max_error_share` fail, the phase
fails.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.data.tasks import Task, task_error
from fsbarrier.errors import UsageError
from fsbarrier.rewards import code_sandbox, code_tests, verl
from fsbarrier.rewards.matching import MatchReward, exact, numeric, unusable
from fsbarrier.rewards.score import AddedRewards, Reward
from fsbarrier.rewards.user_function import FunctionReward
from fsbarrier.rewards.verl import VerlReward
from fsbarrier.settings.sections import CodeSettings, RewardSettings
from fsbarrier.settings.sources import nearest
from fsbarrier.settings.value_types import ENGINE, reward_kinds

if TYPE_CHECKING:
    from fsbarrier.settings.sections import JudgeSettings
    from fsbarrier.specs import EngineAddress

#: rewards that compare with the task's answer or run its tests, and therefore require them
KINDS = ("exact", "numeric", "math", "code", "verl")
#: maximum number of processes of math-verify
MATH_PROCESSES = 4
#: maximum number of programs of answers that run at a time
CODE_PROCESSES = 16
#: A call of `code` ends its tests by itself after `reward.timeout_s`, and scores those that were done. Its process is ended only this much
#: later.
CODE_GRACE_S = 30.0


def open_reward(
    kinds: str,
    *,
    weights: Sequence[float] = (),
    timeout_s: float | None = None,
    judge: JudgeSettings | None = None,
    engines: Mapping[str, EngineAddress] | None = None,
    code: CodeSettings | None = None,
) -> Reward:
    """The reward for `reward.kind` and `reward.weights`. `timeout_s=None`: the setting's default. `engines`: the frozen ones.

    Raises UsageError if there is no such kind, or if it needs a judge and none is configured. That its file or function is missing or
    broken is only found by the reward's `open`.
    """
    if timeout_s is None:
        timeout_s = RewardSettings().timeout_s
    code = code or CodeSettings()
    opened = [_open_one(kind, timeout_s, judge, engines or {}, code) for kind in reward_kinds(kinds)]
    if len(opened) == 1 and not weights:
        return opened[0]
    return AddedRewards([*zip(weights or [1.0] * len(opened), opened, strict=True)])


def _open_one(
    kind: str,
    timeout_s: float,
    judge: JudgeSettings | None,
    engines: Mapping[str, EngineAddress],
    code: CodeSettings,
) -> Reward:
    cores = len(os.sched_getaffinity(0))
    match kind:
        case "exact":
            return MatchReward(kind, exact)
        case "numeric":
            return MatchReward(kind, numeric)
        case "math":
            # math-verify only computes, so more processes than cores would be of no use.
            return FunctionReward(kind, timeout_s, processes=min(MATH_PROCESSES, cores))
        case "code":
            options = {**code.as_json(), "within_s": timeout_s}
            return FunctionReward(
                kind, timeout_s + CODE_GRACE_S, processes=min(CODE_PROCESSES, cores), options=options
            )
        case "verl":
            # verl's reward for code is the share of passed tests.
            share = replace(code, partial=True)
            math, programs = (
                _open_one(scorer, timeout_s, judge, engines, share) for scorer in ("math", "code")
            )
            return VerlReward(math, programs)
        case "judge":
            # Imported late: only a judge needs httpx, which the checks before a run do not load.
            from fsbarrier.rewards.judge import JudgeReward, open_judge

            shows = judge.images if judge is not None else "none"
            return JudgeReward(open_judge(kind, judge, timeout_s, engines), shows)
    if kind.startswith(ENGINE):
        from fsbarrier.rewards.model_server import ClassifierReward

        return ClassifierReward(engines[kind.removeprefix(ENGINE)], timeout_s)
    if ":" not in kind:
        known = (*KINDS, "judge")
        raise UsageError(
            f"reward.kind={kind}: must be {', '.join(known)}, engines.NAME or path/file.py:function{nearest(kind, known)}"
        )
    return FunctionReward(kind, timeout_s, judge, engines)


def check_answers(kinds: str, tasks: Iterable[Task], path: Path, *, agent: bool = False) -> None:
    """Raises UsageError naming the first task whose answer is unusable for one of `kinds`. `agent`: it may give the reward itself, so there
    may be tasks without an answer."""
    compared = [kind for kind in reward_kinds(kinds) if kind in KINDS]
    for kind, task in product(compared, tasks):
        problem = problem_of(kind, task)
        if problem is not None and not (agent and task.answer is None):
            fields = ", ".join(["prompt", *task.metadata])
            raise task_error(path, task.index, f"{problem} (its fields: {fields})")


def problem_of(kind: str, task: Task) -> str | None:
    """Why one of KINDS cannot score a task."""
    match kind:
        case "verl":
            return verl.problem_of(task)
        case "code":
            return code_tests.problem_of(task.answer, task.metadata)
    return unusable(kind, task.answer)


def about_scorers(kinds: str, tasks: Collection[Task], path: Path) -> str:
    """What the start says of `reward.kind=verl`: which scorers it chose, or that these tasks are made for it; "" if nothing."""
    if "verl" in reward_kinds(kinds):
        programs = any(verl.scorer_of(task) == "code" for task in tasks)
        lacks = (
            f"; programs run without a sandbox: {why}" if programs and (why := code_sandbox.missing()) else ""
        )
        return f"reward.kind=verl, {path.name}: {verl.chosen(tasks)}{lacks}"
    if kinds == RewardSettings().kind and all(map(verl.scorer_of, tasks)):
        return (
            f"{path.name} has verl's data sources, and reward.kind={kinds} gives 1 only to an answer that is nothing but the reference "
            "answer; reward.kind=verl chooses the scorer that verl would"
        )
    return ""
