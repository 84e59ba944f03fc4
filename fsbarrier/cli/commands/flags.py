"""Flags shared by several commands: those that define a run (`run`, `launch`, `submit`), and --log-path, which selects one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.rundir.runrecord import STEERING, RunRecord, load
from fsbarrier.settings.hidden import shown_word
from fsbarrier.settings.sources import FLAGS, ChosenValue, with_range_of_nodes
from fsbarrier.store import files, trusted_folder

CONFIG = "read settings from a file; flags and key=value override it"
_HELP = {
    "--data-path": ("P", "read-only shared data: train and test as .jsonl or .parquet, and a model cache"),
    "--log-path": (
        "P",
        "the run directory, the same on all nodes (default: $FSBARRIER_LOG_PATH, else runs/default)",
    ),
    "--model": (
        "M",
        "Hugging Face model: a folder, or a name in the data path or the local cache; nothing is downloaded",
    ),
    "--program": (
        "NAME|FILE.py",
        "the program of an iteration: rl (default), sft, toy, ping, or your own file",
    ),
    "--rl-phase": ("rollout|update|both", "run phases 0-6, 7-13, or all (default)"),
    "--rollout-split": (
        "train-only|eval-only",
        "with --rl-phase rollout: only the training rollout, or only the evaluation",
    ),
    "--eval-interval": (
        "N",
        "evaluate when iteration %% N == 1 (default 1: every iteration; 0: never)",
    ),
    "--num-nodes": (
        "N|A:B",
        "number of nodes (default 1); A:B: start with at least A, admit up to B, end the run below A",
    ),
    "--rank-weights": ("w0,w1,...", "one positive weight per node: its share of the tasks (default: equal)"),
    "--min-nodes": ("M", "end the run with exit code 5 when fewer nodes are left (default 1)"),
    "--expect-gpus": (
        "N",
        "refuse to start if all nodes together have fewer accelerators; names the nodes that lack them",
    ),
    "--on-node-failure": (
        "shrink|wait|abort",
        "continue with the other nodes (default), wait for the node, or end the run",
    ),
    "--iterations": ("N", "stop after iteration N (default: run until stopped)"),
    "--debug-mode": ("", "do not start or stop vLLM; use the server that is already running (engine.url)"),
    "--shared-group": ("", "give the owner's group read and write access to the run directory"),
}


def whole_number(text: str) -> int:
    """Parse an argument that must be 0 or more. With `type=int` argparse's own message would be less clear."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


#: The metavars of numbers; the values of all others are text.
TYPES: dict[str, Callable[[str], float | str]] = {
    **dict.fromkeys("AKNRV", whole_number),
    **dict.fromkeys("GS", float),
}


def add(parser: argparse._ActionsContainer, flags: Mapping[str, str], **defaults: object) -> None:
    """Add flags to a command: `{"-n --lines N": help, "--follow": help}`. Whether a value is a number is told by its metavar (`TYPES`).

    `defaults`: those that are not None (or, without a metavar, False), by the flag's name without hyphens.
    """
    for words, text in flags.items():
        *names, last = words.split()
        if last.startswith("-"):
            parser.add_argument(*names, last, action="store_true", help=text)
        else:
            default = defaults.get(names[-1][2:].replace("-", "_"))
            parser.add_argument(*names, metavar=last, type=TYPES.get(last, str), default=default, help=text)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that define a run, and --dry-run; not those that say which node this is."""
    dry_run = "print the settings and every node's commands without starting anything"
    add(parser, {"--dry-run": dry_run, "--json": "with --dry-run: as JSON"})
    for flag, (value, text) in _HELP.items():
        if value:
            parser.add_argument(flag, metavar=value, help=text)
        else:
            parser.add_argument(flag, action="store_true", help=text)
    resume = "resume only, refuse to start a new run (without it, an existing run is resumed too)"
    add(parser, {"--config FILE.toml": CONFIG, "--resume": resume})
    add_settings(parser, "rollout.temperature=0.8")


def add_settings(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help=f"any setting, for example {example}"
    )


def gather(args: argparse.Namespace) -> tuple[ChosenValue, ...]:
    """The user's choices, lowest precedence first: file, flags, key=value. Raises UsageError."""
    from fsbarrier.settings.sections import known_names
    from fsbarrier.settings.sources import from_file, from_flags, from_words

    known = known_names()
    found = from_file(Path(args.config)) if args.config else []
    found += from_flags({flag: getattr(args, flag[2:].replace("-", "_")) for flag in FLAGS}, known)
    return with_range_of_nodes((*found, *from_words(args.settings, known)))


def as_typed(args: argparse.Namespace) -> list[str]:
    """The arguments that repeat these choices in another `fsbarrier run`."""
    found = ["--resume"] if args.resume else []
    for flag, (takes_value, _) in _HELP.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value not in (None, False):
            found += [flag, value] if takes_value else [flag]
    if args.config:
        found += ["--config", args.config]
    return [*found, *args.settings]


def words_for_others(args: argparse.Namespace, command: str) -> tuple[str, ...]:
    """The same arguments for nodes that a launcher starts. Raises UsageError if one contains a key or a password."""
    words = tuple(as_typed(args))
    for word in words:
        if shown_word(word) != word:
            raise UsageError(
                f"{command}: {shown_word(word)} would be visible to other users in files and process lists; put it into a file that "
                "only you can read, and pass that with --config"
            )
    return words


def add_log_path(parser: argparse.ArgumentParser) -> None:
    """Add the flag that selects the run."""
    parser.add_argument(
        "--log-path", metavar="P", help=_HELP["--log-path"][1].replace(", the same on all nodes", "")
    )


def find_log_path(args: argparse.Namespace) -> Path:
    """The run directory selected by the flags; it need not exist."""
    return preflight.absolute(args.log_path) if args.log_path else preflight.default_log_path(os.environ)


def find_own_run(args: argparse.Namespace) -> RunRecord:
    """`find_run` for a command that loads the run's program: only of a run that nobody else could have written."""
    log_path = find_log_path(args)
    trusted_folder.check(log_path, shared_group=args.shared_group, named="--log-path", inside=STEERING)
    return find_run(args)


def find_run(args: argparse.Namespace) -> RunRecord:
    """Load the selected run, and apply its file permissions to whatever the command writes. Raises UsageError, StoreError."""
    record = load(find_log_path(args))
    files.set_shared_group(record.settings.shared_group)
    return record


def say(line: str) -> None:
    """Print a progress message."""
    print(f"fsbarrier: {line}", file=sys.stderr, flush=True)
