"""What a report shows of samples, and that it can be read in a browser."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
from array import array
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeRun, long_run
from PIL import Image
from test_report import Page, report

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.trajectories import RankFileWriter


def merged(
    run: FakeRun, iteration: int, rewards: dict[int, list[float]], split: str = "train", **fields: Any
) -> Path:
    """A merged file whose task t has the rewards `rewards[t]`; `fields` go into every trajectory."""
    part = run.paths.part(split, iteration, 0, 1, 1)
    part.parent.mkdir(exist_ok=True)
    part.unlink(missing_ok=True)
    with RankFileWriter(part, header={"node_rank": 0}) as writer:
        for task, values in rewards.items():
            group = [
                {
                    **{
                        "task_id": f"t{task}",
                        "task_index": task,
                        "sample": sample,
                        "reward": value,
                        "valid": True,
                    },
                    **{"policy_version": 0, "node_rank": 0, "token_ids": array("i", [5, 6])},
                    **{
                        "prompt": f"question {task}",
                        "text": f"answer {task}/{sample}",
                        "finish_reason": "stop",
                    },
                    **fields,
                }
                for sample, value in enumerate(values)
            ]
            writer.append_group(task, group)
    out = run.paths.merged(split, iteration)
    aggregate([Part(part, None)], out, metadata={}, expected=set(rewards))
    return out


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return long_run(tmp_path / "run", 3, lose_at=None)


def test_the_best_of_the_best_group_and_the_worst_of_the_worst_are_shown(run: FakeRun) -> None:
    merged(run, 2, {0: [1.0, 1.0]})  # older: not shown
    merged(run, 3, {0: [0.5, 0.6], 1: [-1.0, 0.4], 2: [0.25, 2.0]})
    merged(run, 3, {7: [0.125]}, split="test")
    # An iteration that nobody counts down from.
    (journal, *_) = run.paths.events.glob("*.jsonl")
    far = {**json.loads(journal.read_text().splitlines()[-1]), "iteration": 10**12, "event": "phase_started"}
    journal.write_text(f"{journal.read_text()}{json.dumps(far)}\n")
    text = Page(report(run)).text
    assert "Answers in training, iteration 3" in text and "iteration 2</h3>" not in report(run)
    best, worst = text.index("best"), text.index("worst")
    assert "answer 2/1" in text[text.index("best", text.index("Answers in training")) :]
    assert "answer 1/0" in text and "reward -1.00" in text and best < worst
    # The only held-out answer is the best and the worst: shown once.
    assert text.count("answer 7/0") == 1


def test_what_was_not_judged_is_neither_best_nor_worst(run: FakeRun) -> None:
    path = run.paths.part("train", 3, 0, 1, 1)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    with RankFileWriter(path, header={"node_rank": 0}) as writer:
        whole = {"task_id": "t0", "task_index": 0, "policy_version": 0, "node_rank": 0}
        writer.append_group(
            0,
            [
                {**whole, "sample": 0, "reward": 0.5, "valid": True, "text": "judged low"},
                {**whole, "sample": 1, "reward": 0.75, "valid": True, "text": "judged high"},
                {**whole, "sample": 2, "reward": 0.0, "valid": False, "text": "the judge failed"},
            ],
        )
    aggregate([Part(path, None)], run.paths.merged("train", 3), metadata={}, expected={0})
    text = Page(report(run)).text
    assert "judged low" in text and "judged high" in text and "the judge failed" not in text


def test_nothing_in_a_trajectory_breaks_out_of_the_page(run: FakeRun) -> None:
    bad = "<script>alert(1)</script></pre></details>\x1b[31m\u202e"
    merged(
        run,
        3,
        {0: [0.5]},
        text=bad,
        prompt=[{"role": bad, "content": bad}],
        reward_parts={bad: 1.0, "b": 0.5},
    )
    html = report(run)
    page = Page(html)
    assert "script" not in page.tags and "alert(1)" in page.text
    assert "\x1b" not in html and "\u202e" not in html


def test_images_are_shown_small_and_only_as_many_and_as_they_were_seen(run: FakeRun) -> None:
    """A copy that Pillow made of the very file, so nothing of the file itself is in the page."""
    kept_in = run.paths.trajectories("train") / "train_images.iteration3"
    files = io.BytesIO()
    Image.new("RGB", (1280, 768), "teal").save(files, "PNG")
    data = files.getvalue()
    stored = data + b"<script>after the end of the image</script>"
    name = f"{hashlib.sha256(stored).hexdigest()}.png"
    kept_in.mkdir(parents=True)
    (kept_in / name).write_bytes(stored)
    gone = f"{'0' * 64}.png"
    parts = [
        {"type": "text", "text": "which colour?"},
        *({"type": "image", "image": n} for n in (name, gone, "../x")),
    ]
    many = [{"role": "tool", "content": [{"type": "image", "image": name}] * 12}]
    merged(run, 3, {0: [0.5]}, messages=[{"role": "user", "content": parts}, *many])
    html = report(run)
    page = Page(html)
    shown = re.findall(r'<img src="data:image/jpeg;base64,([^"]*)"', html)
    assert len(shown) == 8 and html.count("<img") == 8 and "script" not in page.tags
    copy = Image.open(io.BytesIO(base64.b64decode(shown[0])))
    assert copy.size == (320, 192) and copy.getpixel((9, 9)) == pytest.approx((0, 128, 128), abs=3)
    assert "which colour?" in page.text and page.text.count("[image]") == 5
    assert page.text.count("cannot read the image") == 2
    (kept_in / name).write_bytes(data)
    assert "its SHA-256 differs" in Page(report(run)).text


def test_without_samples_no_prompt_is_in_the_page(run: FakeRun) -> None:
    merged(run, 3, {0: [0.5]})
    assert "question 0" in report(run)
    assert "question 0" not in report(run, "--no-samples")


# --- in a browser ---------------------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Measures the page inside a frame as wide as the screen in question, and leaves what it finds in the document.
MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, width = page.documentElement.clientWidth;
  const box = (element) => element.getBoundingClientRect();
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map(Number).map((v) => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = frame.contentWindow.getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return luminance(colour);
    }
    return 1;
  };
  const contrast = (element) => {
    const svg = element.ownerSVGElement, style = frame.contentWindow.getComputedStyle(element);
    const [a, b] = [luminance(svg ? style.fill : style.color), background(element)];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  };
  const all = (selector) => [...page.querySelectorAll(selector)];
  const found = {
    width, scrolled: page.documentElement.scrollWidth, dark: background(page.body) < .2,
    headings: all("h2").map((h) => h.textContent),
    outside: all("main > *").filter((e) => box(e).right > width + 1 || box(e).left < -1).map((e) => e.tagName),
    charts: all("svg").filter((svg) => box(svg).width).map((svg) => [box(svg).left, box(svg).right]),
    beyond: all("svg text").filter((e) => box(e).width && box(e).right > box(e.ownerSVGElement).right + 1).length,
    small: all("svg text").filter((e) => box(e).width && box(e).height < 9).length,
    heights: all("section").map((e) => box(e).height),
    overlapping: all("section").filter((e, i, s) => i && box(s[i - 1]).bottom > box(e).top + 1).length,
    faint: all("p, td, th, h1, h2, summary, small, li, pre, svg text")
      .filter((e) => e.textContent.trim() && contrast(e) < 3.5).map((e) => e.tagName + ": " + e.textContent.slice(0, 40)),
    letters: Math.min(...all("p, td, th, pre, small").map((e) => parseFloat(frame.contentWindow.getComputedStyle(e).fontSize))),
  };
  document.querySelector("#found").textContent = JSON.stringify(found);
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = long_run(tmp_path_factory.mktemp("browser") / "run", 40)
    merged(run, 40, {0: [1.0, 0.0], 1: [0.5, 0.25]}, text="a word that does not end" + "x" * 3000)
    return report(run)


def laid_out(page: str, folder: Path, width: int, *, dark: bool) -> dict[str, Any]:
    """What the browser makes of the page in a window `width` CSS pixels wide."""
    frame = f'<iframe style="border:0;width:{width}px;height:4000px" srcdoc="{escape(page)}"></iframe>'
    outer = folder / "outer.html"
    outer.write_text(
        f'<!doctype html><body><pre id="found"></pre>{frame}<script>{MEASURE}</script>', encoding="utf-8"
    )
    assert CHROMIUM is not None
    argv = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
        *("--window-size=1400,4200", "--virtual-time-budget=10000"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *("--dump-dom", outer.as_uri()),
    ]
    dom = subprocess.run(argv, capture_output=True, text=True, timeout=240).stdout
    found = re.search(r'<pre id="found">(\{.*?\})</pre>', dom, re.DOTALL)
    assert found, dom[:2000]
    measured: dict[str, Any] = json.loads(
        found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )
    return measured


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1280])
def test_the_report_fits_and_can_be_read(page: str, tmp_path: Path, width: int, dark: bool) -> None:
    found = laid_out(page, tmp_path, width, dark=dark)
    # All but a scroll bar.
    assert width - 20 <= found["width"] == found["scrolled"] <= width
    assert found["dark"] is dark
    assert {"Training and evaluation", "Sample trajectories", "Where the time goes"} <= set(found["headings"])
    assert found["outside"] == [] and found["overlapping"] == 0
    # Each chart is whole on the screen, with letters that can be read.
    assert len(found["charts"]) >= 7 and all(0 <= left < right <= width for left, right in found["charts"])
    assert found["beyond"] == found["small"] == 0
    assert all(height > 40 for height in found["heights"])
    assert found["faint"] == []
    assert found["letters"] >= 12
