"""`fsbarrier launch local`: several nodes of one run on this machine, each a daemon in a session of its own.

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
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fsbarrier.commands import flags
from fsbarrier.commands.flags import say
from fsbarrier.errors import EXIT_INTERNAL, UsageError
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.start import preflight
from fsbarrier.supervision.signals import ENDING, handled

if TYPE_CHECKING:
    from fsbarrier.start.startup import Start
    from fsbarrier.supervision.supervisor import Child

SUMMARY = """Start several nodes on this machine, with one live view; Ctrl-C ends them all.

On several machines there is nothing to launch from one place. Type (or let ssh, Slurm, Kubernetes type) on each node, in
one clone on the shared filesystem:

  ./run.sh --master --num-nodes 3        on the first node
  ./run.sh --worker 1                    on the second, and so on
  srun --nodes 3 --ntasks-per-node 1 ./run.sh    Slurm: ranks and count come from its variables"""
EXAMPLE = "fsbarrier launch local --nodes 3 --program toy --iterations 2"

DEMO_NODES = 3
GRACE_S = 15.0  # a daemon needs a second or two to end its own programs; what is left after this is killed
#: Environment variables in which a launcher may have said which node *this* process is.
_LAUNCHERS = ("NODE_RANK", "RANK", "WORLD_SIZE", "NNODES", "NUM_NODES")
#: Of several exit codes the one nearest to the cause: too few nodes, for one, is mostly what came of another's failure.
_NEAREST_CAUSE = (2, 4, 3, 1, 5, 6)


class Interrupted(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", default="", metavar="local", help="where the nodes are to run")
    parser.add_argument("--nodes", metavar="N", help="how many (default 1, or what the run's record says)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the settings and every node's commands; start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    if args.where != "local":
        said = f"launch {args.where}: not" if args.where and "=" not in args.where else "launch: say"
        raise UsageError(
            f"{said} `local`; on other machines type ./run.sh on each node (see fsbarrier launch --help)"
        )
    if args.nodes is not None and args.num_nodes is not None and args.nodes != args.num_nodes:
        raise UsageError(f"--nodes {args.nodes} and --num-nodes {args.num_nodes} differ; one is enough")
    asked = "--nodes" if args.nodes is not None else "--num-nodes"
    args.num_nodes = args.nodes if args.nodes is not None else args.num_nodes
    chosen = tuple(
        replace(item, source=asked) if item.source == "--num-nodes" else item for item in flags.gather(args)
    )
    return local(chosen, {}, args)


def demo(args: argparse.Namespace, chosen: tuple[ChosenValue, ...]) -> int:
    """`run --demo`: the built-in task on three nodes of this machine; an unfinished one is gone on with."""
    from fsbarrier.start.demo_tasks import DEMO_SETTINGS

    for item in chosen:
        if item.key in ("data_path", "model"):
            raise UsageError(f"{item.source}: the demo has its own task and model; drop it or drop --demo")
    defaults = {"num_nodes": DEMO_NODES, **DEMO_SETTINGS}
    if not any(item.key == "log_path" for item in chosen):
        chosen = (
            *chosen,
            ChosenValue(
                "log_path", str(demo_path(preflight.default_log_path(os.environ).parent)), "--log-path"
            ),
        )
    return local(chosen, defaults, args)


def demo_path(runs: Path) -> Path:
    """The first of demo, demo-2, demo-3, ... in `runs` that is new or unfinished."""
    number = 1
    while True:
        path = runs / ("demo" if number == 1 else f"demo-{number}")
        if not is_finished(path):
            return path
        number += 1


def is_finished(log_path: Path) -> bool:
    """Whether the run there has done all its iterations, as its nodes' last heartbeats say."""
    from fsbarrier.rundir.heartbeats import read_beats

    try:
        return any(beat.state == "finished" for beat in read_beats(log_path).values())
    except OSError:
        return False


# --- the nodes ----------------------------------------------------------------------------------------------------------


def local(chosen: tuple[ChosenValue, ...], defaults: Mapping[str, Any], args: argparse.Namespace) -> int:
    """Check everything, make or find the run's record, then run all its nodes here; the most telling exit code."""
    from fsbarrier.start import startup

    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    request = startup.Request(
        chosen=chosen,
        environ=environ,
        master=True,
        resume=args.resume,
        dry_run=args.dry_run,
        defaults=defaults,
    )
    start = startup.begin(request, say)
    if args.dry_run:
        from fsbarrier.start import dryrun

        return dryrun.show(start.record, start.settings, as_json=args.json)
    with _signals():
        children: dict[int, Child] = {}
        try:
            _start(start, environ, children)
            say(
                f"{len(children)} nodes in {start.record.log_path}, output in {_folder(children)}; Ctrl-C ends them"
            )
            follow(start.record.log_path, children)
        except Interrupted as stopped:
            _stop(children)
            _tell_end(start.record.log_path)
            return 128 + stopped.number
        except BaseException:
            _stop(children)
            raise
        return outcome({rank: child.poll() or 0 for rank, child in children.items()})


def _start(start: Start, environ: Mapping[str, str], children: dict[int, Child]) -> None:
    from fsbarrier.supervision.supervisor import Child

    record, settings = start.record, start.settings
    logs = record.paths.logs / f"launch_{datetime.now(UTC):%Y%m%dT%H%M%S}Z_{os.getpid()}"
    choices = [] if start.until is None else ["--iterations", str(start.until)]
    choices += ["--rl-phase", settings.rl_phase]
    if settings.rollout_split:
        choices += ["--rollout-split", settings.rollout_split]
    python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
    for rank in range(settings.num_nodes):
        who = ["--worker", str(rank), "--log-path", str(record.log_path), *choices]
        command, log = [*python, "-m", "fsbarrier", "run", *who], logs / f"node_{rank}.log"
        children[rank] = Child.start(command, env=environ, log_file=log, name=f"node {rank}")


def _folder(children: Mapping[int, Child]) -> Path:
    return children[0].log_file.parent


def follow(log_path: Path, children: Mapping[int, Child]) -> None:
    """Show the run until all its nodes have ended, then what came of it. A node that was refused ends the others."""
    from fsbarrier.view import live_view
    from fsbarrier.view.summary import print_summary

    live_view.follow(log_path, children)
    codes = {rank: child.poll() for rank, child in children.items()}
    _stop({rank: child for rank, child in children.items() if codes[rank] is None})
    for rank, code in codes.items():
        if code in (EXIT_INTERNAL, UsageError.exit_code):  # what it said, the journal does not know
            say(f"node {rank}: {' | '.join(children[rank].last_log_lines(1))}")
    print_summary(log_path)


def _tell_end(log_path: Path) -> None:
    from fsbarrier.view.summary import print_summary

    print_summary(log_path)
    say("everything that was started here has ended; the same command goes on from where it was")


def outcome(codes: Mapping[int, int]) -> int:
    """One exit code for all nodes. A node killed from outside counts only where the others did not finish without it."""
    own = {rank: code for rank, code in codes.items() if code >= 0}
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    failed = [code for code in own.values() if code != 0]
    for rank, number in killed.items():
        say(f"node {rank} was killed by {signal.Signals(number).name}")
    if not failed:
        return 0 if own else 128 + next(iter(killed.values()))
    return min(
        failed, key=lambda code: _NEAREST_CAUSE.index(code) if code in _NEAREST_CAUSE else len(_NEAREST_CAUSE)
    )


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
    """While this lasts the first SIGINT, SIGTERM or SIGHUP raises Interrupted; the end then is under way, and more change nothing."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    with handled(ENDING, handle):
        yield
