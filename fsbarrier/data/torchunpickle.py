"""Reads the pickled part of a torch file, without torch and without the pickle module.

A small stack machine that builds plain values and flat arrays and nothing else: it calls nothing that the bytes name, so
hostile bytes end in `FormatError`. Work and memory stay in proportion to the bytes given: arrays may not overlap in their
storage, and containers may not be shared.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any

from fsbarrier.data.torchpickle import MAX_DEPTH, ORDERED_DICT, REBUILD, STORAGE_CLASSES, FormatError

_TYPECODES = {name: code for code, name in STORAGE_CLASSES.items()}


class ForeignObject(FormatError):
    """The pickle names a Python class or function that plain trajectories do not have; nothing of it was run."""


class _Name(tuple[str, str]):
    """A global that the bytes named: only compared, never looked up."""


class _Storage:
    __slots__ = ("code", "data", "left")

    def __init__(self, code: str, data: bytes) -> None:
        self.code, self.data, self.left = code, data, len(data)


class _Mark:
    """The MARK of the pickle machine."""


_MARK = _Mark()
_SHARED = (str, int, float, _Name, _Storage, type(None))

FetchStorage = Callable[[str], bytes]


class Unpickler:
    """Builds the value that `data` describes; `fetch(key)` gives the bytes of a storage, or raises FormatError.

    Knows the opcodes that torch.save and GroupPickler write. Arrays come back as array.array.
    """

    def __init__(self, data: bytes, fetch: FetchStorage) -> None:
        self._data = data
        self._fetch = fetch
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        """The one value of a whole pickle. Raises FormatError."""
        self._run()
        if len(self._stack) != 1:
            raise FormatError(f"the pickle ends with {len(self._stack)} values instead of one")
        value: Any = _plain(self._stack[0])
        return value

    def load_body(self) -> list[Any]:
        """The trajectories of a body that a GroupPickler wrote. Raises FormatError."""
        values: list[Any] = []
        self._stack.append(values)
        self._run(body=True)
        whole = len(self._stack) == 1 and self._stack[0] is values
        if not whole:
            raise FormatError("the group does not end with a whole trajectory")
        _plain(values)
        return values

    def _run(self, body: bool = False) -> None:
        try:
            self._steps(body)
        except FormatError:
            raise
        except (
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            struct.error,
        ) as error:
            raise FormatError(f"not a valid pickle at byte {self._at}: {error}") from None

    def _take(self, count: int) -> bytes:
        start = self._at
        self._at = end = start + count
        if end > len(self._data):
            raise FormatError(f"the pickle is cut off at byte {start}")
        return self._data[start:end]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at, self._at + 256)
        text = self._data[self._at : end].decode("ascii")
        self._at = end + 1
        return text

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        for position in range(len(stack) - 1, -1, -1):
            if stack[position] is _MARK:
                items = stack[position + 1 :]
                del stack[position:]
                return items
        raise FormatError(f"no mark on the stack at byte {self._at}")

    def _steps(self, body: bool) -> None:
        data, stack = self._data, self._stack
        simple = _SIMPLE
        while not (body and self._at == len(data)):
            if self._at >= len(data):
                raise FormatError("the pickle is cut off")
            code = data[self._at]
            self._at += 1
            if code in simple:
                stack.append(simple[code])
            elif code == 0x68:  # BINGET
                self._recall(self._take(1)[0])
            elif code == 0x71:  # BINPUT
                self._memo[self._take(1)[0]] = stack[-1]
            elif code == 0x4B:  # BININT1
                stack.append(self._take(1)[0])
            elif code == 0x58:  # BINUNICODE
                (length,) = struct.unpack("<I", self._take(4))
                stack.append(self._take(length).decode("utf-8", "surrogatepass"))
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif code == 0x2E:  # STOP
                if body or self._at != len(data):
                    raise FormatError(f"bytes after the end of the pickle at byte {self._at}")
                return
            else:
                self._rare(code)

    def _recall(self, number: int) -> None:
        value = self._memo[number]
        # Shared containers would let a few bytes describe a structure that takes for ever to walk through.
        if not isinstance(value, _SHARED):
            raise FormatError("the pickle refers twice to one list or dict")
        self._stack.append(value)

    def _rare(self, code: int) -> None:
        stack = self._stack
        if code == 0x61 or code == 0x65:  # APPEND, APPENDS
            items = [stack.pop()] if code == 0x61 else self._since_mark()
            if type(stack[-1]) is not list:
                raise FormatError(f"append to something else than a list at byte {self._at}")
            stack[-1].extend(items)
        elif code == 0x73 or code == 0x75:  # SETITEM, SETITEMS
            items = [stack.pop(-2), stack.pop()] if code == 0x73 else self._since_mark()
            self._set_items(items)
        elif code == 0x74:  # TUPLE
            items = self._since_mark()
            stack.append(tuple(items))
        elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            if len(stack) < count:
                raise FormatError("tuple of more values than there are")
            stack[-count:] = [tuple(stack[-count:])]
        elif code == 0x52:  # REDUCE
            arguments = stack.pop()
            stack.append(self._reduce(stack.pop(), arguments))
        elif code == 0x51:  # BINPERSID
            stack.append(self._storage(stack.pop()))
        elif code == 0x63:  # GLOBAL
            stack.append(self._global())
        elif code == 0x80:  # PROTO
            if self._take(1)[0] != 2:
                raise FormatError("only pickle protocol 2 is read here")
        else:
            self._rare_numbers(code)

    def _rare_numbers(self, code: int) -> None:
        stack = self._stack
        if code == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", self._take(8))[0])
        elif code == 0x4D:  # BININT2
            stack.append(struct.unpack("<H", self._take(2))[0])
        elif code == 0x4A:  # BININT
            stack.append(struct.unpack("<i", self._take(4))[0])
        elif code == 0x8A:  # LONG1
            stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))
        elif code == 0x6A:  # LONG_BINGET
            self._recall(struct.unpack("<I", self._take(4))[0])
        elif code == 0x72:  # LONG_BINPUT
            self._memo[struct.unpack("<I", self._take(4))[0]] = stack[-1]
        else:
            raise FormatError(f"opcode {code:#04x} at byte {self._at - 1} is not one that torch.save writes")

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise FormatError(f"not a dict and its items at byte {self._at}")
        for position in range(0, len(items), 2):
            key = items[position]
            if type(key) is not str and not (type(key) is int and -(2**31) <= key < 2**31):
                raise FormatError(f"a dict key of type {type(key).__name__}")
            target[key] = items[position + 1]

    def _global(self) -> _Name:
        name = _Name((self._line(), self._line()))
        if name not in (REBUILD, ORDERED_DICT) and (name[0] != "torch" or name[1] not in _TYPECODES):
            raise ForeignObject(f"it holds Python objects ({name[0]}.{name[1]})")
        return name

    def _storage(self, identity: Any) -> _Storage:
        kind, name, key, _device, count = identity
        if (
            kind != "storage"
            or not isinstance(name, _Name)
            or name[1] not in _TYPECODES
            or type(key) is not str
        ):
            raise FormatError(f"not a storage at byte {self._at}")
        code = _TYPECODES[name[1]]
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(code, self._fetch(key))
        if (
            storage.code != code
            or type(count) is not int
            or count * array(code).itemsize != len(storage.data)
        ):
            raise FormatError(f"storage {key} has another size or type than the pickle says")
        return storage

    def _reduce(self, function: Any, arguments: Any) -> Any:
        if function == ORDERED_DICT and isinstance(function, _Name) and arguments == ():
            return {}
        if not isinstance(function, _Name) or function != REBUILD:
            raise FormatError(f"a call of something that is not a tensor at byte {self._at}")
        storage, offset, size, stride = arguments[:4]
        if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0:
            raise FormatError(f"not a tensor at byte {self._at}")
        if len(size) != 1 or type(size[0]) is not int or size[0] < 0 or (size[0] > 1 and stride != (1,)):
            raise FormatError(
                "a tensor that is not flat; read this file with torch.load(..., weights_only=True)"
            )
        values = array(storage.code)
        start, length = offset * values.itemsize, size[0] * values.itemsize
        if start + length > len(storage.data):
            raise FormatError("a tensor that reaches beyond its storage")
        storage.left -= length
        if storage.left < 0:
            raise FormatError("tensors that overlap in their storage")
        values.frombytes(memoryview(storage.data)[start : start + length])
        if sys.byteorder == "big":
            values.byteswap()
        return values


_SIMPLE: dict[int, Any] = {0x28: _MARK, 0x4E: None, 0x88: True, 0x89: False, 0x29: ()}


def _plain(value: Any) -> Any:
    """`value`, once it is sure that no leftover of the machine is inside. Raises FormatError."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, (_Name, _Storage, _Mark)) or depth > MAX_DEPTH:
            raise FormatError("the pickle holds something that is not a plain value")
        if type(item) is dict:
            todo.extend((inner, depth + 1) for inner in item.values())
        elif type(item) in (list, tuple):
            todo.extend((inner, depth + 1) for inner in item)
    return value
