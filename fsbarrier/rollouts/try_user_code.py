"""Checks that the user's reward function and agent can be loaded.

`python -m fsbarrier.rollouts.try_user_code [reward=FILE.py:function] [agent=FILE.py:Class]`
Exits with code 2 and a one-line error on stderr if not; output of the code itself may precede it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fsbarrier.errors import UsageError
from fsbarrier.rewards.kinds import load_function
from fsbarrier.rollouts.agents import load_agent


def main(arguments: Sequence[str]) -> int:
    loaders = {"reward": load_function, "agent": load_agent}
    for argument in arguments:
        what, _, value = argument.partition("=")
        try:
            loaders[what](value)
        except UsageError as error:
            print(f"\n{error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
