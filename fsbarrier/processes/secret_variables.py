"""Removes secrets from the environment of programs that do not need them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fsbarrier.settings.credentials import SECRET
from fsbarrier.wording import without_passwords

#: Secrets that only a tracker needs, by tracker.
TRACKERS_KEYS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
}


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
