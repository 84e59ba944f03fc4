"""Pictures as phones and broken programs make them: each is kept, or refused before the start by the code that keeps it."""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fsbarrier.data import images


def encoded(kind: str, **more: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(buffer, kind, **more)
    return buffer.getvalue()


def two_in_one() -> bytes:
    """A phone's JPEG with a second image behind the first."""
    return encoded("MPO", save_all=True, append_images=[Image.new("RGB", (8, 4), "blue")])


def with_broken_exif(kind: str) -> bytes:
    broken = b"Exif\0\0MM\0*\0\0\0\x08\0\xff" + b"\x01\x12\0\x03\xff\xff"
    if kind == "PNG":
        data = encoded("PNG")
        chunk = b"eXIf" + b"XX\0\0garbage"
        return (
            data[:33]
            + struct.pack(">I", len(chunk) - 4)
            + chunk
            + struct.pack(">I", zlib.crc32(chunk))
            + data[33:]
        )
    return encoded(kind, exif=broken)


@pytest.mark.parametrize(
    "data",
    [two_in_one(), *(with_broken_exif(kind) for kind in ("PNG", "WEBP", "JPEG"))],
    ids=["MPO", "PNG", "WEBP", "JPEG"],
)
def test_what_is_kept_is_what_the_check_accepted(data: bytes, tmp_path: Path) -> None:
    try:
        accepted = images.as_kept(data)
    except ValueError as error:
        assert re.match("cannot be", str(error))
        with pytest.raises(ValueError, match=re.escape(str(error))):
            images.keep(tmp_path, data)
    else:
        name = images.keep(tmp_path, data)
        assert (tmp_path / name).read_bytes() == accepted[0]
        assert images.opened(accepted[0]).size == (8, 4) and images.as_url(str(tmp_path / name)).startswith(
            "data:image/"
        )


def test_a_file_of_the_kernel_is_no_image() -> None:
    if not Path("/proc/kmsg").exists():
        pytest.skip("this machine has no /proc/kmsg")
    # The second time nothing is left in it, and a read would have to wait.
    for _ in range(2):
        with pytest.raises(ValueError, match=r"/proc/kmsg: |is no image"):
            images.as_kept(images.data_of("/proc/kmsg"))
