"""Models that take images: all of them is loaded and published, the right parts are trained, on the images that the engine saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import (
    REPO,
    Bench,
    first_weights,
    largest_difference,
    rollouts,
    settings,
    trajectory,
    write_groups,
)

from fsbarrier.engine.model import inspect
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints

sys.path.insert(0, str(REPO / "scripts"))

pytestmark = pytest.mark.torch


def eyes(folder: Path, *, tied: bool = False) -> Any:
    """A tiny model that takes images, in `folder`; gives it in memory."""
    import torch
    from picture_model import build_model, write_model

    torch.set_num_threads(1)
    model = build_model(0, tied=tied).eval()
    write_model(model, folder)
    return model


def masked(model: Any) -> Any:
    """A model whose placeholders are never sampled, as the engine is asked to."""
    import torch

    config = model.config
    never = [config.image_token_id, config.video_token_id]

    def answer(**given: Any) -> Any:
        found = model(**given)
        found.logits[..., never] = -torch.inf
        return found

    return answer


def test_texts_train_the_language_model_and_all_of_it_is_published(tmp_path: Path) -> None:
    model = eyes(tmp_path / "model")
    ask = masked(model)
    rollouts(tmp_path / "merged", lambda tokens: ask(input_ids=tokens), vocabulary=250)
    work = Bench(tmp_path, settings())
    work.prepare()
    result = work.update("v1")
    # The same distribution as the engine's, placeholders left out.
    assert result["logprob_gap_max"] < 1e-4
    before, after = first_weights(tmp_path), work.weights("v1")
    seeing = {name for name in before if ".visual." in name}
    assert seeing and largest_difference(before, after) > 1e-4
    assert all(bool((before[name] == after[name]).all()) for name in seeing)
    state = checkpoints.verify(tmp_path / "v1")
    assert state.policy_version == 1
    layout = json.loads((tmp_path / "v1" / "trainer" / "layout.json").read_text())["tensors"]
    assert not any(".visual." in name for name in layout)
    # The engine loads it in place, for it is the same model.
    old, new = (inspect(tmp_path / one) for one in ("model", "v1/model"))
    assert old.signature == new.signature and new.config["architectures"] == old.config["architectures"]
    for name in ("preprocessor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "v1" / "model" / name).read_bytes()


@pytest.mark.parametrize("freeze", ["vision", "none"])
def test_images_are_trained_on_as_the_engine_saw_them(tmp_path: Path, freeze: str) -> None:
    """The log-probabilities are those of the model itself, on its processor's pixels. A file that was changed since is refused."""

    import torch
    from PIL import Image
    from transformers import AutoImageProcessor

    from fsbarrier.data import images

    model = eyes(tmp_path / "model")
    ask, processor = masked(model), AutoImageProcessor.from_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    folder, pad = tmp_path / "train_images.iteration1", model.config.image_token_id
    begin, end = model.config.vision_start_token_id, model.config.vision_end_token_id
    groups = []
    for task in range(4):
        group = []
        for sample in range(4):
            # Up to two images of different sizes, and none for some.
            names, tokens, seen = [], [65, 66], []
            for number in range((task + sample) % 3):
                size = (64 + 32 * number, 64)
                noise = torch.randint(0, 256, (*size[::-1], 3), generator=generator, dtype=torch.uint8)
                picture = Image.fromarray(noise.numpy())
                picture.save(tmp_path / "one.png")
                names.append(images.keep(folder, images.data_of(str(tmp_path / "one.png"))))
                seen.append(processor(images=[picture], return_tensors="pt"))
                tokens += [begin, *[pad] * (size[0] // 32 * size[1] // 32), end, 67]
            answer = torch.randint(0, 250, (3 + task,), generator=generator).tolist()
            ids = torch.tensor([[*tokens, *answer]])
            given = (
                {
                    "pixel_values": torch.cat([one["pixel_values"] for one in seen]),
                    "image_grid_thw": torch.cat([one["image_grid_thw"] for one in seen]),
                    "mm_token_type_ids": (ids == pad).long(),
                }
                if seen
                else {}
            )
            with torch.no_grad():
                logits = ask(input_ids=ids, **given).logits[0, :-1]
            chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(tokens) - 1 :, 0]
            one = trajectory(task, sample, ids[0].tolist(), chosen.tolist(), float(sample % 2))
            group.append({**one, "split": "train", "iteration": 1, "images": [names]})
        groups.append(group)
    write_groups(tmp_path / "merged", groups)
    work = Bench(tmp_path, settings(trainer__freeze=freeze, algorithm__kl_coef=0.1))
    work.prepare()
    result = work.update("v1", reference=str(tmp_path / "model"))
    assert result["logprob_gap_max"] < 1e-4 and result["optimizer_steps"] > 1
    before, after = first_weights(tmp_path), work.weights("v1")
    moved = {name for name in before if bool((before[name] != after[name]).any())}
    assert any(".visual." in name for name in moved) is (freeze == "none")
    work.nested["algorithm"]["max_logprob_gap"] = 100.0
    assert work.update("v2", version=2, before="v1", reference=str(tmp_path / "model"))["optimizer_steps"] > 1
    (first, *_) = sorted(folder.iterdir())
    first.write_bytes(first.read_bytes() + b"?")
    with pytest.raises(ProgramFailed, match="is not the image that the policy saw"):
        work.update("v3")
