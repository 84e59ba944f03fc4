"""Stories of the protocol, told by the nodes' own code in the simulator and compared with what reviewers have read.

A file of tests/scenarios is what happens (scripts/lab/sim/scenario.py), `----`, and the transcript. After a change that is meant:
`pytest tests/test_scenarios.py --rewrite`, then read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sim.scenario import play
from sim.transcript import transcript, violations

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_story_is_as_told(file: Path, request: pytest.FixtureRequest) -> None:
    head, _, told = file.read_text().partition("----\n")
    history, broken = play(head)
    now = transcript(history) + violations(broken)
    if request.config.getoption("--rewrite"):
        file.write_text(f"{head}----\n{now}")
    else:
        assert now == told
    assert broken == []


def test_a_line_that_is_no_line_is_named() -> None:
    from fsbarrier.errors import UsageError

    for line in ("nodes three things", "when node 0 enters lunch: kill node 0", "at 3 s: sing", "colour red"):
        with pytest.raises(UsageError):
            play(line)
