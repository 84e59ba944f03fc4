"""Recognises what looks like a credential, in names of variables and in commands, which everybody on a host can read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fsbarrier.errors import UsageError
from fsbarrier.wording import without_passwords

if TYPE_CHECKING:
    from fsbarrier.settings.sections import Settings

#: A part of a variable's name, between underscores, that marks it as a secret.
SECRET = re.compile(
    r"(^|_)(\w*KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)

#: a flag or an assignment and its value, in a command or in JSON
_GIVEN = re.compile(
    r"""(?<!\S)--?(?P<flag>[\w-]+)(?:=|\s+)["']?(?P<value>[^\s"']+)|(?P<name>[\w-]+)["']?\s*[=:]\s*["']?(?P<assigned>[^\s"',}]+)"""
)
#: keys with a well-known prefix
_KEYS = re.compile(
    r"\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA)[\w-]{12,}|[Bb]earer\s+[\w.~+/-]{8,}"
)
#: values that are no secrets, whatever their flag is called: variables, placeholders, paths, numbers, words of a choice
_HARMLESS = re.compile(r"[$/{.<-].*|[\d.]+|.{0,5}|[a-z_]+\.(json|txt|env|pem|key)")
_NAMES_A_PLACE = re.compile(r"_(file|path|dir|env|name|id)$", re.IGNORECASE)


def credential_in(command: str) -> str:
    """Describe what in a command looks like a credential, without its value; "" if nothing does.

    Everybody on the host can read a command's arguments, and everybody who can read the run directory can read its settings.
    """
    for given in _GIVEN.finditer(command):
        name, value = given["flag"] or given["name"], given["value"] or given["assigned"]
        plain = name.replace("-", "_")
        if SECRET.search(plain) and not _NAMES_A_PLACE.search(plain) and not _HARMLESS.fullmatch(value):
            return f"{name} ***"
    if marked := _KEYS.search(command):
        return f"{marked[0][:3]}***"
    return "an address with a password" if without_passwords(command) != command else ""


def check_credentials(settings: Settings) -> None:
    """Raises UsageError if a command of a setting has a credential in it."""
    commands = {"notify.command": settings.notify.command, "trainer.command": settings.trainer.command}
    for name, one in settings.all_environments.items():
        commands[settings.environment_key(name, "command")] = one.command
    commands["engine.extra_args"] = " ".join(settings.engine.extra_args)
    commands |= {
        f"engines.{name}.extra_args": " ".join(own.extra_args) for name, own in settings.engines.items()
    }
    for name, command in commands.items():
        if what := credential_in(command or ""):
            raise UsageError(
                f"{name}: what looks like a credential ({what}) would be visible in process lists, run.json and reports; export it as a "
                "variable ($NAME) in the environment of the daemon, and let the program read that"
            )
