"""People work in folders that have a random.py of their own: it must not pass for Python's in any program of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsbarrier.cli.start.node_checks import try_user_code
from fsbarrier.errors import UsageError
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sources import ChosenValue


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("random", "tempfile", "queue"):
        (folder / f"{name}.py").write_text("raise RuntimeError('this is not the library')\n")
    return folder


def test_a_reward_finds_its_own_modules_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text("FULL = 1.0\n")
    (here / "rewards").mkdir()
    file = here / "rewards" / "score.py"
    monkeypatch.chdir(here)
    settings = resolve([ChosenValue("reward.kind", f"{file}:score", "reward.kind")])
    rest = "import FULL\n\ndef score(prompt, response, answer, metadata):\n    return FULL\n"
    file.write_text(f"import random\nfrom mine {rest}")
    try_user_code(settings)
    file.write_text(f"from theirs {rest}")
    with pytest.raises(UsageError, match="theirs"):
        try_user_code(settings)
