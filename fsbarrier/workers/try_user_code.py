"""Checks that the rewards, the agent and the loss of a run can be used: `python -m fsbarrier.workers.try_user_code < SETTINGS.json`.

Exits with code 2 and a one-line error on stderr if not; output of the code itself may precede it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rewards.score import Reward
from fsbarrier.rollouts.agents import load_agent
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import EngineAddress


async def _try_reward(reward: Reward) -> None:
    try:
        await reward.open()
    finally:
        await reward.close()


def main() -> int:
    settings = Settings.from_json(json.load(sys.stdin))
    try:
        engines = {name: EngineAddress("http://127.0.0.1/v1", "", name, 1.0) for name in settings.engines}
        asyncio.run(_try_reward(open_reward(settings.reward.kind, judge=settings.judge, engines=engines)))
        if settings.rollout.agent is not None:
            load_agent(settings.rollout.agent)
        if settings.algorithm.built_in_loss is None:
            # Imported late: only a loss needs torch.
            from fsbarrier.training.own_loss import try_loss

            try_loss(settings.algorithm)
    except (UsageError, ProgramFailed) as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
