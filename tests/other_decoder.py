"""A second reader of a rank's trajectory file, written from the description of the format, which shares no code with the first one."""

from __future__ import annotations

import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

# the numbers of msgpack by their first byte: as struct reads them
NUMBERS = dict(zip(range(0xCA, 0xD4), "fdBHIQbhiq", strict=True))
# how many bytes say the length: of binary data, extensions, texts, lists and maps
SIZES = {0xC4: "B", 0xC5: "H", 0xC6: "I", 0xC7: "B", 0xC8: "H", 0xC9: "I", 0xD9: "B", 0xDA: "H", 0xDB: "I"}
SIZES |= {0xDC: "H", 0xDD: "I", 0xDE: "H", 0xDF: "I"}


def value_at(data: bytes, at: int) -> tuple[Any, int]:
    """The msgpack value that begins at `at`, and where it ends."""
    kind, at = data[at], at + 1
    if kind < 0x80 or kind >= 0xE0:
        return kind if kind < 0x80 else kind - 256, at
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    if form := NUMBERS.get(kind):
        return struct.unpack_from(f">{form}", data, at)[0], at + struct.calcsize(form)
    if form := SIZES.get(kind):
        (size,), at = struct.unpack_from(f">{form}", data, at), at + struct.calcsize(form)
    else:
        size = 1 << kind - 0xD4 if 0xD4 <= kind <= 0xD8 else kind & (0x1F if kind & 0x20 else 0x0F)
    if kind < 0x90 or kind >= 0xDE:
        pairs = []
        for _ in range(2 * size):
            item, at = value_at(data, at)
            pairs.append(item)
        return dict(zip(pairs[::2], pairs[1::2], strict=True)), at
    if kind < 0xA0 or kind in (0xDC, 0xDD):
        items = []
        for _ in range(size):
            item, at = value_at(data, at)
            items.append(item)
        return items, at
    if 0xC7 <= kind <= 0xC9 or 0xD4 <= kind <= 0xD8:
        code, raw = data[at], data[at + 1 : at + 1 + size]
        made = int.from_bytes(raw, "little", signed=True) if code == 1 else array(chr(code), raw)
        return made, at + 1 + size
    raw = data[at : at + size]
    return raw if kind <= 0xC6 and kind >= 0xC4 else raw.decode("utf-8", "surrogatepass"), at + size


def frames(path: Path) -> list[dict[str, Any]]:
    """The contents of a whole file: its header, its groups, and perhaps its end."""
    data, found = path.read_bytes(), []
    assert data[:8] == b"fsbgrp1\n"
    at = 8
    while at < len(data):
        size, of_content, of_head = struct.unpack_from("<III", data, at)
        content = data[at + 12 : at + 12 + size]
        assert zlib.crc32(data[at : at + 8]) == of_head and zlib.crc32(content) == of_content
        value, end = value_at(content, 0)
        assert end == size == len(content)
        found.append(value)
        at += 12 + size
    return found
