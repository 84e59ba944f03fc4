"""Which variables of the environment a program gets: of the keys and passwords only those that it has a use for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from fsbarrier.printable import without_passwords

#: A part of a name, between underscores, that says that the value is a secret.
_SECRET = re.compile(
    r"(^|_)(\w*KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)


def without_secrets(environ: Mapping[str, str], named: Collection[str | None] = ()) -> dict[str, str]:
    """The environment for a program that has a use for none: less those that `named` or their own names say are secrets, and less
    addresses with a password in them (a proxy's)."""
    return {
        name: value
        for name, value in environ.items()
        if name not in named and not _SECRET.search(name) and without_passwords(value) == value
    }


def without_variables(environ: Mapping[str, str], named: Collection[str | None]) -> dict[str, str]:
    """The environment less these variables."""
    return {name: value for name, value in environ.items() if name not in named}
