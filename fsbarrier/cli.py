"""The command `fsbarrier`: finds the command's module among those in fsbarrier/commands, and runs it.

Only the one that is asked for is imported; the summaries of the others stand here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import cast

import fsbarrier
from fsbarrier import run_command
from fsbarrier.errors import UsageError
from fsbarrier.run_command import Command
from fsbarrier.settings.sources import nearest

#: Name -> what it is for, in the order in which a person meets them.
COMMANDS = {
    "run": "run this node (./run.sh is the same, and makes its environment first)",
    "plan": "what a run comes to on given machines: engines, shards, memory; before anything starts",
    "launch": "start several nodes: here, through ssh, Slurm, Kubernetes, SkyPilot or dstack",
    "daemon": "offer this node to a pool, whose jobs it then runs",
    "submit": "put a run into a pool's queue",
    "jobs": "the jobs of a pool; their logs; stop one",
    "status": "where a run is, and how each node is doing",
    "runs": "the runs in a folder, one line each",
    "top": "a run, live",
    "logs": "the nodes' logs, last lines or as they come",
    "debug": "what every node's processes do at this moment, in one archive",
    "stop": "end a run on all its nodes, from any machine that sees it",
    "recover": "after a disaster: what each rank left, and the way on",
    "aggregate": "merge what the ranks saved, by hand",
    "export": "copy a policy out of a run as a Hugging Face folder, or its trajectories as a table",
    "report": "a run's figures as a file to read and to send",
    "doctor": "whether this filesystem and these nodes can carry a run",
    "bench": "how fast barriers are here, beside a bare directory scan",
    "simulate": "the protocol under faults: many seeds, virtual time",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; gives the exit code. Never raises, save for a second Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else UsageError.exit_code
    if arguments[0] == "--version":
        print(f"fsbarrier {fsbarrier.__version__}")
        return 0
    if arguments[0] == "run" and arguments[1:2] and arguments[1] in COMMANDS:
        # As one types after `./run.sh`, which starts a node and knows no other command.
        other = f"fsbarrier {arguments[1]}"
        error = UsageError(f"{arguments[1]}: a command of its own, `{other}`; in a clone `.venv/bin/{other}`")
        print(run_command.error_text(error), file=sys.stderr)
        return error.exit_code
    return run_command.run(arguments[0], arguments[1:], load_command)


def overview() -> str:
    """What `fsbarrier --help` shows; imports no command."""
    lines = [
        "usage: fsbarrier COMMAND [flags]",
        "",
        "Synchronous multi-node RL post-training: one command per node and a shared directory.",
        "",
        *(f"  {name:<10} {summary}" for name, summary in COMMANDS.items()),
        "",
        "example: fsbarrier run --demo",
        "`fsbarrier COMMAND --help` explains a command; docs/settings.md lists every setting.",
    ]
    return "\n".join(lines) + "\n"


def load_command(name: str) -> Command:
    """Import the module of a command. Raises UsageError for an unknown one."""
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UsageError(f"no command {name!r}{hint}")
    if importlib.util.find_spec(f"fsbarrier.commands.{name}") is None:
        raise UsageError(f"{name}: not part of this version ({fsbarrier.__version__})")
    return cast(Command, importlib.import_module(f"fsbarrier.commands.{name}"))
