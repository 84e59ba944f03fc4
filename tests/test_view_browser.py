"""What somebody sees who opens `fsbarrier view` in a browser: counts, texts, and the way from a curve to a token."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from fake_run import FakeRun, long_run
from view_server import CHROMIUM, Viewer, needs_chromium, viewing

from fsbarrier.trajectories import RankFileWriter

pytestmark = [needs_chromium, pytest.mark.slow]
HTML = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{ 7*7 }}"
HOSTILE = f"{HTML} \x1b[31m red \u202e half \ud800 end"


def answer(task: int, sample: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "task_id": f"t{task}",
        "task_index": task,
        "sample": sample,
        "reward": reward,
        "valid": True,
        "policy_version": 3,
        "node_rank": 0,
        "prompt": f"question {task}",
        "text": f"answer {task}/{sample}",
        "finish_reason": "stop",
        "token_ids": array("i", [11, 12, 13, 14]),
        "loss_mask": array("B", [0, 1, 1, 1]),
        "logprobs": array("f", [0.0, -0.25, -4.5, -0.5]),
    } | more


def write(run: FakeRun, iteration: int, groups: dict[int, list[dict[str, Any]]]) -> None:
    part = run.paths.part("train", iteration, 0, 1, 1)
    part.parent.mkdir(exist_ok=True)
    with RankFileWriter(part, header={"node_rank": 0, "run_id": run.run_id}) as writer:
        for task, group in groups.items():
            writer.append_group(task, group)


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("view") / "runs"
    run = long_run(folder / "first", 4)
    long_run(folder / "second", 3, lose_at=None, extra={"optimizer.lr": 5e-6})
    plain = {task: [answer(task, sample, task / 8 + sample) for sample in range(2)] for task in range(3)}
    call = {"function": {"name": "look", "arguments": '{"at": 9}'}}
    calls = [
        {"role": "user", "content": "which?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    special = {
        7: [
            answer(7, 0, -2.0, text=HOSTILE),
            answer(7, 1, 0.5, text="x" * 50_000, finish_reason="length"),
            answer(7, 2, 0.0, valid=False, metadata={"reward_error": "ZeroDivisionError: in rewards.py"}),
            answer(7, 3, 0.75, messages=calls),
        ]
    }
    write(run, 3, {1: [answer(1, 0, 0.125, text="an older answer")]})
    write(run, 4, plain | special)
    log = run.paths.node_logs(1, 1) / "daemon.log"
    log.write_text("the daemon's first line\n")
    with viewing(folder) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextlib.contextmanager
def looking(browser: Any, viewer: Viewer, path: str, **how: Any) -> Iterator[Any]:
    """A new browser at a view. No script may fail, and nothing may be asked of another host."""
    context = browser.new_context(**how)
    context.set_default_timeout(60_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith((viewer.base, "data:", "blob:")) else wrong.append(asked.url)
        ),
    )
    page.goto(viewer.address)
    page.goto(f"{viewer.base}{path}")
    yield page
    assert wrong == []
    context.close()


def test_from_the_list_of_runs_to_the_worst_answers_least_likely_token(browser: Any, viewer: Viewer) -> None:
    with looking(browser, viewer, "/") as page:
        page.get_by_role("link", name="first", exact=True).click()
        page.get_by_text("iteration 4 of 4").wait_for()
        page.get_by_role("link", name="Curves").click()
        page.get_by_text("The mean over the scored answers of the iteration.").wait_for()
        assert page.locator(".curve").count() >= 7 and page.get_by_text("rollout_answer_tokens").count() == 0
        page.keyboard.press("3")
        page.get_by_text("10 answers; 9 scored ones in the histogram").wait_for()
        rows = page.locator("table.list tbody tr")
        assert rows.count() == 10 and rows.first.locator("td").first.inner_text() == "-2.00"
        rows.first.get_by_role("link").first.click()
        page.get_by_text("Tokens", exact=True).wait_for()
        # What was said is shown as what it is, and nothing of it is carried out.
        said = page.locator(".turn.answer pre").inner_text()
        assert HTML in said and "\\x1b[31m red \\u202e half \\ud800 end" in said
        assert page.title() != "owned" and page.locator(".turn script, .turn img").count() == 0
        peak = page.locator(".tokens .peak")
        assert "-4.5" in (peak.get_attribute("title") or "") and page.locator(".tokens .off").count() == 1
        # Its advantage, and that of its group.
        page.get_by_role("link", name="side by side with its group").click()
        page.get_by_text("Task t7 in iteration 4").wait_for()
        assert page.locator(".group .card").count() == 4
        assert page.get_by_text("advantage").count() == 3 and page.get_by_text("reward failed").count() == 1


def test_filters_and_the_bars_of_the_histogram(browser: Any, viewer: Viewer) -> None:
    with looking(browser, viewer, "/run/first/answers?words=ANSWER+2/&iteration=4") as page:
        page.get_by_text("2 answers; 2 scored").wait_for()
        page.get_by_label("words in prompt or answer").fill("")
        page.get_by_label("task", exact=True).fill("t7")
        page.keyboard.press("Enter")
        page.get_by_text("4 answers; 3 scored").wait_for()
        assert "task=t7" in page.url and "words" not in page.url
        chart = page.locator(".nicegui-echart").first.bounding_box()
        # The first of three bars: the reward of -2.
        page.mouse.click(chart["x"] + 0.2 * chart["width"], chart["y"] + 0.5 * chart["height"])
        page.get_by_text("1 answers; 3 scored").wait_for()
        assert page.locator("table.list tbody tr").count() == 1
    with looking(browser, viewer, "/run/first/answers?iteration=all&task=t1&order=newest") as page:
        page.get_by_text("3 answers").wait_for()
        assert "an older answer" in page.locator("table.list tbody tr").last.inner_text()
    with looking(browser, viewer, "/run/first/answers?reward_from=much") as page:
        page.get_by_text("reward_from: must be a number, got 'much'").wait_for()


def test_an_answer_says_what_failed_what_it_called_and_how_much_it_hides(
    browser: Any, viewer: Viewer
) -> None:
    place = "/run/first/answer?split=train&iteration=4&task=7&number="
    with looking(browser, viewer, f"{place}1") as page:
        page.get_by_text("30,000 more characters").wait_for()
        page.get_by_role("link", name="the whole text").click()
        assert len(page.inner_text("body")) >= 50_000
    with looking(browser, viewer, f"{place}2") as page:
        page.get_by_text("ZeroDivisionError: in rewards.py").wait_for()
        page.keyboard.press("]")
        page.get_by_text("calls look").wait_for()
        assert '{"at": 9}' in page.locator(".call").inner_text()
    with looking(browser, viewer, f"{place}9") as page:
        page.get_by_text("cannot be shown").first.wait_for()


def test_time_logs_and_comparison(browser: Any, viewer: Viewer) -> None:
    with looking(browser, viewer, "/run/first/time") as page:
        page.get_by_text("Where the time goes").wait_for()
        assert page.locator(".nicegui-echart canvas").count() >= 1
    with looking(browser, viewer, "/run/first/logs?node=1") as page:
        page.get_by_text("the daemon's first line").wait_for()
        assert "node 2 (gpu-c) is lost" in page.locator(".problems").inner_text()
    with looking(browser, viewer, "/") as page:
        for name in ("first", "second"):
            page.get_by_role("row", name=name).get_by_role("checkbox").click()
        page.get_by_role("button", name="compare").click()
        page.get_by_text("Settings that differ").wait_for()
        assert page.locator("table.list tbody tr").all_inner_texts()[0].split() == [
            "optimizer.lr",
            "1e-06",
            "5e-06",
        ]
    with looking(browser, viewer, "/run/first/settings") as page:
        page.get_by_text("optimizer.lr").wait_for()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280, 2560])
def test_every_view_fits(browser: Any, viewer: Viewer, width: int, dark: bool) -> None:
    views = ["now", "curves", "answers", "time", "logs", "settings"]
    paths = [
        "/",
        *(f"/run/first/{view}" for view in views),
        "/run/first/answer?split=train&iteration=4&task=7&number=1",
    ]
    how = {"viewport": {"width": width, "height": 900}, "color_scheme": "dark" if dark else "light"}
    with looking(browser, viewer, "/", **how) as page:
        for path in paths:
            page.goto(f"{viewer.base}{path}")
            page.locator(".body").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert page.evaluate("document.body.classList.contains('body--dark')") is dark, path
