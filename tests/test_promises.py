"""Each promise of docs/failures.md, and those of other pages that promises.txt lists, has a test that fails when it does not hold.

`python tests/test_promises.py PAGE.md` prints the sentences and rows of a page that no line of promises.txt is about.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"


def promises() -> Iterator[tuple[str, str, list[str]]]:
    """The page, words of the promise, and its tests."""
    block: tuple[str, str, list[str]] | None = None
    for line in (TESTS / "promises.txt").read_text().splitlines():
        if line.startswith("  ") and block is not None:
            block[2].append(line.strip())
        elif line and not line.startswith("#"):
            if block is not None:
                yield block
            page, _, words = line.partition(": ")
            block = page, words, []
    if block is not None:
        yield block


def statements(page: str) -> Iterator[str]:
    """The rows of a page's tables, as their first cell, and its sentences, without code blocks, headings and heads of tables."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip().splitlines()
        if not lines or lines[0].startswith("#"):
            continue
        if lines[0].startswith("|"):
            yield from (line.strip("| ").split(" | ")[0].strip() for line in lines[2:])
            continue
        flat = " ".join(line.strip() for line in lines).replace("**", "")
        yield from re.split(r"(?<=[.:]) (?=[A-Z`\[])", flat)


def without_a_test(page: str) -> list[str]:
    about = [words for named, words, _ in promises() if named == page]
    return [one for one in statements(page) if not any(words in one for words in about)]


def test_each_promise_is_on_its_page_and_each_of_its_tests_is_there() -> None:
    for page, words, tests in promises():
        flat = " ".join((DOCS / page).read_text().replace("**", "").split())
        assert words in flat, f"{page} does not say any more: {words}"
        assert tests, f"{page}: {words}: no test"
        for named in tests:
            file, _, test = named.partition(": ")
            source = (TESTS / f"test_{file}.py").read_text()
            assert re.search(rf"^(?:async )?def {test}\(", source, re.MULTILINE), (
                f"{page}: {words}: no {named}"
            )


def test_every_row_about_a_failure_has_a_test() -> None:
    rows = [
        line.strip("| ").split(" | ")[0].strip()
        for line in (DOCS / "failures.md").read_text().splitlines()
        if re.match(r"\| (?!---|what happens|`--on)", line)
    ]
    assert len(rows) > 20
    assert [row for row in rows if row in without_a_test("failures.md")] == []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(*without_a_test(name), sep="\n")
