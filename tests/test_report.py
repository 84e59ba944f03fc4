"""The report and the files that a command is asked to write."""

from __future__ import annotations

import csv
import json
import os
import re
import stat
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun, long_run
from other_user import needs_root

from fsbarrier.program import PHASE_NAMES

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
    assert page.tags.count("svg") == 10
    titles = {text.strip() for text in page.texts}
    assert {
        "reward",
        "entropy of the policy, per token",
        "gradient norm",
        "tokens in an answer, mean",
    } <= titles
    assert "KL divergence from the reference policy" not in titles
    # The charts that matter less unfold.
    assert "2 more charts" in page.text
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


def test_empty_and_short_runs_have_a_report_too(tmp_path: Path) -> None:
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
        *("entropy of the policy, per token", "KL divergence from the sampled policy", "learning rate"),
        *("KL divergence between trainer and engine", "reward style, in training"),
        *("tokens in an answer, mean", "share of answers cut off at the token limit"),
    } <= titles
    # Nobody computes a KL to a reference policy that there is not: neither a curve of zeros nor a column.
    assert "KL divergence from the reference policy" not in page.text


def test_two_runs_share_a_page(tmp_path: Path) -> None:
    first, second = long_run(tmp_path / "run", 3), long_run(tmp_path / "other", 2)
    page = report(first, "--compare", second.log_path)
    assert page.count('class="curve train second"') >= 2 and "Settings that differ" in page
    names = [f"{run.log_path.parent.name}/{run.log_path.name}" for run in (first, second)]
    assert f"{names[0]} train" in page and f"{names[1]} held-out" in page
    table = ("report", first.log_path, "--csv", tmp_path / "table.csv", "--compare", second.log_path)
    assert "only the HTML page shows two runs" in typed(*table, code=2).err


def test_the_evaluation_at_the_end_counts_for_the_iteration_that_would_follow(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 3, lose_at=None)
    run.line(
        0, "evaluated", (3, 13, 0), after=0.1, reward_mean=0.9, split="test", policy_version=3, final=True
    )
    html = report(run)
    assert "iteration 3 of 3" in html and "<title>held-out 0.9 (4)</title>" in html


# --- other formats --------------------------------------------------------------------------------------------------------------

SAMPLE = re.compile(r'^fsbarrier_[a-z0-9_]+\{run="[^"]*"(,state="[a-z]+")?\} -?[0-9.e+-]+$')


def written(run: FakeRun, tmp_path: Path, *formats: str) -> list[str]:
    words = [word for name in formats for word in (f"--{name}", str(tmp_path / name))]
    said = typed("report", "--log-path", run.log_path, *words)
    assert said.out == "".join(f"{tmp_path / name}\n" for name in formats)
    return [(tmp_path / name).read_text() for name in formats]


def test_the_table_has_a_line_an_iteration(tmp_path: Path) -> None:
    (text,) = written(long_run(tmp_path / "run", 6), tmp_path, "csv")
    assert not (tmp_path / "run" / "report.html").exists(), "the page was not asked for"
    rows = list(csv.DictReader(text.splitlines()))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        phases = sum(float(row[f"{name}_s"]) for name in PHASE_NAMES if row.get(f"{name}_s"))
        assert float(row["seconds"]) == pytest.approx(phases, rel=1e-3)
    for row in rows:
        assert (
            0 <= float(row["train_reward"]) <= 1 and int(row["policy_version"]) == int(row["iteration"]) - 1
        )
    assert float(rows[-1]["update_loss"]) == float(rows[-1]["update_loss"])


def test_the_trace_has_every_nodes_rows_and_their_work(tmp_path: Path) -> None:
    (text,) = written(long_run(tmp_path / "run", 2, lose_at=None), tmp_path, "perfetto")
    events = json.loads(text)["traceEvents"]
    names = {
        event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert names == {"node 0", "node 1", "node 2"}
    complete = [event for event in events if event["ph"] == "X"]
    rows = [event for event in complete if event["tid"] == 0]
    assert len(rows) == 3 * 2 * 14 and {event["args"]["iteration"] for event in rows} == {1, 2}
    assert all(event["dur"] >= 0 and event["ts"] > 1e15 for event in complete), "microseconds since 1970"
    for work in (event for event in complete if event["tid"] == 1):
        row = next(
            event
            for event in rows
            if (event["pid"], event["args"]) == (work["pid"], work["args"])
            and work["name"].startswith(f"{event['name']}: ")
        )
        assert work["name"].split(": ")[1] in ("start", "work")
        assert row["ts"] - 1 <= work["ts"] and work["ts"] + work["dur"] <= row["ts"] + row["dur"] + 1


def test_the_metrics_are_prometheus_text(tmp_path: Path) -> None:
    (text,) = written(long_run(tmp_path / "run", 4), tmp_path, "prometheus")
    assert text.endswith("\n")
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in samples), samples
    values = {line.split("{")[0]: line.split()[-1] for line in samples}
    assert values["fsbarrier_iteration"] == "4" and values["fsbarrier_nodes_lost_total"] == "1"
    assert (values["fsbarrier_nodes"], values["fsbarrier_nodes_running"]) == ("3", "0")
    assert "fsbarrier_train_reward" in values and ',state="' in text
    typed = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed)) == len(samples)


def test_a_phases_name_is_no_formula_and_no_line_of_its_own(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 2)
    for journal in run.paths.events.iterdir():
        journal.write_text(journal.read_text().replace('"train_rollout"', '"=cmd()\\nevil 1\\u001b[31m"'))
    table, trace, metrics = written(run, tmp_path, "csv", "perfetto", "prometheus")
    columns = next(csv.reader(table.splitlines()))
    assert all(re.fullmatch(r"\w+", name, re.ASCII) for name in columns)
    assert "_cmd___evil_1__31m_s" in columns and json.loads(trace)
    samples = [line for line in metrics.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in samples) and "\x1b" not in metrics


def test_the_last_policy_and_each_set_have_figures_of_their_own(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 2, lose_at=None)
    parts = {"reward_parts/right": 0.75, "reward_parts/right_failed": 0, "answer_tokens_mean": 12.5}
    run.line(0, "rolled_out", (2, 4, 0), after=1, split="train", reward_mean=0.4, reward_errors=3, **parts)
    figures = {"reward_mean": 0.5, "policy_version": 2, "aime/pass_at_8": 0.25, "aime/pass_at_8_se": 0.125}
    run.line(0, "evaluated", (2, 13, 0), final=True, split="test", **figures)
    table, metrics = written(run, tmp_path, "csv", "prometheus")
    last = list(csv.DictReader(table.splitlines()))[-1]
    # As the iteration that would begin with this policy.
    assert (last["iteration"], last["policy_version"], last["test_reward"]) == ("3", "2", "0.5")
    assert (last["eval_aime_pass_at_8"], last["eval_aime_pass_at_8_se"]) == ("0.25", "0.125")
    assert all(SAMPLE.match(line) for line in metrics.splitlines() if not line.startswith("#"))
    assert "fsbarrier_eval_aime_pass_at_8{" in metrics
    typed("report", "--log-path", run.log_path, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert (
        "0.25 ± 0.12" in page
        and "reward right, in training" in page
        and "held-out pass@8 of the set aime" in page
    )
    before = list(csv.DictReader(table.splitlines()))[-2]
    assert (before["rollout_reward_parts_right"], before["rollout_answer_tokens_mean"]) == ("0.75", "12.5")
    assert "rollout_agent_errors" not in before and before["rollout_reward_errors"] == "3.0"


# --- where they go --------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "--out": "report --out {out} --log-path {run}",
    "--csv": "report --csv {out} --log-path {run}",
    "--perfetto": "report --perfetto {out} --log-path {run}",
    "--prometheus": "report --prometheus {out} --log-path {run}",
    "debug": "debug --out {out} --log-path {run}",
    "--output": "launch slurm --nodes 2 --output {out} --program ping --log-path {run}",
}


def null_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


PLANTED: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to(path.with_name("elsewhere")),
    "device": null_device,
}


@pytest.mark.parametrize("place", ["file/out", "missing/out", "."])
def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path: Path, place: str) -> None:
    run, out = long_run(tmp_path / "run", 1).log_path, tmp_path / place
    (tmp_path / "file").write_text("theirs")
    for name, command in COMMANDS.items():
        said = typed(*command.format(out=out, run=run).split(), code=2).err
        assert f"{out}: " in said and len(said.splitlines()) == 1, name
    assert (tmp_path / "file").read_text() == "theirs"


def identity(path: Path) -> tuple[int, ...]:
    """What tells whether a file was replaced or written. Not the time of the last look, which looking itself changes."""
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_uid, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("kind", ["fifo", "link", pytest.param("device", marks=needs_root)])
def test_what_is_no_plain_file_is_refused(kind: str, tmp_path: Path) -> None:
    run, out = long_run(tmp_path / "run", 1).log_path, tmp_path / "out"
    (tmp_path / "elsewhere").write_text("theirs")
    try:
        PLANTED[kind](out)
    except PermissionError:
        pytest.skip("no devices can be made here")
    before = identity(out)
    for name, command in COMMANDS.items():
        said = typed(*command.format(out=out, run=run).split(), code=2).err
        assert f"{out}: " in said and "not a plain file" in said, name
    assert identity(out) == before and (tmp_path / "elsewhere").read_text() == "theirs"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("x.csv", "--csv x.csv writes that"),
        ("x.json", "--perfetto x.json writes that"),
        ("a/x.PROM", "--prometheus a/x.PROM writes that"),
        ("x.parquet", "name it .html"),
    ],
)
def test_a_page_is_not_written_into_a_file_that_promises_another_format(
    name: str, instead: str, tmp_path: Path
) -> None:
    said = typed("report", "--log-path", long_run(tmp_path / "run", 1).log_path, "--out", name, code=2).err
    assert said.rstrip().endswith(
        f"--out {name}: is the HTML page, and {Path(name).suffix.lower()} is none; {instead}"
    )
