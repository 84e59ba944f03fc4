"""Stores the images of conversations in the run, once each and named by digest, and sends the stored files to the engine.

The tokens sent to the engine contain one placeholder per image. The engine returns them *expanded*, with one placeholder per patch of the
image, and these are recorded. Rendering a conversation does not depend on its images, so a small image replaces each.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsbarrier.data import images
from fsbarrier.data.images import Message
from fsbarrier.engine.model import placeholder_ids
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rollouts.samples import Refusal
from fsbarrier.store import reading
from fsbarrier.store.retry import patiently

#: 64 x 64 grey pixels
STAND_IN = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAATUlEQVR42u3PQQ0AAAgEIDX5RTeFDzdoQCep"
    "z6aeExAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQELi3oiwCAJt186UAAAAASUVORK5CYII="
)


class Pictures:
    """The images of one phase, in `folder`. `placeholder`: the token for an image; None: the model takes no images."""

    def __init__(self, folder: Path | None, placeholder: int | None) -> None:
        self.folder, self.placeholder = folder, placeholder
        # The source of each image -> the name of its stored file.
        self._names: dict[str, str] = {}

    async def named(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Store the conversation's images, and return it with their names, as in trajectories. Raises Refusal, StoreError."""
        for source in images.sources(messages):
            if source not in self._names:
                self._names[source] = await asyncio.to_thread(self._keep, source)
        return images.replaced(messages, lambda source: {"type": "image", "image": self._names[source]})

    def _keep(self, source: str) -> str:
        folder = self.folder
        if self.placeholder is None or folder is None:
            raise Refusal("it has an image, but the model takes none")
        try:
            return patiently(lambda: images.keep(folder, images.data_of(source)))
        except ValueError as error:
            raise Refusal(f"image: {error}") from None
        except OSError as error:
            raise StoreError(f"{folder}: cannot keep an image: {error.strerror or error}") from error

    def request(self, token_ids: Sequence[int], names: Sequence[str]) -> dict[str, object]:
        """The request for a prompt whose placeholders stand for these images, if it has any. Raises Refusal, ProgramFailed."""
        kind = {"return_token_ids": True, "output_mode": "text"}
        if not names:
            return {"token_ids": list(token_ids), **kind}
        if self.folder is None or list(token_ids).count(self.placeholder or -1) != len(names):
            raise Refusal(f"the chat template does not leave one place for each of {len(names)} images")
        parts = [{"type": "image_url", "url": _url(self.folder / name)} for name in names]
        return {"token_ids": list(token_ids), "content_parts": parts, **kind}

    def collapsed(self, token_ids: Sequence[int]) -> list[int]:
        """Undo the expansion: the tokens with one placeholder per image."""
        before = [-1, *token_ids]
        return [
            token
            for last, token in zip(before, token_ids, strict=False)
            if token != self.placeholder or last != token
        ]


def placeholders(model: Path | None) -> list[int]:
    """The tokens of the model in this folder that stand for images and videos. Raises UsageError."""
    return placeholder_ids(reading.json_object(model / "config.json", UsageError)) if model else []


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with the small image in place of each image, for rendering."""
    return images.replaced(messages, lambda _: {"type": "image_url", "image_url": {"url": STAND_IN}})


@lru_cache(maxsize=128)
def _url(path: Path) -> str:
    kind = {".jpg": "jpeg"}.get(path.suffix, path.suffix[1:])
    return f"data:image/{kind};base64,{base64.b64encode(images.kept(path)).decode()}"
