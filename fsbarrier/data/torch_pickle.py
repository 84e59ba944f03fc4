"""Writes the pickled part of a torch file without torch, using only opcodes that torch's weights-only unpickler accepts."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any

from fsbarrier.errors import UsageError

#: alignment and padding of storages in bytes, required for torch.load(mmap=True) and for copying groups
ALIGNMENT = 64
#: maximum nesting of containers in one value
MAX_DEPTH = 200

STORAGE_CLASSES = {
    "i": "IntStorage",
    "f": "FloatStorage",
    "B": "ByteStorage",
    "q": "LongStorage",
    "d": "DoubleStorage",
}
REBUILD = ("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = ("collections", "OrderedDict")


class FormatError(UsageError):
    """Not a file of this format, or damaged; the message contains the position."""


class GroupPickler:
    """Pickles the trajectories of one group into a body that may be joined with other bodies inside one list.

    A body is one `<trajectory> APPEND` a trajectory. It starts its memo anew, so bodies can be put one after another in
    any order. `storages` holds, after the last `add`, the bytes of one storage per array type, keyed by type code.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.storages: dict[str, bytearray] = {}
        self._out = bytearray()
        self._memo: dict[object, int] = {}
        self._pending: dict[str, list[int]] = {}

    def add(self, trajectory: Mapping[str, object]) -> None:
        """Append one trajectory. Raises UsageError naming the field whose value is not plain."""
        self._value(trajectory, "trajectory", 0)
        self._out += b"a"

    def body(self) -> bytes:
        """The pickled bytes. The sizes of the storages are only known now, so they are filled in here."""
        out = self._out
        for code, places in self._pending.items():
            storage = self.storages[code]
            storage.extend(bytes(-len(storage) % ALIGNMENT or (0 if storage else ALIGNMENT)))
            count = len(storage) // array(code).itemsize
            if count > 0x7FFFFFFF:
                raise UsageError(
                    f"group {self.key}: more than 2^31 values in one array type; make the group smaller"
                )
            for place in places:
                struct.pack_into("<i", out, place, count)
        return bytes(out)

    def _value(self, value: object, where: str, depth: int) -> None:
        out = self._out
        if depth > MAX_DEPTH:
            raise UsageError(f"{where}: nested more than {MAX_DEPTH} deep")
        if isinstance(value, str):
            self._text(value)
        elif value is None:
            out += b"N"
        elif isinstance(value, bool):
            out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            _put_int(out, value, where)
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif isinstance(value, array):
            self._array(value, where)
        elif isinstance(value, dict):
            out += b"}"
            if value:
                out += b"("
                for name, item in value.items():
                    if not isinstance(name, str):
                        raise UsageError(f"{where}: the key {name!r} is not a string")
                    self._text(name)
                    self._value(item, f"{where}.{name}", depth + 1)
                out += b"u"
        elif isinstance(value, list):
            out += b"]"
            if value:
                out += b"("
                for index, item in enumerate(value):
                    self._value(item, f"{where}[{index}]", depth + 1)
                out += b"e"
        elif isinstance(value, tuple):
            out += b"("
            for index, item in enumerate(value):
                self._value(item, f"{where}[{index}]", depth + 1)
            out += b"t"
        else:
            raise UsageError(
                f"{where} is a {type(value).__name__}; a trajectory holds None, bool, int, float, str, list, tuple, "
                "dict with string keys, and array.array"
            )

    def _text(self, text: str) -> None:
        if self._recall(text):
            return
        data = text.encode("utf-8", "surrogatepass")
        self._out += b"X" + struct.pack("<I", len(data)) + data
        self._remember(text)

    def _global(self, name: tuple[str, str]) -> None:
        if not self._recall(name):
            self._out += b"c%s\n%s\n" % (name[0].encode(), name[1].encode())
            self._remember(name)

    def _recall(self, what: object) -> bool:
        number = self._memo.get(what)
        if number is None:
            return False
        self._out += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def _remember(self, what: object) -> None:
        number = self._memo[what] = len(self._memo)
        self._out += b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)

    def _array(self, values: array[Any], where: str) -> None:
        code = "q" if values.typecode == "l" and values.itemsize == 8 else values.typecode
        if code not in STORAGE_CLASSES:
            raise UsageError(
                f"{where}: array type {values.typecode!r} has no torch type here; use one of i f B q d"
            )
        if sys.byteorder == "big":
            values = values[:]
            values.byteswap()
        storage = self.storages.setdefault(code, bytearray())
        offset = len(storage) // values.itemsize
        storage += memoryview(values).cast("B")
        out = self._out
        self._global(REBUILD)
        out += b"("
        if not self._recall(("storage", code)):
            out += b"("
            self._text("storage")
            self._global(("torch", STORAGE_CLASSES[code]))
            self._text(f"{self.key}-{code}")
            self._text("cpu")
            self._pending.setdefault(code, []).append(len(out) + 1)
            out += b"J\0\0\0\0tQ"
            self._remember(("storage", code))
        _put_int(out, offset, where)
        _put_int(out, len(values), where)
        out += b"\x85K\x01\x85\x89"
        self._global(ORDERED_DICT)
        out += b")RtR"


def file_pickle(metadata: dict[str, object]) -> tuple[bytes, bytes]:
    """What goes before and after the joined bodies to make `{"trajectories": [bodies], "metadata": metadata}`."""
    pickler = GroupPickler("")
    pickler._text("metadata")
    pickler._value(metadata, "metadata", 0)
    if pickler.storages:
        raise UsageError("metadata cannot hold arrays")
    name = b"trajectories"
    before = b"\x80\x02}X" + struct.pack("<I", len(name)) + name + b"]"
    return before, b"s" + pickler.body() + b"s."


def _put_int(out: bytearray, value: int, where: str) -> None:
    if 0 <= value < 256:
        out += b"K%c" % value
    elif 0 <= value < 65536:
        out += b"M" + struct.pack("<H", value)
    elif -0x80000000 <= value < 0x80000000:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise UsageError(f"{where}: an integer of {value.bit_length()} bits is too large")
        out += b"\x8a%c" % len(data) + data
