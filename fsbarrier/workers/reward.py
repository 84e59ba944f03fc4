"""Starts the processes of a reward function: `python -m fsbarrier.workers.reward PATH/FILE.py:FUNCTION CONTROL_FD` (call_pool.py)."""

from __future__ import annotations

import socket
import sys
from functools import partial

from fsbarrier.processes.fork_server import serve
from fsbarrier.rewards.function_process import load


def main() -> None:
    kind, control = sys.argv[1:]
    serve(socket.socket(fileno=int(control)), partial(load, kind))


if __name__ == "__main__":
    main()
