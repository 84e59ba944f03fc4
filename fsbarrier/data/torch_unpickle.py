"""Safely reads the pickled part of a torch file, without torch and without any code execution.

This is the standard library's unpickler with all but a few opcodes taken out. Plain trajectories need values, containers, and
calls of one function, the one that makes a tensor; here that call gives a flat array.

It is the library's unpickler in Python, `pickle._Unpickler`, not the one in C, `pickle.Unpickler`. In C only the look-up of
names and of storages can be replaced, and that leaves hostile bytes these ways, each of them tried:
 - a dict key of nested tuples: hashing it overflows the C stack, and the process is gone;
 - dict keys chosen to have one hash: the time grows with the square of the bytes;
 - LONG_BINPUT with a number near 2^32: the memo is an array in C, and tens of gigabytes are asked for;
 - BUILD on what a name stands for: it sets attributes of our own functions;
 - EXT1 to EXT4: a class that the process has looked up before comes from a cache, without a question to `find_class`;
 - BYTEARRAY8: the length that the bytes claim is allocated before anything is read.
In Python an opcode that has no entry in `dispatch` does not exist, the memo is a dict, and keys are checked before they are
hashed.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fsbarrier.data.torch_pickle import MAX_DEPTH, ORDERED_DICT, REBUILD, STORAGE_CLASSES, FormatError

FetchStorage = Callable[[str], bytes]

_TYPECODES = {name: code for code, name in STORAGE_CLASSES.items()}
_SCALARS = frozenset((str, int, float, bool, type(None)))


class ForeignObject(FormatError):
    """The pickle refers to a Python class or function that plain trajectories do not contain; nothing was executed."""


@dataclass(frozen=True, slots=True)
class _StorageClass:
    """Replacement for `torch.IntStorage` and similar: a type code of `array`."""

    code: str


@dataclass(slots=True)
class _Storage:
    """The bytes of one storage, and how many of them no array uses yet."""

    code: str
    data: bytes
    left: int


def _make_array(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> array[Any]:
    """Replacement for `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0:
        raise FormatError("not a tensor")
    if len(size) != 1 or type(size[0]) is not int or size[0] < 0 or (size[0] > 1 and stride != (1,)):
        raise FormatError("a tensor that is not flat; read this file with torch.load(..., weights_only=True)")
    values = array(storage.code)
    start, length = offset * values.itemsize, size[0] * values.itemsize
    if start + length > len(storage.data):
        raise FormatError("a tensor that reaches beyond its storage")
    # Otherwise a small hostile file could refer to the whole storage repeatedly.
    storage.left -= length
    if storage.left < 0:
        raise FormatError("tensors that overlap in their storage")
    values.frombytes(memoryview(storage.data)[start : start + length])
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _empty_dict() -> dict[str, Any]:
    """Replacement for `collections.OrderedDict`: torch stores an empty one with every tensor."""
    return {}


def _refuse(unpickler: Unpickler) -> None:
    raise FormatError(f"the opcode before byte {unpickler.position} is not one that torch.save writes")


#: What torch.save (pickle protocol 2) and GroupPickler write of plain values and flat tensors.
_OPCODES = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE, pickle.BINPERSID),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINUNICODE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


#: What makes a container, or a call that does, and how many are fine whatever the size; beyond that, one for so many bytes.
_CONTAINERS = (
    *(pickle.MARK, pickle.REDUCE, pickle.EMPTY_LIST, pickle.EMPTY_DICT),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
)
FEW_CONTAINERS, BYTES_A_CONTAINER = 10_000, 6


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def counted(unpickler: Unpickler) -> None:
        unpickler.count_container()
        load(unpickler)

    return counted


class Unpickler(pickle._Unpickler):
    """Builds the value that `data` describes; `fetch(key)` gives the bytes of a storage, or raises FormatError.

    Arrays come back as array.array. Work and memory stay in proportion to the bytes given: arrays may not overlap in their
    storage, and containers may not be shared.
    """

    # The library's machine, which the type stubs do not know.
    proto: int
    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, fetch: FetchStorage) -> None:
        self._data = data
        self._containers_left = FEW_CONTAINERS + len(data) // BYTES_A_CONTAINER
        self._fetch = fetch
        self._storages: dict[str, _Storage] = {}

    @property
    def position(self) -> int:
        return self._stream.tell()

    def load(self) -> Any:
        """The one value of a whole pickle. Raises FormatError."""
        return self._run(self._data)

    def load_body(self) -> list[Any]:
        """The trajectories of a body that a GroupPickler wrote. Raises FormatError."""
        # A body is `<trajectory> APPEND`, again and again. With a list before it and STOP behind it, it is a whole pickle.
        values = self._run(pickle.EMPTY_LIST + self._data + pickle.STOP)
        if type(values) is not list:
            raise FormatError("the group does not end with a whole trajectory")
        return values

    def _run(self, data: bytes) -> Any:
        self._stream = io.BytesIO(data)
        super().__init__(self._stream)
        try:
            value = super().load()
        except FormatError:
            raise
        except (
            pickle.UnpicklingError,
            EOFError,
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            struct.error,
        ) as error:
            raise FormatError(f"not a valid pickle at byte {self.position}: {error}") from None
        # 0: it does not say.
        if self.proto not in (0, 2):
            raise FormatError("only pickle protocol 2 is read here")
        if self.stack or self.metastack:
            raise FormatError("the pickle ends with several values instead of one")
        if self.position != len(data):
            raise FormatError(f"bytes after the end of the pickle at byte {self.position}")
        _check_plain(value)
        return value

    def find_class(self, module: str, name: str) -> Any:
        # Compared with the few names that are known, never looked up: no import, no attribute of a module, no dotted path.
        if (module, name) == REBUILD:
            return _make_array
        if (module, name) == ORDERED_DICT:
            return _empty_dict
        if module == "torch" and name in _TYPECODES:
            return _StorageClass(_TYPECODES[name])
        if len(module) + len(name) > 512 or not (module + name).isascii() or not name:
            # The message below carries only what can be a name.
            raise FormatError(f"no name before byte {self.position}")
        raise ForeignObject(f"it contains Python objects ({module}.{name})")

    def persistent_load(self, identity: Any) -> _Storage:
        kind, storage_class, key, _device, count = identity
        if kind != "storage" or not isinstance(storage_class, _StorageClass) or type(key) is not str:
            raise FormatError(f"not a storage at byte {self.position}")
        code = storage_class.code
        storage = self._storages.get(key)
        if storage is None:
            data = self._fetch(key)
            storage = self._storages[key] = _Storage(code, data, len(data))
        size = array(code).itemsize
        if storage.code != code or type(count) is not int or count * size != len(storage.data):
            raise FormatError(f"storage {key} has another size or type than the pickle says")
        return storage

    # --- opcodes that the library would carry out on any object with such a method -----------------------------------------

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise FormatError(f"append to something else than a list at byte {self.position}")
        self.stack[-1].extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise FormatError(f"not a dict and its items at byte {self.position}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Before it is hashed: nested tuples end the process when they are, and of large integers many have one hash.
            if type(key) is not str and not (type(key) is int and -(2**31) <= key < 2**31):
                raise FormatError(f"a dict key of type {type(key).__name__}")
            target[key] = value

    def count_container(self) -> None:
        """An opcode of one byte makes a list of 56. Raises FormatError where there are more than any trajectories have."""
        self._containers_left -= 1
        if self._containers_left < 0:
            raise FormatError(
                f"more lists, dicts and tuples than bytes could be meant for, at byte {self.position}"
            )

    # No BUILD, so no state is set on anything; no NEWOBJ, INST or OBJ, so no class is instantiated; no EXT; nothing with a
    # length of 8 bytes. An opcode that a later Python brings is refused as well.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = (
        dict.fromkeys(range(256), _refuse)
        | {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
        | {pickle.APPEND[0]: load_append, pickle.APPENDS[0]: load_appends}
        | {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}
        | {code[0]: _counted(pickle._Unpickler.dispatch[code[0]]) for code in _CONTAINERS}
    )


def _check_plain(value: Any) -> None:
    """Raises FormatError where something in `value` is not plain, nested too deeply, or there twice."""
    # Level by level, and of each level only what is no scalar: a list of millions of numbers must not be copied.
    level, depth, seen = [value], 0, set[int]()
    while level:
        if depth > MAX_DEPTH:
            raise FormatError(f"the pickle holds values nested more than {MAX_DEPTH} deep")
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _SCALARS or item == ():
                continue
            if kind not in (list, tuple, dict, array):
                raise FormatError("the pickle holds something that is not a plain value")
            # Shared containers would let a few bytes describe a structure that takes for ever to walk through.
            if id(item) in seen:
                raise FormatError("the pickle refers twice to one list, dict or array")
            seen.add(id(item))
            if kind is not array:
                values = item.values() if kind is dict else item
                inner += [one for one in values if type(one) not in _SCALARS]
        level, depth = inner, depth + 1
