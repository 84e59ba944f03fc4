"""Trajectories in the report: which are shown, and that nothing in them or in their file breaks the page."""

from __future__ import annotations

import base64
import io
import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeRun, long_run
from PIL import Image
from test_report import Page, report

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.data import images
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
    name = images.keep(kept_in, data + b"<script>after the end of the image</script>")
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
