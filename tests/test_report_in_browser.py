"""The report as a browser lays it out: on a phone and on a desk, light and dark. Needs Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fake_run import long_run
from test_report import report
from test_report_samples import merged

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
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
