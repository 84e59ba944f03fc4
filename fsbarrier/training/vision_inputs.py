"""Makes the inputs of a vision model: its own image processor turns the files that the engine saw into pixels."""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fsbarrier.data import images
from fsbarrier.engine.model import placeholder_ids, sees
from fsbarrier.errors import ProgramFailed, UsageError, first_line
from fsbarrier.training.policy import config_of

# Model arguments that mark image tokens. The first one that a model's forward takes is used.
KINDS = ("mm_token_type_ids", "token_type_ids")
# Outputs of a processor that belong to the text. All others are image inputs.
OF_TEXT = (*KINDS, "input_ids", "attention_mask")


class VisionInputs:
    """The image inputs of the model in `folder`.

    `always`: a micro-batch without images gets a blank one, so that all processes run the same modules.
    """

    def __init__(self, folder: Path, config: transformers.PretrainedConfig, *, always: bool) -> None:
        try:
            self._processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(f"{folder}: its processor cannot be loaded: {error}") from None
        self._placeholder = placeholder_ids(config.to_dict())[0]
        self._text = self._processor.tokenizer.decode(self._placeholder)
        kind = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
        parameters = inspect.signature(kind.forward).parameters
        self._kind = next((name for name in KINDS if name in parameters), None)
        self._always = always and not blindness(folder, config.to_dict())
        self._seen = lru_cache(maxsize=256)(self._look)

    @classmethod
    def of(cls, folder: Path, *, always: bool) -> VisionInputs | None:
        """Returns None for a model that takes no images. Raises UsageError."""
        config = config_of(folder)
        return cls(folder, config, always=always) if placeholder_ids(config.to_dict()) else None

    def added(
        self, inputs: dict[str, Tensor], wanted: Tensor, files: Sequence[Sequence[str]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Add the images in `files`, by sequence, to the padded inputs; `wanted` gets as many rows. Raises ProgramFailed."""
        seen = [self._seen(path) for paths in files for path in paths]
        for tokens, paths in zip(inputs["input_ids"].tolist(), files, strict=True):
            self._check(tokens, paths)
        if not seen and self._always:
            blank = self._processed(Image.new("RGB", (64, 64)))
            row = torch.full((self._pieces(blank),), self._placeholder)
            seen, ones = [blank], torch.ones_like(row)
            ids = pad_sequence([*inputs["input_ids"], row], batch_first=True)
            attention = pad_sequence([*inputs["attention_mask"], ones], batch_first=True)
            inputs = {"input_ids": ids, "attention_mask": attention}
            wanted = torch.nn.functional.pad(wanted, (0, ids.shape[1] - wanted.shape[1], 0, 1))
        if not seen:
            return inputs, wanted
        pixels = {name: torch.cat([image[name] for image in seen]) for name in seen[0] if name not in OF_TEXT}
        kinds = (inputs["input_ids"] == self._placeholder).long()
        return {**inputs, **pixels, **({self._kind: kinds} if self._kind else {})}, wanted

    def _check(self, tokens: Sequence[int], files: Sequence[str]) -> None:
        """Raise ProgramFailed if the images do not fill the engine's placeholders exactly, which nothing else would notice."""
        runs = [len([*run]) for token, run in groupby(tokens) if token == self._placeholder]
        pieces = [self._pieces(self._seen(path)) for path in files]
        if runs != pieces:
            raise ProgramFailed(
                f"a sequence has places for images of {runs} tokens, and its images have {pieces}: {', '.join(files) or 'none'}; "
                "trainer and engine process images differently"
            )

    def _pieces(self, processed: dict[str, Tensor]) -> int:
        """The number of an image's tokens."""
        return int((processed["input_ids"] == self._placeholder).sum())

    def _look(self, path: str) -> dict[str, Tensor]:
        return self._processed(Image.open(io.BytesIO(images.kept(Path(path)))))

    def _processed(self, image: Image.Image) -> dict[str, Tensor]:
        outputs: Any = self._processor(text=[self._text], images=[image], return_tensors="pt")
        return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}


def blindness(folder: Path, config: dict[str, Any]) -> str:
    """Why a model that takes images cannot be given any, or "": its processor must replace each image by one repeated token."""
    tokens = placeholder_ids(config)
    if not sees(config):
        return ""
    if not tokens:
        return "no token stands for an image (image_token_id in its config.json)"
    try:
        processor: Any = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        text = processor.tokenizer.decode(tokens[0])
        made = processor(text=[text], images=[Image.new("RGB", (64, 64))])["input_ids"][0]
        plain = processor.tokenizer(text)["input_ids"]
    except Exception as error:
        return f"its processor does not put one in the place of token {tokens[0]}: {first_line(error)}"
    if [token for token, _ in groupby(made)] != [token for token, _ in groupby(plain)]:
        return f"its processor puts other tokens than {text} in the place of an image"
    return ""
