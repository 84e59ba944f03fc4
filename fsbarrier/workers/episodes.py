"""Starts the processes of an agent's episodes: `python -m fsbarrier.workers.episodes PATH/FILE.py:CLASS CONTROL_FD` (agent_sampler.py)."""

from __future__ import annotations

import socket
import sys
from functools import partial

from fsbarrier.processes.fork_server import Work, serve
from fsbarrier.rollouts.agents import load_agent, run_job


def main() -> None:
    agent, control = sys.argv[1:]

    def load() -> tuple[Work, object]:
        return partial(run_job, load_agent(agent)), None

    serve(socket.socket(fileno=int(control)), load)


if __name__ == "__main__":
    main()
