"""Manages the processes of several nodes: stops them together and reduces their exit codes to one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.errors import EXIT_SIGINT
from fsbarrier.processes.signals import Interrupted, end_once, ending_signals_handled
from fsbarrier.rundir.names import GENERATION
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore

if TYPE_CHECKING:
    from fsbarrier.processes.supervisor import Child

#: A daemon needs a second or two to stop its own programs. It is killed after this many seconds.
GRACE_S = 15.0
#: If the exit codes differ, the first of these is reported, because it is closest to the root cause: "too few nodes", for example, usually
#: follows from another failure.
_NEAREST_CAUSE = (2, 4, 3, 1, 5, 6)


Children = dict[int, "Child"]


def run_nodes(
    start: Callable[[Children], None],
    follow: Callable[[Children], Mapping[int, int]],
    say: Callable[[str], None],
    at_end: Callable[[], None] = lambda: None,
    *,
    next_step: str = "; run the same command again to resume",
) -> int:
    """Start nodes, follow them, and stop those that are left, whatever happens. Returns one exit code for all.

    `start` adds each node to the given dictionary as soon as it runs; `follow` returns the exit codes of those that ended by themselves.
    `next_step`: what to do after Ctrl-C.
    """
    children: Children = {}
    with ending_signals_handled(end_once):
        try:
            start(children)
            codes = follow(children)
            stop_all(children)
        except Interrupted as stopped:
            # The nodes then say themselves that the user stopped them.
            stop_all(children, signal.SIGINT if stopped.code == EXIT_SIGINT else signal.SIGTERM)
            at_end()
            say(f"all nodes have stopped{next_step}")
            return stopped.code
        except BaseException:
            stop_all(children)
            raise
    at_end()
    return outcome(codes, say)


def stop_all(children: Mapping[int, Child], number: int = signal.SIGTERM) -> None:
    """Stop all children in parallel, with this signal, and wait for them."""
    threads = [threading.Thread(target=child.stop, args=(GRACE_S, number)) for child in children.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def coming_generation(log_path: Path) -> Path:
    """The record of the generation in which the nodes that are about to start will begin. Never raises."""
    paths = RunPaths(log_path)
    return paths.generation(max(GENERATION.parse_all(LenientStore().names(paths.generations)), default=0) + 1)


def failed_to_begin(children: Mapping[int, Child], generation: Path) -> bool:
    """Whether a node failed before the nodes began together, in this generation. The other nodes would wait for it forever.

    After that, a failed node need not stop the others: they continue without it.
    """
    return any(child.poll() for child in children.values()) and not generation.exists()


def outcome(codes: Mapping[int, int], say: Callable[[str], None]) -> int:
    """One exit code for all nodes. Ignores a node that was killed from outside if the others finished without it."""
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    for rank, number in killed.items():
        say(f"node {rank} was killed by {signal.Signals(number).name}")
    if len(killed) == len(codes):
        return 128 + next(iter(killed.values()))
    failed = [code for code in codes.values() if code > 0]
    known = [code for code in _NEAREST_CAUSE if code in failed]
    return next(iter(known + failed), 0)
