"""Images with real vLLM: what is recorded over several turns is what transformers makes of the same images, also after a reload."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_eyes import eyes
from test_rollout import make_spec, rolled_out, run
from trainer_bench import REPO, Bench, settings

from fsbarrier.engine.engine import Engine
from fsbarrier.settings.resolve import resolve

sys.path.insert(0, str(REPO / "scripts"))

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = REPO / "tests" / "programs" / "looking_agent.py"


def test_what_is_recorded_is_what_the_model_saw(tmp_path: Path) -> None:
    """One answer to a task's image, and an agent that shows three in three turns; then with other weights in the same engine."""
    import torch
    from picture_model import draw, write_model

    # With a head that is the embedding, as the small models of the family have it.
    model = eyes(tmp_path / "model", tied=True)
    import random

    for number in range(3):
        draw(random.Random(number), "r", number + 1).save(tmp_path / f"{number}.png")
    prompts = [
        [
            {"role": "system", "content": "Look."},
            {
                "role": "user",
                "content": [{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": "what?"}],
            },
        ]
        for n in range(3)
    ]
    chosen = {"engine.max_model_len": 512, "rollout.max_tokens": 20, "rollout.samples": 4}
    resolved = resolve([], chosen, cross_checks=False)
    engine = Engine(resolved.engine, log_file=tmp_path / "vllm.log", work_dir=tmp_path / "work", threads=1)
    found: list[tuple[Path, Path]] = []
    try:
        for version, agent in enumerate(({}, {"rollout.agent": f"{AGENT}:Looks"})):
            folder, weights = tmp_path / f"run{version}", tmp_path / f"model{version}"
            with torch.no_grad():
                for one in model.parameters():
                    one.add_(0.02 * torch.randn_like(one))
            write_model(model, weights)
            info = engine.ensure(weights, version, cancel=threading.Event())
            # The second time the engine, which has seen the tasks' images, loads other weights.
            assert info.action == ("reloaded" if version else "started"), info.note
            served = [{"url": info.url, "api_key": info.api_key, "model": info.model}]
            folder.mkdir()
            for number in range(3):
                (folder / f"{number}.png").write_bytes((tmp_path / f"{number}.png").read_bytes())
            tasks = [{"prompt": prompt, "answer": "x"} for prompt in prompts]
            sampling = {"samples": 4, "max_tokens": 20}
            texts = ["x"] * len(prompts)
            own = {"engine": served, "model": str(weights), "policy_version": version, "sampling": sampling}
            spec = make_spec(folder, info.url, texts, **own, **chosen, **agent)
            (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
            done = run(spec)
            assert (done.code, done.stderr) == (0, ""), done.stderr
            found.append((folder, weights))
    finally:
        engine.stop()
    for folder, weights in found:
        trajectories = [one for group in rolled_out(folder).values() for one in group]
        turns = 3 if folder.name == "run1" else 1
        assert [one["turns"] for one in trajectories if "turns" in one] == [3] * 12 * (turns == 3)
        for one in trajectories:
            check(folder / "trajectories" / "train_images.iteration5", weights, one, images=turns)
    folder, weights = found[1]
    (tmp_path / "merged").hardlink_to(folder / "trajectories" / "checkpoint")
    (tmp_path / "train_images.iteration5").symlink_to(folder / "trajectories" / "train_images.iteration5")
    bench = Bench(tmp_path, settings())
    assert bench.prepare(policy_version=1, run_id="run", model=str(weights))["trajectories"] > 0
    result = bench.update("v2", version=2, trainer_state=None, model=str(weights))
    assert result["optimizer_steps"] > 0 and result["logprob_gap_max"] < 1e-3


def check(folder: Path, weights: Path, trajectory: dict[str, Any], *, images: int) -> None:
    """Its tokens are those of transformers' own processor, and its log-probabilities those of transformers' model."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(weights)
    model = AutoModelForImageTextToText.from_pretrained(weights)
    (names,) = trajectory["images"]
    assert len(names) == images
    messages = json.loads(json.dumps(trajectory["messages"]))
    parts = [
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    ]
    assert [part["image"] for part in parts if part["type"] == "image"] == names
    text = processor.apply_chat_template(messages, tokenize=False)
    seen = [Image.open(folder / name) for name in names]
    given = processor(text=[text], images=seen, return_tensors="pt")
    ids = torch.tensor([list(trajectory["token_ids"])])
    # The first prompt token by token; afterwards answers are what was sampled, which no text says.
    prompt = trajectory["prompt_tokens"]
    assert ids[0, :prompt].tolist() == given["input_ids"][0, :prompt].tolist()
    placeholder = model.config.image_token_id
    assert (ids == placeholder).sum() == (given["input_ids"] == placeholder).sum()
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            pixel_values=given["pixel_values"],
            image_grid_thw=given["image_grid_thw"],
            mm_token_type_ids=(ids == placeholder).long(),
        ).logits[0, :-1]
    logits[:, [placeholder, model.config.video_token_id]] = -torch.inf
    own = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    sampled = torch.tensor(list(trajectory["loss_mask"]), dtype=torch.bool)[1:]
    told = torch.tensor(list(trajectory["logprobs"]))[1:]
    assert float((own - told)[sampled].abs().max()) < 1e-3


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("task", ["pictures", "blind"])
def test_a_policy_learns_from_what_it_sees_and_from_nothing_else(tmp_path: Path, task: str) -> None:
    """scripts/learning_curve.py, with one seed on one node."""
    import subprocess

    words = ["--task", task, "--seeds", "0", "--nodes", "1", "--out", str(tmp_path)]
    curve = [sys.executable, str(REPO / "scripts" / "learning_curve.py"), *words]
    done = subprocess.run(curve, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
