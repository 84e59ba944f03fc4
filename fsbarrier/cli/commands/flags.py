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
from fsbarrier.settings.secrecy import shown_word
from fsbarrier.settings.sources import FLAGS, RUN_FLAGS, ChosenValue, setting_of, with_range_of_nodes
from fsbarrier.store import files, reading, trusted_folder

CONFIG = "read settings from a file; flags and key=value override it"


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


def add(
    parser: argparse._ActionsContainer,
    flags: Mapping[str, str],
    types: Mapping[str, Callable[[str], float | str]] = TYPES,
    **defaults: object,
) -> None:
    """Add flags to a command: `{"-n --lines N": help, "--follow": help}`; a flag with `N*` may be repeated. `types` says which metavars
    stand for numbers.

    `defaults`: by the flag's name without hyphens. The default of other flags is None, and of those without a metavar False.
    """
    for words, text in flags.items():
        *names, last = words.split()
        if last.startswith("-"):
            parser.add_argument(*names, last, action="store_true", help=text)
        else:
            default, value = defaults.get(names[-1][2:].replace("-", "_")), last.rstrip("*")
            action, kind = "store" if last == value else "append", types.get(value, str)
            parser.add_argument(*names, metavar=value, action=action, type=kind, default=default, help=text)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that define a run, and --dry-run; not those that say which node this is."""
    dry_run = "print the settings and every node's commands without starting anything"
    add(parser, {"--dry-run": dry_run, "--json": "with --dry-run: as JSON"})
    # The values stay text here; the settings that they stand for say what they must be.
    add(parser, RUN_FLAGS, types={})
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
    chosen = from_file(Path(args.config)) if args.config else []
    chosen += from_flags({flag: getattr(args, setting_of(flag)) for flag in FLAGS}, known)
    return with_range_of_nodes((*chosen, *from_words(args.settings, known)))


def as_typed(args: argparse.Namespace) -> list[str]:
    """The arguments that repeat these choices in another `fsbarrier run`."""
    words = ["--resume"] if args.resume else []
    for flag in FLAGS:
        value = getattr(args, setting_of(flag))
        if value not in (None, False):
            words += [flag] if value is True else [flag, value]
    if args.config:
        words += ["--config", args.config]
    return [*words, *args.settings]


def words_for_others(args: argparse.Namespace, command: str) -> tuple[str, ...]:
    """`as_typed` for the nodes that a launcher starts. Raises UsageError if an argument contains a key or a password."""
    words = tuple(as_typed(args))
    for word in words:
        if shown_word(word) != word:
            raise UsageError(
                f"{command}: {shown_word(word)} would be visible to other users in files and process lists; put it into a file that "
                "only you can read, and pass that with --config"
            )
    return words


def add_log_path(parser: argparse.ArgumentParser) -> None:
    """Add the flag that selects the run, and its folder as an argument."""
    folder = "the run directory, as --log-path"
    parser.add_argument("run_folder", nargs="?", metavar="RUN", help=folder)
    add(parser, {"--log-path P": RUN_FLAGS["--log-path P"].replace(", the same on all nodes", "")})


def take_settings(args: argparse.Namespace) -> None:
    """If the argument for a run's folder is a `key=value` word, move it to the settings. For commands that take both."""
    if args.run_folder and "=" in args.run_folder and not Path(args.run_folder).exists():
        args.settings.insert(0, args.run_folder)
        args.run_folder = None


def find_log_path(args: argparse.Namespace) -> Path:
    """The run directory selected by the flags or the argument; it need not exist. Raises UsageError."""
    folder = getattr(args, "run_folder", None)
    if folder and args.log_path:
        raise UsageError(f"{folder} and --log-path {args.log_path}: name the run directory once")
    if folder:
        return preflight.absolute(folder)
    return preflight.absolute(args.log_path) if args.log_path else preflight.default_log_path(os.environ)


#: the flags of commands that load a run's program or follow its settings
TRUST = {
    "--shared-group": "trust the owner's group, whose members can write to the run, with your account",
    "--trust-mount": "trust a mount that sets all modes itself: nobody else can write to its export",
}


def find_own_run(args: argparse.Namespace) -> RunRecord:
    """`find_run` for a command that loads the run's program: only of a run that nobody else could have written."""
    log_path = find_log_path(args)
    trusts = {"shared_group": args.shared_group, "trust_mount": args.trust_mount}
    trusted_folder.check(log_path, **trusts, named="--log-path", inside=STEERING)
    return find_run(args)


def find_run(args: argparse.Namespace) -> RunRecord:
    """Load the selected run, and apply its file permissions to whatever the command writes. Raises UsageError, StoreError."""
    record = load(find_log_path(args))
    files.set_shared_group(record.settings.shared_group)
    return record


def say(line: str) -> None:
    """Print a progress message."""
    print(f"fsbarrier: {line}", file=sys.stderr, flush=True)


def write_file(flag: str, name: str | Path, data: bytes) -> Path:
    """Write a file that the user names with `flag`, atomically, and return its path. Raises UsageError."""
    out = preflight.absolute(name)
    try:
        if out.is_dir():
            raise UsageError(f"{flag} {out}: is a directory; name a file")
        reading.check_may_replace(out)
        files.write_atomic(out, data)
    except OSError as error:
        raise UsageError(
            f"{flag} {out}: cannot write the file: {error.strerror or error}; name another file with {flag}"
        ) from None
    return out
