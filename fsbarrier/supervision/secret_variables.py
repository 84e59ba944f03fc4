"""Which variables of the environment a program gets: of the keys and passwords only those that it has a use for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from fsbarrier.printable import without_passwords

#: A part of a name, between underscores, that says that the value is a secret.
_SECRET = re.compile(
    r"(^|_)(\w*KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)

#: What only the program of a tracker has a use for, by the tracker's name. Trackio's HF_TOKEN is also how others get models and tasks.
TRACKERS_KEYS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    "swanlab": ("SWANLAB_API_KEY",),
    "comet_ml": ("COMET_API_KEY",),
    "clearml": ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
    "dvclive": ("DVC_STUDIO_TOKEN",),
}


def without_secrets(environ: Mapping[str, str], named: Collection[str | None] = ()) -> dict[str, str]:
    """The environment for a program that has a use for none: less those that `named` or their own names say are secrets, and less
    addresses with a password in them (a proxy's)."""
    return {
        name: value
        for name, value in environ.items()
        if name not in named and not _SECRET.search(name) and without_passwords(value) == value
    }


def without_trackers_keys(environ: Mapping[str, str], trackers: Collection[str]) -> dict[str, str]:
    """The environment for a program that may have a use for any key, but for those of the run's own trackers."""
    return without_variables(environ, {key for name in trackers for key in TRACKERS_KEYS.get(name, ())})


def without_variables(environ: Mapping[str, str], named: Collection[str | None]) -> dict[str, str]:
    """The environment less these variables."""
    return {name: value for name, value in environ.items() if name not in named}
