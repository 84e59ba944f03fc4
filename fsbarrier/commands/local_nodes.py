"""All nodes of a run on this machine, each a daemon in a session of its own: `launch local` and `run --demo`.

Everything is checked here first and the run's record is made here, so that a mistake is one line on this terminal. The daemons then
need their ranks and nothing else. They end with this process, however it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from fsbarrier.commands.flags import say
from fsbarrier.errors import EXIT_INTERNAL, UsageError
from fsbarrier.protocol.wording import counted
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.supervision.signals import ENDING, handled

if TYPE_CHECKING:
    from fsbarrier.start.begin import Start
    from fsbarrier.supervision.supervisor import Child

#: A daemon needs a second or two to end its own programs. After this many seconds it is killed.
GRACE_S = 15.0
#: Environment variables in which a launcher may have said which node *this* process is.
_LAUNCHERS = ("NODE_RANK", "RANK", "WORLD_SIZE", "NNODES", "NUM_NODES")
#: Of several exit codes, the first in this list is nearest to the cause: too few nodes, say, is mostly the result of another failure.
_NEAREST_CAUSE = (2, 4, 3, 1, 5, 6)


class Interrupted(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_all(chosen: tuple[ChosenValue, ...], defaults: Mapping[str, object], args: argparse.Namespace) -> int:
    """Check everything, make or find the run's record, then run all its nodes here; one exit code for all."""
    from fsbarrier.start import begin

    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    request = begin.Request(
        chosen=chosen,
        environ=environ,
        master=True,
        resume=args.resume,
        dry_run=args.dry_run,
        defaults=defaults,
    )
    start = begin.begin(request, say)
    if args.dry_run:
        from fsbarrier.start import dryrun

        return dryrun.show(start.record, start.settings, as_json=args.json)
    log_path = start.record.log_path
    with _signals():
        children: dict[int, Child] = {}
        try:
            logs = _start(start, environ, children)
            say(f"{counted(len(children), 'node')} in {log_path}, output in {logs}; Ctrl-C ends them")
            _follow(log_path, children)
        except Interrupted as stopped:
            _stop(children)
            _print_summary(log_path)
            say("everything that was started here has ended; the same command goes on from where it was")
            return 128 + stopped.number
        except BaseException:
            _stop(children)
            raise
        return outcome({rank: child.poll() or 0 for rank, child in children.items()})


def _start(start: Start, environ: Mapping[str, str], children: dict[int, Child]) -> Path:
    """Start the daemons, each into `children` at once, so that whatever happens they can be stopped. Gives their logs' folder."""
    from fsbarrier.supervision.supervisor import Child

    record, settings = start.record, start.settings
    logs = record.paths.logs / f"launch_{datetime.now(UTC):%Y%m%dT%H%M%S}Z_{os.getpid()}"
    choices = [] if start.until is None else ["--iterations", str(start.until)]
    choices += ["--rl-phase", settings.rl_phase]
    if settings.rollout_split:
        choices += ["--rollout-split", settings.rollout_split]
    if settings.expect_gpus:
        choices += ["--expect-gpus", str(settings.expect_gpus)]
    python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
    for rank in range(settings.num_nodes):
        which = ["--worker", str(rank), "--log-path", str(record.log_path)]
        command, log = [*python, "-m", "fsbarrier", "run", *which, *choices], logs / f"node_{rank}.log"
        children[rank] = Child.start(command, env=environ, log_file=log, name=f"node {rank}")
    return logs


def _follow(log_path: Path, children: Mapping[int, Child]) -> None:
    """Show the run until all its nodes have ended, then what came of it. A node that was refused ends the others."""
    from fsbarrier.view.live_view import follow

    follow(log_path, children)
    codes = {rank: child.poll() for rank, child in children.items()}
    _stop({rank: child for rank, child in children.items() if codes[rank] is None})
    for rank, code in codes.items():
        # Only its own output says why a daemon refused or crashed; the journal does not know.
        if code in (EXIT_INTERNAL, UsageError.exit_code):
            say(f"node {rank}: {' | '.join(children[rank].last_log_lines(1))}")
    _print_summary(log_path)


def _print_summary(log_path: Path) -> None:
    from fsbarrier.view.summary import print_summary

    print_summary(log_path)


def outcome(codes: Mapping[int, int]) -> int:
    """One exit code for all nodes. A node killed from outside counts only where the others did not finish without it."""
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    for rank, number in killed.items():
        say(f"node {rank} was killed by {signal.Signals(number).name}")
    if len(killed) == len(codes):
        return 128 + next(iter(killed.values()))
    failed = [code for code in codes.values() if code > 0]
    known = [code for code in _NEAREST_CAUSE if code in failed]
    return next(iter(known + failed), 0)


def _stop(children: Mapping[int, Child]) -> None:
    """End all of them at the same time; returns when nothing is left."""
    threads = [
        threading.Thread(target=child.stop, kwargs={"grace_s": GRACE_S}) for child in children.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _signals() -> Iterator[None]:
    """While this lasts the first SIGINT, SIGTERM or SIGHUP raises Interrupted; later ones change nothing, since the end is under way."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    with handled(ENDING, handle):
        yield
