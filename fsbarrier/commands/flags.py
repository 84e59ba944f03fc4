"""The flags that commands share: what `run` and `launch` begin a run with, and the one that names a run for all the others."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fsbarrier import files
from fsbarrier.errors import UsageError
from fsbarrier.rundir.runrecord import RunRecord, load
from fsbarrier.settings.hidden import shown_word
from fsbarrier.settings.sources import FLAGS, ChosenValue, with_range_of_nodes
from fsbarrier.start import preflight

_HELP = {
    "--data-path": ("P", "read-only shared data: train and test as .jsonl or .parquet, a model cache"),
    "--log-path": (
        "P",
        "the run directory, the same on all nodes (default: $FSBARRIER_LOG_PATH, else runs/default)",
    ),
    "--model": (
        "M",
        "Hugging Face model folder, or a name below the data path or in the local cache; nothing is downloaded",
    ),
    "--program": ("NAME|FILE.py", "what an iteration is: rl (default), toy, ping, or your own"),
    "--rl-phase": ("rollout|update|both", "phases 0-6, 7-13, or all (default)"),
    "--rollout-split": ("train-only|eval-only", "with --rl-phase rollout"),
    "--eval-interval": (
        "N",
        "evaluate when iteration %% N == 1; every iteration for 1 (default), never for 0",
    ),
    "--num-nodes": (
        "N|A:B",
        "nodes of the run (default 1); A:B begins with at least A, takes in others as they come, and ends with fewer than A",
    ),
    "--rank-weights": ("w0,w1,...", "one positive weight a node, its share of the tasks (default: equal)"),
    "--min-nodes": ("M", "end with exit code 5 when fewer nodes are left (default 1)"),
    "--expect-gpus": (
        "N",
        "refuse to start with fewer accelerators on all nodes together; says who lacks them",
    ),
    "--on-node-failure": ("shrink|wait|abort", "go on with the others (default), wait for the node, or end"),
    "--rejoin-timeout": (
        "S",
        "with --on-node-failure wait: seconds until the run ends without it (default 1800)",
    ),
    "--iterations": ("N", "stop after iteration N (default: endless)"),
    "--debug-mode": ("", "do not manage vLLM: use the server that is there (engine.url)"),
    "--shared-group": ("", "let the group read and write the run directory"),
}


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Everything that says what a run is, but not which node this is; and the dry run."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the settings and every node's commands; start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    for flag, (value, text) in _HELP.items():
        if value:
            parser.add_argument(flag, metavar=value, help=text)
        else:
            parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument(
        "--config", metavar="FILE.toml", help="settings from a file; flags and key=value win over it"
    )
    parser.add_argument(
        "--resume", action="store_true", help="changes nothing (resuming is the rule), but refuses a new run"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="any setting: rollout.temperature=0.8"
    )


def gather(args: argparse.Namespace) -> tuple[ChosenValue, ...]:
    """What was typed, the weakest source first: file, flags, key=value. Raises UsageError."""
    from fsbarrier.settings.resolve import known_names
    from fsbarrier.settings.sources import from_file, from_flags, from_words

    known = known_names()
    found = from_file(Path(args.config), known) if args.config else []
    found += from_flags({flag: getattr(args, flag[2:].replace("-", "_")) for flag in FLAGS}, known)
    return with_range_of_nodes((*found, *from_words(args.settings, known)))


def as_typed(args: argparse.Namespace) -> list[str]:
    """The words that say the same to another `fsbarrier run`."""
    found = ["--resume"] if args.resume else []
    for flag, (takes_value, _) in _HELP.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value not in (None, False):
            found += [flag, value] if takes_value else [flag]
    if args.config:
        found += ["--config", args.config]
    return [*found, *args.settings]


def words_for_others(args: argparse.Namespace, command: str) -> tuple[str, ...]:
    """The same words, for nodes that somebody else starts. Raises UsageError where one of them has a key or a password."""
    words = tuple(as_typed(args))
    for word in words:
        if shown_word(word) != word:
            raise UsageError(
                f"{command}: {shown_word(word)} would stand in files, and in lists of processes that others can read; put it "
                "into a file that only you can read, and give that with --config"
            )
    return words


def add_log_path(parser: argparse.ArgumentParser) -> None:
    """The flag by which a command finds its run."""
    parser.add_argument(
        "--log-path", metavar="P", help=_HELP["--log-path"][1].replace(", the same on all nodes", "")
    )


def find_log_path(args: argparse.Namespace) -> Path:
    """The run directory that a command is about; it need not exist."""
    return preflight.absolute(args.log_path) if args.log_path else preflight.default_log_path(os.environ)


def find_run(args: argparse.Namespace) -> RunRecord:
    """The run that a command is about. What the command writes there is open to whom the run is. Raises UsageError, StoreError."""
    record = load(find_log_path(args))
    files.set_shared_group(record.settings.shared_group)
    return record


def whole_number(text: str) -> int:
    """An argument that is 0 or more. argparse's own message would name this function instead of the mistake."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


def say(line: str) -> None:
    """Tell the user what takes long."""
    print(f"fsbarrier: {line}", file=sys.stderr, flush=True)
