"""A short `fsbarrier doctor` at each start: rejects an unsuitable filesystem."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.doctor import examine
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.store.retry import fails, patiently


def admit(log_path: Path, *, write: bool) -> None:
    """A quick check of the filesystem under `log_path`, which need not exist yet. `write`: include write tests.

    Raises StoreError if the filesystem fails or is unsuitable, UsageError without write permission.
    """
    try:
        report = patiently(lambda: examine.short(log_path, write=write))
    except OSError as error:
        if fails(error):
            raise StoreError(f"--log-path {log_path}: {error.strerror}") from None
        raise UsageError(f"--log-path {log_path}: not writable: {error.strerror or error}") from None
    if report.refused:
        found = report.refused[0]
        advice = f"; {found.advice}" if found.advice else ""
        raise StoreError(
            f"--log-path {log_path}: its filesystem cannot support a run: {found.finding}{advice} (details: fsbarrier doctor)"
        )
