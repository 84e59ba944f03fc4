"""The report: one well-formed file that loads nothing, says what happened, and cannot be broken by what a run contains."""

from __future__ import annotations

import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun, long_run

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects texts, tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def report(run: FakeRun, *more: str) -> str:
    out = run.log_path.parent / "report.html"
    typed("report", "--log-path", run.log_path, "--out", out, *more)
    return out.read_text(encoding="utf-8")


def test_a_report_has_all_its_parts(tmp_path: Path) -> None:
    page = Page(report(long_run(tmp_path / "run")))
    for wanted in (
        *("finished", "0.25 → 0.74", "0.06 %", "Where the time goes", "rollout.temperature"),
        "node 2 (gpu-c) is lost: no heartbeat for 15.4 s",
        "node 2 (gpu-c) has had no heartbeat for 6 s",
        "generation 2: nodes 0, 1; leader 0",
    ):
        assert wanted in page.text, wanted
    # The legend, and a bar an iteration.
    assert page.attributes.count(("class", "p2")) == 1 + 6
    assert page.tags.count("svg") == 7
    curves = (
        "Reward",
        "Entropy",
        "Tokens per answer",
        "Clip fraction",
        "Engine-trainer log-prob gap",
        "Gradient norm",
        "Loss",
    )
    assert [text for text in page.texts if text.strip() in curves] and "KL to the reference" not in page.text
    assert re.search(r"[\d.]+ % of (node \d's time|the time of nodes [\d, ]+): \w+", page.text)


def test_a_report_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    html = report(long_run(tmp_path / "run"))
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not any(
        name in ("src", "href", "xlink:href") or name.startswith("on") for name, _ in page.attributes
    )
    assert not re.search(r"url\(|@import|https?://", html)


def test_a_report_is_private_and_beside_the_run_by_default(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 2)
    said = typed("report", "--log-path", run.log_path)
    out = run.log_path / "report.html"
    assert said.out.strip() == str(out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize("out", ["missing/report.html", "."])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, out: str) -> None:
    run = long_run(tmp_path / "run", 1, lose_at=None)
    said = typed("report", "--log-path", run.log_path, "--out", tmp_path / out, code=2)
    assert said.err.count("\n") == 1


def test_what_a_run_contains_cannot_break_out(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[31m"
    run = FakeRun(tmp_path / "run", hosts=(bad,), extra={"model": bad})
    run.start()
    run.iteration(1)
    run.fail(1, 1, 2, bad, [bad, bad])
    run.line(0, "node_lost", (1, 2, 0), lost=[{"node_rank": 1, "host": bad, "why": bad}])
    run.line(0, "phase_started", (2, 2, 0), phase_name=bad)
    html = report(run)
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags
    assert "\x1b" not in html


def test_empty_and_short_runs(tmp_path: Path) -> None:
    nothing = FakeRun(tmp_path / "a" / "run")
    assert "Mean reward" not in Page(report(nothing)).text
    begun = FakeRun(tmp_path / "b" / "run")
    begun.start()
    begun.row(1, 0)
    for rank in range(3):
        begun.line(rank, "phase_started", (1, 1, 0))
    Page(report(begun))


def test_what_was_measured_has_a_curve_and_what_was_not_has_none(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 3, lose_at=None)
    measured = {"entropy": 1.5, "kl": 0.0, "policy_kl": 0.01, "lr": 1e-6, "mismatch_kl": 0.002}
    own = {"reward_parts/style": 0.15, "answer_tokens_mean": 81.0, "truncated_share": 0.25}
    for iteration in (1, 2, 3):
        run.line(0, "updated", (iteration, 10, 0), after=0.1, **measured)
        run.line(0, "rolled_out", (iteration, 4, 0), after=0.1, reward_mean=0.5, split="train", **own)
    page = Page(report(run))
    titles = {text.strip() for text in page.texts}
    assert {
        *("Entropy", "KL to the previous policy", "KL between engine and trainer", "Learning rate"),
        *("Tokens per answer", "Share of answers truncated", "Reward: style"),
    } <= titles
    # Nobody computes a KL to a reference policy that there is not: neither a curve of zeros nor a column.
    assert not [text for text in titles if "reference policy" in text] and "reward_parts" not in page.text


def test_the_evaluation_at_the_end_belongs_to_no_iteration(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 3, lose_at=None)
    run.line(
        0, "evaluated", (3, 13, 0), after=0.1, reward_mean=0.9, split="test", policy_version=3, final=True
    )
    html = report(run)
    assert "iteration 3 of 3" in html
    assert re.search(r'text-anchor="middle">end</text>', html)
