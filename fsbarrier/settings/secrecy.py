"""Recognises secrets and keeps them where they belong.

Everybody on a host can read commands, so those with a credential are refused. Settings are shown without the values marked secret and
without passwords in URLs. Programs that need no secrets get an environment without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
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
HIDDEN = "***"
#: `custom.secret.NAME=value`, or `custom.secret_name=value`
MARK = "secret"
#: Secrets that only a tracker needs, by tracker.
TRACKERS_KEYS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
}


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
    for name, environment in settings.all_environments.items():
        commands[settings.environment_key(name, "command")] = environment.command
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


def shown(settings: Mapping[str, object]) -> dict[str, object]:
    """The nested settings of `Settings.as_json`, redacted."""
    custom = settings.get("custom")
    marked = {name: HIDDEN for name in custom if name.startswith(MARK)} if isinstance(custom, Mapping) else {}
    safe = {name: _safe(value) for name, value in settings.items()}
    if isinstance(custom, Mapping):
        safe["custom"] = {name: _safe(value) for name, value in custom.items()} | marked
    return safe


def shown_word(word: str) -> str:
    """A command-line setting (`custom.secret.NAME=value`), redacted."""
    name, equals, _ = word.partition("=")
    marked = equals and name.removeprefix("custom.").startswith(MARK) and name.startswith("custom.")
    return f"{name}={HIDDEN}" if marked else without_passwords(word)


def _safe(value: object) -> object:
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, Mapping):
        return {name: _safe(inner) for name, inner in value.items()}
    return [_safe(inner) for inner in value] if isinstance(value, list | tuple) else value


def without_secrets(environ: Mapping[str, str], named: Collection[str | None] = ()) -> dict[str, str]:
    """The environment for a program that needs no secrets: without variables that are in `named` or look like secrets, and without URLs
    that contain a password (a proxy's)."""
    return {
        name: value
        for name, value in environ.items()
        if name not in named and not SECRET.search(name) and without_passwords(value) == value
    }


def without_trackers_keys(environ: Mapping[str, str], trackers: Collection[str]) -> dict[str, str]:
    """The environment for a program that may need any secret except those of the run's trackers."""
    return without_variables(environ, {key for name in trackers for key in TRACKERS_KEYS.get(name, ())})


def without_variables(environ: Mapping[str, str], named: Collection[str | None]) -> dict[str, str]:
    """The environment without these variables."""
    return {name: value for name, value in environ.items() if name not in named}
