"""A plugin of pytest for scripts/mutants.py: tests that took little time before come first, so that a fault is found soon.

The file that TEST_TIMES names has the times in seconds, by the tests' ids.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# of a test that has never passed here
UNKNOWN_S = 1.0

_took: dict[str, float] = {}


def _known() -> dict[str, float]:
    path = Path(os.environ["TEST_TIMES"])
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = _known()
    items.sort(key=lambda item: known.get(item.nodeid, UNKNOWN_S))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed:
        _took[report.nodeid] = round(_took.get(report.nodeid, 0.0) + report.duration, 3)


def pytest_sessionfinish() -> None:
    path = Path(os.environ["TEST_TIMES"])
    # Another process may be doing the same.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(_known() | _took))
    temporary.replace(path)
