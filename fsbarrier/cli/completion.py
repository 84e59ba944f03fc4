"""Completes words of a command line in a shell: `fsbarrier --install-completion` writes a small script for the user's shell, which asks
`fsbarrier --complete WORDS` for the candidates of the last word.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fsbarrier.cli.run_command import CommandModule, Parser
from fsbarrier.errors import UsageError

INSTALL, COMPLETE = "--install-completion", "--complete"
#: shell -> where its script goes (below $XDG_DATA_HOME or $XDG_CONFIG_HOME), the default of that variable, the script, and what to do next
BASH = """# Written by fsbarrier --install-completion.
_fsbarrier() {
  local IFS=$'\\n'
  COMPREPLY=($(fsbarrier --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
  case "${COMPREPLY[0]}" in *=) compopt -o nospace ;; esac
}
complete -o default -F _fsbarrier fsbarrier
"""
ZSH = """#compdef fsbarrier
# Written by fsbarrier --install-completion.
local -a found=(${(f)"$(fsbarrier --complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
if (( $#found )); then compadd -S '' -- $found; else _files; fi
"""
FISH = """# Written by fsbarrier --install-completion.
complete -c fsbarrier -a '(set -l w (commandline -opc) (commandline -ct); fsbarrier --complete $w[2..-1] 2>/dev/null)'
"""
SCRIPTS = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/fsbarrier", BASH, ""),
    "zsh": (
        *("XDG_DATA_HOME", ".local/share", "zsh/site-functions/_fsbarrier", ZSH),
        "; add `fpath+={folder}` above `compinit` in ~/.zshrc",
    ),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/fsbarrier.fish", FISH, ""),
}


def install(environ: Mapping[str, str]) -> str:
    """Write the script for the user's shell ($SHELL); returns what to tell the user. Raises UsageError."""
    shell = Path(environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        raise UsageError(f"{INSTALL}: SHELL={environ.get('SHELL', '')}: must be one of {', '.join(SCRIPTS)}")
    variable, default, name, script, more = SCRIPTS[shell]
    base = environ.get(variable) or Path(os.path.expanduser("~"), default)
    path = Path(base, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{INSTALL}: {path}: {error.strerror or error}") from None
    return f"wrote {path}{more.format(folder=path.parent)}; it works in the next {shell}\n"


def candidates(
    words: Sequence[str], commands: Sequence[str], load: Callable[[str], CommandModule]
) -> list[str]:
    """What the last word can become, except file names: the shell completes those itself. Raises UsageError for an unknown command."""
    *before, last = words or [""]
    if not before:
        return _beginning([*commands, "--help", "--version", INSTALL], last)
    parser = Parser(prog=before[0])
    load(before[0]).add_arguments(parser)
    return _beginning([*_possible(parser, before[-1], last)], last)


def _possible(parser: argparse.ArgumentParser, previous: str, last: str) -> Iterator[str]:
    actions = parser._actions
    flag = next((action for action in actions if previous in action.option_strings), None)
    if flag is not None and flag.nargs != 0:
        # The value of a flag.
        yield from map(str, flag.choices or ())
    elif last.startswith("-"):
        for action in actions:
            yield from action.option_strings
    else:
        for action in actions:
            if not action.option_strings and action.choices:
                yield from map(str, action.choices)
            if action.dest == "settings":
                from fsbarrier.settings.sections import known_names

                yield from (f"{name}=" for name in known_names() if ".NAME." not in name)


def _beginning(names: Sequence[str], begin: str) -> list[str]:
    return sorted(name for name in names if name.startswith(begin))
