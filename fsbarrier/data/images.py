"""Reads the images of tasks, conversations and trajectories, stores each once under its SHA-256, and verifies it.

A message's content may be a list of parts. The part `{"type": "image", "image": ...}` is an image: a path or a `data:` URL. In a run's
files it is the name of a file in the folder of the iteration's images (`names.IMAGES_FOLDER`), such as `<sha256>.png`. Stored images are
RGB and upright, so that engine and trainer cannot decode them in different ways.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbarrier.errors import ProgramFailed
from fsbarrier.store import files, reading

if TYPE_CHECKING:
    from PIL import Image

#: maximum bytes of an encoded image, and maximum pixels of a decoded one
IMAGE_BYTES, IMAGE_PIXELS = 32 << 20, 1 << 26
SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}
#: the mark for an image in the texts of verl's files
MARK = "<image>"
#: EXIF's tag for the orientation of an image
ORIENTATION = 0x0112

#: one chat message; its content is text, or a list of parts
Message = dict[str, Any]


def parts_of(content: object) -> list[dict[str, Any]]:
    """The parts of a message's content."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def text_of(content: object) -> str:
    """The text of a message's content."""
    return "".join(str(part.get("text", "")) for part in parts_of(content))


def part(value: object, folder: Path) -> dict[str, Any]:
    """Check a message part of a task file in `folder`. Raises ValueError."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and kind == "text" and isinstance(value.get("text"), str):
        return {"type": "text", "text": value["text"]}
    if isinstance(value, Mapping) and kind == "image":
        return {"type": "image", "image": _named(value.get("image"), folder)}
    expected = '{"type": "text", "text": text} or {"type": "image", "image": ...}'
    raise ValueError(f"must be {expected}, got {str(value)[:60]}")


def in_places(messages: Sequence[Message], given: object, folder: Path) -> tuple[Message, ...]:
    """Replace each mark in the texts of a task by an image: verl's files list the images in a field of their own (`given`). `folder`: of
    the task file. Raises ValueError."""
    if not isinstance(given, list):
        raise ValueError(f"images must be a list, got {str(given)[:60]}")
    images = [_named(item, folder) for item in given]
    marks = sum(text_of(message["content"]).count(MARK) for message in messages)
    if marks != len(images):
        raise ValueError(f"has {len(images)} images, and its prompt has {marks} times {MARK}")
    left = iter(images)

    def split(text: str) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(text.split(MARK)):
            if number:
                yield {"type": "image", "image": next(left)}
            if piece:
                yield {"type": "text", "text": piece}

    return tuple(
        {**message, "content": [*split(message["content"])]}
        if isinstance(message["content"], str) and MARK in message["content"]
        else message
        for message in messages
    )


def _named(value: object, folder: Path) -> str:
    """The source of an image in a task file: an absolute path or data: URL. In verl's Parquet files it may be bytes. Raises ValueError."""
    if isinstance(value, Mapping):
        value = next(
            (named for key in ("image", "bytes", "path") if (named := value.get(key)) is not None), None
        )
    if isinstance(value, bytes):
        return "data:application/octet-stream;base64," + base64.b64encode(value).decode()
    if not isinstance(value, str) or not value:
        raise ValueError(f"has an image that is neither a path nor a data: URL: {str(value)[:60]}")
    # An absolute path stays as it is.
    return value if value.startswith("data:") or "://" in value else str(folder.absolute() / value)


def source_of(part: Mapping[str, Any]) -> str | None:
    """The source of a part's image, in transformers' or OpenAI's form; None if the part is no image."""
    if part.get("type") == "image_url":
        url = part.get("image_url")
        return str(url.get("url")) if isinstance(url, Mapping) else str(url)
    return str(part.get("image")) if part.get("type") == "image" else None


def sources(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The sources of a conversation's images, in order."""
    for message in messages:
        for part in parts_of(message.get("content")):
            if (source := source_of(part)) is not None:
                yield source


def replaced(
    messages: Sequence[Mapping[str, Any]], part_for: Callable[[str], dict[str, Any]]
) -> list[Message]:
    """The conversation with each image part replaced."""

    def content(value: object) -> object:
        if not isinstance(value, list):
            return value
        return [part if (source := source_of(part)) is None else part_for(source) for part in parts_of(value)]

    return [
        {name: content(item) if name == "content" else item for name, item in m.items()} for m in messages
    ]


def data_of(source: str) -> bytes:
    """The encoded image. Raises ValueError that describes the problem."""
    if source.startswith("data:"):
        head, _, encoded = source.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data: URL must be in base64")
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("a data: URL that is not base64") from None
        if len(data) > IMAGE_BYTES:
            raise ValueError(f"has {len(data)} bytes, and {IMAGE_BYTES} are allowed")
        return data
    if "://" in source:
        raise ValueError(f"{source} is an address; only files and data: URLs are read")
    try:
        return reading.read_bytes(source, IMAGE_BYTES, links=True)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror or error}") from None


def as_url(source: str) -> str:
    """The address of an image, for a server: a `data:` URL of a file. Raises ValueError that describes the problem."""
    if source.startswith("data:") or "://" in source:
        return source
    data = data_of(source)
    kind = str(opened(data).format).lower().replace("mpo", "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def opened(data: bytes) -> Image.Image:
    """The decoded image. Raises ValueError that describes the problem."""
    from PIL import Image, UnidentifiedImageError

    # Images that are too large are reported below.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(SUFFIXES))
        if image.width * image.height > IMAGE_PIXELS:
            raise ValueError(f"has {image.width} x {image.height} pixels, and {IMAGE_PIXELS} are allowed")
        image.load()
    except UnidentifiedImageError:
        raise ValueError(f"is no image of a known kind ({', '.join(SUFFIXES)})") from None
    except ValueError as error:
        raise ValueError(str(error)) from None
    # Damaged files make Pillow's parsers raise many errors: KeyError, SyntaxError, struct.error and others.
    except Exception as error:
        raise ValueError(f"cannot be decoded: {error}") from None
    return image


def keep(folder: Path, data: bytes) -> str:
    """Store an image in `folder`, if it is not there; returns its name. Raises ValueError, OSError."""
    data, suffix = as_kept(data)
    name = hashlib.sha256(data).hexdigest() + suffix
    files.make_dirs(folder)
    files.create_exclusive(folder / name, data)
    return name


def as_kept(data: bytes) -> tuple[bytes, str]:
    """The bytes to store for an image, and its file suffix. Raises ValueError that describes the problem."""
    image = opened(data)
    # A phone's JPEG may contain a second image after the first; Pillow reports it as another format.
    suffix = SUFFIXES.get(str(image.format))
    try:
        if suffix is None or image.mode != "RGB" or image.getexif().get(ORIENTATION, 1) != 1:
            return _upright(image), ".png"
    except Exception as error:
        raise ValueError(f"cannot be turned as its EXIF data says: {type(error).__name__}: {error}") from None
    return data, suffix


def _upright(image: Image.Image) -> bytes:
    """Convert to RGB on a white background, and rotate as EXIF specifies."""
    from PIL import Image, ImageOps

    turned = ImageOps.exif_transpose(image).convert("RGBA")
    ground = Image.new("RGBA", turned.size, "white")
    buffer = io.BytesIO()
    Image.alpha_composite(ground, turned).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def thumbnail(path: Path, side: int) -> str:
    """A copy of a stored image, at most `side` pixels wide and high, as a data: URL. Raises ProgramFailed, ValueError."""
    image = opened(kept(path)).convert("RGB")
    image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def kept(path: Path) -> bytes:
    """Read a stored image. Raises ProgramFailed if its content does not match its name."""
    try:
        data = reading.read_bytes(path, IMAGE_BYTES)
    except OSError as error:
        raise ProgramFailed(f"{path}: cannot read the image: {error.strerror or error}") from None
    if hashlib.sha256(data).hexdigest() != path.stem:
        raise ProgramFailed(f"{path}: is not the image that the policy saw: its SHA-256 differs")
    return data
