"""Models that take images: all of them is loaded and published, the right parts are trained, on the images that the engine saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_bench import REPO, Bench, first_weights, largest_difference, rollouts, settings

from fsbarrier.engine.model import inspect
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
