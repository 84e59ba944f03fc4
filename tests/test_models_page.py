"""The table of docs/models.md: all families are in it, and what a row says is what a run of this family does."""

from __future__ import annotations

import pytest
from families import FAMILIES
from models_page import HEAD, NOT_RUN, PAGE, row, rows, with_rows


def test_the_page_has_a_row_for_each_family_run_or_not() -> None:
    text = PAGE.read_text(encoding="utf-8")
    known = rows(text)
    assert [*known] == [*FAMILIES] and with_rows(text, known) == text
    name, *others = FAMILIES
    made = with_rows(text, {name: f"| {name} | trained | 1e-07 | – | – |"})
    assert rows(made)[name].endswith("| trained | 1e-07 | – | – |") and made.count(HEAD) == 1
    assert all(NOT_RUN in rows(made)[other] for other in others)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_a_family_does_what_its_row_says(family: str) -> None:
    def cells(line: str) -> list[str]:
        return [cell.strip() for cell in line.strip("|").split("|")]

    made = cells(row(family))
    stated = cells(rows(PAGE.read_text(encoding="utf-8"))[family])
    # The size of a gap is noise of floating-point sums, as long as it is small.
    gaps, said = (one.pop(2).split(", ") for one in (made, stated))
    assert made == stated and len(gaps) == len(said) == 2
    assert all(float(gap) < 1e-4 for gap in (*gaps, *said))
