"""The `fsbarrier` command: dispatches to the modules in fsbarrier/cli/commands.

Imports only the requested command. The summaries for --help are listed here so that the other modules need not be imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import cast

import fsbarrier
from fsbarrier.cli import early_interrupts, run_command
from fsbarrier.cli.run_command import CommandModule
from fsbarrier.errors import UsageError
from fsbarrier.settings.sources import nearest

#: Name -> summary, in the order in which a user needs them.
USERS = {
    "run": "run this node (./run.sh does the same, but creates its environment first)",
    "launch": "start several nodes: on this machine, or through ssh, Slurm, Kubernetes, SkyPilot or dstack",
    "status": "show the progress of a run and the state of each node",
    "top": "watch a run live",
    "view": "look at runs in a browser: curves, every answer, times, logs",
    "logs": "show or follow the nodes' logs",
    "stop": "end a run on all its nodes",
    "runs": "list the runs in a folder",
    "report": "write a run's metrics to a file",
    "export": "export a policy as a Hugging Face model folder, or trajectories as a table",
    "eval": "evaluate a trained policy on held-out tasks, with the run's settings",
    "serve": "serve a trained policy, or a model, over an OpenAI-compatible API on this machine",
    "chat": "talk to a trained policy",
    "rm": "remove a run that has ended",
    "recover": "after a disaster: check what each rank left, and repair the run",
    "aggregate": "merge the ranks' trajectory files by hand",
    "doctor": "check whether a filesystem and the nodes can support a run",
    "check": "check tasks, model and reward together, without an engine",
    "plan": "estimate engines, sharding and memory of a run on given machines, before starting it",
    "guard": "run any command so that everything it starts ends with it",
    "debug": "collect the logs of all nodes, with the stacks of this host's programs, in one archive",
}
POOL = {
    "daemon": "add this node to a pool and run its jobs",
    "submit": "add a run to a pool's queue",
    "jobs": "list a pool's jobs, show their logs, stop one",
}
COMMANDS = {**USERS, **POOL}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Never raises, except for a second Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    early_interrupts.imported()
    if not arguments:
        print(overview(), end="", file=sys.stderr)
        return UsageError.exit_code
    if arguments[0] == "help" and arguments[1:]:
        arguments = [arguments[1], "--help"]
    if arguments[0] in ("-h", "--help", "help"):
        return run_command.show(overview())
    if arguments[0] == "--version":
        return run_command.show(f"fsbarrier {fsbarrier.__version__}\n")
    if arguments[0] in ("--complete", "--install-completion"):
        return _completion(arguments)
    if arguments[0] == "run" and arguments[1:2] and arguments[1] in COMMANDS:
        # A user typed `./run.sh COMMAND`, but run.sh only supports `run`.
        other = f"fsbarrier {arguments[1]}"
        error = UsageError(
            f"{arguments[1]} is a separate command: type `{other}`, in a clone `.venv/bin/{other}`"
        )
        print(run_command.error_text(error), file=sys.stderr)
        return error.exit_code
    return run_command.run(arguments[0], arguments[1:], load_command)


def _completion(arguments: Sequence[str]) -> int:
    """`--install-completion`, and `--complete WORDS`, which the script that it writes calls."""
    from fsbarrier.cli import completion

    try:
        if arguments[0] == completion.INSTALL:
            return run_command.show(completion.install(os.environ))
        found = completion.candidates(arguments[1:], [*COMMANDS], load_command)
        return run_command.show("".join(f"{word}\n" for word in found))
    except UsageError as error:
        print(run_command.error_text(error), file=sys.stderr)
        return error.exit_code


def overview() -> str:
    """The text of `fsbarrier --help`; imports no command."""
    lines = [
        "usage: fsbarrier COMMAND [flags]",
        "",
        "Synchronous multi-node RL post-training: one command per node and a shared directory.",
        "",
        *(f"  {name:<10} {summary}" for name, summary in USERS.items()),
        "",
        "for a pool of nodes:",
        *(f"  {name:<10} {summary}" for name, summary in POOL.items()),
        "",
        "example: fsbarrier run --demo",
        "`fsbarrier COMMAND --help` explains a command; docs/settings.md lists every setting.",
        "`fsbarrier --install-completion` makes your shell complete commands, flags and settings.",
    ]
    return "\n".join(lines) + "\n"


def load_command(name: str) -> CommandModule:
    """Import the module of a command. Raises UsageError for an unknown one."""
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}{hint}")
    return cast(CommandModule, importlib.import_module(f"fsbarrier.cli.commands.{name}"))
