"""Starts all nodes of a run on this machine, each as a daemon in its own session: `launch local` and `run --demo`.

Validates the input and creates the run's record before starting the daemons, so that a mistake is reported once, in one line. The daemons
then need only their ranks. They end when this process ends, for whatever reason.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fsbarrier.cli.launchers.processes import Children, coming_generation, failed_to_begin, run_nodes
from fsbarrier.errors import EXIT_INTERNAL, UsageError
from fsbarrier.settings.secrecy import shown_word
from fsbarrier.settings.sources import ChosenValue
from fsbarrier.store import files
from fsbarrier.store.local_folders import scratch_dir, user_dir
from fsbarrier.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from fsbarrier.cli.start.begin import Start

Say = Callable[[str], None]


def run_all(
    chosen: tuple[ChosenValue, ...], defaults: Mapping[str, object], args: argparse.Namespace, say: Say
) -> int:
    """Validate, create or load the run's record, and run all nodes here; returns one exit code for all."""
    from fsbarrier.cli.start import begin, ranks
    from fsbarrier.view.summary import print_summary

    environ = ranks.without_launchers(os.environ)
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
        from fsbarrier.cli.start import dryrun

        return dryrun.show(start.record, start.settings, as_json=args.json)
    log_path = start.record.log_path
    return run_started(start, environ, say, lambda: print_summary(log_path))


def run_started(
    start: Start,
    environ: Mapping[str, str],
    say: Say,
    at_end: Callable[[], None],
    output: Console | None = None,
    next_step: str = "; run the same command again to resume",
) -> int:
    """Run all nodes of a run that has been validated; returns one exit code for all. `output`: where the run is shown (default: stdout).
    `next_step`: what to do after Ctrl-C."""
    log_path = start.record.log_path
    generation = coming_generation(log_path)
    with scratch_dir(user_dir(), "launch") as private:

        def start_nodes(children: Children) -> None:
            logs = _start(start, environ, children, private / "secret.toml")
            say(
                f"started {counted(len(children), 'node')} in {log_path}, output in {logs}; Ctrl-C stops them"
            )

        return run_nodes(
            start_nodes,
            lambda children: _follow(log_path, generation, children, say, output),
            say,
            at_end,
            next_step=next_step,
        )


def _start(start: Start, environ: Mapping[str, str], children: Children, secret: Path) -> Path:
    """Start the daemons and return the folder of their logs. Each one is added to `children` immediately so that the caller can stop
    it if a later step fails.

    `secret`: path of a file for values that must not appear in process lists.
    """
    from fsbarrier.processes.supervisor import Child, own_program, with_this_package

    record, settings = start.record, start.settings
    logs = record.paths.logs / f"launch_{datetime.now(UTC):%Y%m%dT%H%M%S}Z_{os.getpid()}"
    trusts = {name: getattr(settings, name) or None for name in ("shared_group", "trust_mount")}
    choices = {"iterations": start.until, **trusts, **settings.choices}
    same = [f"{name}={json.dumps(value)}" for name, value in choices.items() if value is not None]
    # Only node 0 gets the changed settings; the others take them from the run.
    changes = [
        f"{key}={'none' if value is None else json.dumps(value)}" for key, value in start.stated.items()
    ]
    if hidden := [word for word in changes if shown_word(word) != word]:
        files.write_atomic(secret, "\n".join(hidden).encode())
        changes = [*(word for word in changes if word not in hidden), "--config", str(secret)]
    for rank in range(settings.num_nodes):
        which = ["--master", *changes] if rank == 0 else ["--worker", str(rank)]
        words = [*which, "--log-path", str(record.log_path), *same]
        command, log = own_program("fsbarrier", "run", *words), logs / f"node_{rank}.log"
        children[rank] = Child.start(
            command, env=with_this_package(environ), log_file=log, name=f"node {rank}"
        )
    return logs


def _follow(
    log_path: Path, generation: Path, children: Children, say: Say, output: Console | None
) -> Mapping[int, int]:
    """Show the run live until all nodes have ended. Returns the exit codes of the nodes that ended by themselves."""
    from fsbarrier.view.live_view import follow

    follow(log_path, children, failed=lambda: failed_to_begin(children, generation), output=output)
    codes = {rank: code for rank, child in children.items() if (code := child.poll()) is not None}
    ended_by_itself = len(codes) == len(children)
    for rank, code in codes.items():
        # The reason of a refused start or a crash is only in the daemon's own output, not in the journal.
        if code in (EXIT_INTERNAL, UsageError.exit_code) or (code and not ended_by_itself):
            say(f"node {rank}: {' | '.join(children[rank].last_log_lines(1))}")
    return codes
