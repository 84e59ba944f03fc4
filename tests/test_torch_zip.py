"""The zip container and the pickle in it: what torch and zipfile open, and what hostile bytes can do (nothing)."""

from __future__ import annotations

import copyreg
import errno
import io
import os
import pickle
import pickletools
import sys
import time
import tracemalloc
import zipfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_files import trajectory, write_part

from fsbarrier.data import torch_unpickle, torch_zip
from fsbarrier.data.torch_pickle import MAX_DEPTH, FormatError, GroupPickler, file_pickle
from fsbarrier.data.torch_unpickle import ForeignObject, Unpickler
from fsbarrier.data.torch_zip import (
    Entry,
    crc32_combine,
    directory_bytes,
    header_bytes,
    make_entry,
    read_directory,
)
from fsbarrier.errors import UsageError
from fsbarrier.trajectories import load

#: those of protocol 2 that torch's own weights-only unpickler lists, too
WRITTEN_OPCODES = {
    *("PROTO", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MARK", "TUPLE", "TUPLE1"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINUNICODE", "BINPUT", "LONG_BINPUT"),
    *("BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BINPERSID", "NONE", "NEWTRUE"),
    *("NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "STOP"),
}

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=20)
    | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8).map(lambda numbers: array("i", numbers))
    | st.lists(st.floats(width=32, allow_nan=False), max_size=8).map(lambda numbers: array("f", numbers))
    | st.binary(max_size=8).map(lambda data: array("B", data)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


def pickled(values: list[dict[str, Any]]) -> tuple[bytes, dict[str, bytes]]:
    pickler = GroupPickler("k")
    for value in values:
        pickler.add(value)
    body = pickler.body()
    return body, {f"k-{code}": bytes(content) for code, content in pickler.storages.items()}


@given(st.lists(st.dictionaries(st.text(max_size=8), plain_values, max_size=4), max_size=4))
@settings(max_examples=100, deadline=None)
def test_what_is_pickled_comes_back(values: list[dict[str, Any]]) -> None:
    body, storages = pickled(values)
    assert Unpickler(body, storages.__getitem__).load_body() == values


def test_bodies_join_in_any_order_with_their_own_memo() -> None:
    first, one = pickled([trajectory(1, 0)])
    second = GroupPickler("other")
    second.add(trajectory(2, 0))
    tail = second.body()
    storages = one | {f"other-{code}": bytes(content) for code, content in second.storages.items()}
    before, after = file_pickle({"run_id": "r"})
    loaded = Unpickler(before + tail + first + after, storages.__getitem__).load()
    assert loaded == {"trajectories": [trajectory(2, 0), trajectory(1, 0)], "metadata": {"run_id": "r"}}


def test_a_group_shares_one_storage_a_type_and_repeated_texts() -> None:
    body, storages = pickled([trajectory(1, 0), trajectory(1, 0)])
    assert sorted(storages) == ["k-B", "k-f", "k-i"]
    assert all(len(content) % 64 == 0 for content in storages.values())
    assert body.count(b"question 1") == 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": {1: 2}}, "trajectory.a: the key 1 is not a string"),
        ({"a": [1, {"b": object()}]}, "trajectory.a[1].b is a object"),
        ({"a": b"bytes"}, "trajectory.a is a bytes"),
        ({"a": array("H", [1])}, "trajectory.a: array type 'H'"),
        ({"a": 1 << 3000}, "trajectory.a: an integer of 3001 bits"),
    ],
)
def test_a_value_that_is_not_plain_is_named(value: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        GroupPickler("k").add(value)
    assert says in str(raised.value)


def test_a_value_inside_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(UsageError, match=f"nested more than {MAX_DEPTH} deep"):
        GroupPickler("k").add(endless)


def no_storage(key: str) -> bytes:
    raise FormatError(f"no storage {key}")


def test_python_objects_are_named_and_nothing_runs(tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (trap.write_text, ("boom",))

    with pytest.raises(ForeignObject, match=r"getattr|pathlib|builtins"):
        Unpickler(pickle.dumps({"trajectories": [Bomb()]}, protocol=2), no_storage).load()
    assert not trap.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x04.",
        b"\x80\x02}q\x00(X\x01\0\0\0ah\x00s.",  # a dict inside itself
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02X\xff\xff\xff\xffa.",  # a text longer than the file
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02Nr\xff\xff\xff\xff",  # a memo slot of a size that a C unpickler would allocate
        b"\x80\x02ctorch\nIntStorage\n.",
        b"\x80\x02ctorch\nIntStorage\n)R.",
        b"\x80\x02(.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02})K\x01s.",
        b"\x80\x02}NK\x01s.",
        b"\x80\x02)\x85\x86.",
        b"\x80\x02(X\x07\0\0\0storagectorch\nIntStorage\nX\x01\0\0\0kX\x03\0\0\0cpuK\x01tQ.",
        b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b".",  # nested lists
        b"\x80\x02)" + b"\x85" * 100_000 + b".",
        b"\x80\x02N.N",
        b"\x80\x02NN.",
        b"cos\nsystem\n",
        b"c" + b"x" * 10_000,
        b"\x8a\xff",
    ],
)
def test_hostile_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Unpickler(data, no_storage).load()


def tensor_pickle(key: bytes, count: int, offset: int, size: int) -> bytes:
    storage = b"(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\0" + key + b"X\x03\0\0\0cpuK%ctQ" % count
    numbers = b"K%cK%c\x85K\x01\x85\x89ccollections\nOrderedDict\n)R" % (offset, size)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"tR"


def test_arrays_cannot_multiply_or_leave_their_storage() -> None:
    data = bytes(range(64))
    fetch = {"k": data}.__getitem__
    assert Unpickler(b"\x80\x02" + tensor_pickle(b"k", 64, 2, 3) + b".", fetch).load() == array(
        "B", [2, 3, 4]
    )
    with pytest.raises(FormatError, match="beyond"):
        Unpickler(b"\x80\x02" + tensor_pickle(b"k", 64, 60, 5) + b".", fetch).load()
    with pytest.raises(FormatError, match="size"):
        Unpickler(b"\x80\x02" + tensor_pickle(b"k", 63, 0, 5) + b".", fetch).load()
    twice = b"\x80\x02" + tensor_pickle(b"k", 64, 0, 64) + tensor_pickle(b"k", 64, 0, 64) + b"\x86."
    with pytest.raises(FormatError, match="overlap"):
        Unpickler(twice, fetch).load()


#: what the bytes try, each as the value in `{"trajectories": value}`
ATTACKS = {
    "a name that is code": b"cbuiltins\neval\nX\x01\0\0\x001\x85R",
    "a dotted name": b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n",
    "a dotted name through a known module": b"ccollections\nOrderedDict.fromkeys\n)R",
    "a module that would be imported": b"cthis\ns\n",
    "names from the stack": b"X\x02\0\0\0osX\x06\0\0\0system\x93",
    "INST": b"(X\x01\0\0\x001ibuiltins\neval\n",
    "INST of a known name": b"(icollections\nOrderedDict\n",
    "OBJ": b"(ccollections\nOrderedDict\no",
    "NEWOBJ": b"ccollections\nOrderedDict\n)\x81",
    "NEWOBJ_EX": b"ccollections\nOrderedDict\n)}\x92",
    "BUILD on a function": b"ccollections\nOrderedDict\nN}(X\x0c\0\0\0__defaults__)u\x86b",
    "BUILD on a storage class": b"ctorch\nIntStorage\n}(X\x04\0\0\0codeX\x01\0\0\0fub",
    "BUILD on a dict": b"}}b",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\0",
    "EXT4": b"\x84\x01\0\0\0",
    "a storage named in text": b"Pstorage\n",
    "a call of a value": b"X\x04\0\0\0eval)R",
    "a call of a storage class": b"ctorch\nIntStorage\n)R",
    "a call of a dict": b"}(K\x01K\x02u)R",
    "append to a dict": b"}K\x01a",
    "append to an array": b"",
    "a key in a list": b"]K\x01aK\0K\x02s",
    "a memo slot in text": b"Np99999999999\n",
    "a memo slot of 4 bytes": b"Nr\xff\xff\xff\xff" + b"j\xfe\xff\xff\xff\x86",
    "a list inside itself": b"]q\0h\0a",
    "one list twice": b"]q\0h\0\x86",
    "one array twice": b"",
    "a list doubled again and again": b"]" + b"2\x86" * 40,
    "lists of lists of one list": b"]q\0" + b"".join(b"(h%ch%clq%c" % (n, n, n + 1) for n in range(40)),
    "tuples of tuples of one tuple": b"K\x01\x85q\0"
    + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(40)),
    "a text longer than the file": b"X\xff\xff\xff\xff",
    "a text of 8 bytes' length": b"\x8d" + b"\xff" * 7 + b"\x7f",
    "bytes longer than the file": b"B\xff\xff\xff\x7f",
    "bytes of 8 bytes' length": b"\x8e" + b"\xff" * 7 + b"\x0f",
    "a bytearray that is allocated first": b"\x96" + b"\0\0\0\0\x10\0\0\0",
    "a frame longer than the file": b"\x95" + b"\xff" * 7 + b"\x7f",
    "a number longer than the file": b"\x8b\xff\xff\xff\x7f",
    "a number in text": b"L" + b"9" * 100_000 + b"L\n",
    "a key of nested tuples": b"})" + b"\x85" * 300_000 + b"Ns",
    "a key of tuples nested through the memo": b"}Nq\0" + b"h\0\x85q\0" * 100_000 + b"Ns",
    "a set of nested tuples": b"\x8f()" + b"\x85" * 300_000 + b"\x90",
    "keys of one hash": b"}("
    + b"".join(b"\x8a\x14" + (n * (2**61 - 1)).to_bytes(20, "little") + b"N" for n in range(1, 20_000))
    + b"u",
    "floats as keys": b"}G" + bytes(8) + b"Ns",
    "nested dicts": b"}K\0" * 100_000 + b"N" + b"s" * 100_000,
    "nested lists": b"]" * 100_000 + b"a" * 99_999,
    "nested tuples": b")" + b"\x85" * 100_000,
    "a key too many": b"}(K\x01u",
    "marks": b"(" * 100_000,
    "an out-of-band buffer": b"\x97",
    "a buffer made read-only": b"]\x98",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_hostile_bytes_try_ends_in_a_clean_error(attack: str) -> None:
    array_of_8 = tensor_pickle(b"k", 64, 0, 8)
    special = {"append to an array": array_of_8 + b"K\x01a", "one array twice": array_of_8 + b"q\0h\0\x86"}
    data = b"\x80\x02}X\x0c\0\0\0trajectories" + (special.get(attack) or ATTACKS[attack]) + b"s."
    sys.modules.pop("this", None)
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(FormatError):
            Unpickler(data, {"k": bytes(64)}.__getitem__).load()
        with pytest.raises(FormatError):
            Unpickler(data[2:-1], {"k": bytes(64)}.__getitem__).load_body()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400 * len(data) + (1 << 20)
    # Far more than it takes: keys of one hash would take minutes.
    assert time.process_time() - begin < 60
    assert "this" not in sys.modules
    assert Unpickler(b"\x80\x02ccollections\nOrderedDict\n)R.", no_storage).load() == {}


def test_an_extension_that_a_library_registered_is_out_of_reach() -> None:
    """The unpickler in C takes what it has looked up once from a cache, and asks nobody."""
    copyreg.add_extension("builtins", "eval", 255)
    try:
        assert pickle.loads(b"\x80\x02\x82\xff.") is eval
        with pytest.raises(FormatError):
            Unpickler(b"\x80\x02\x82\xff.", no_storage).load()
    finally:
        copyreg.remove_extension("builtins", "eval", 255)


def test_only_the_opcodes_that_are_written_exist() -> None:
    known = {opcode.code.encode("latin-1")[0]: opcode.name for opcode in pickletools.opcodes}
    refused = {name for code, name in known.items() if Unpickler.dispatch[code] is torch_unpickle._refuse}
    assert {known[code] for code in known} - refused == WRITTEN_OPCODES | {"TUPLE2", "TUPLE3"}
    assert sorted(Unpickler.dispatch) == list(range(256))


@given(st.binary(max_size=300))
@settings(max_examples=500, deadline=None)
def test_random_pickles_give_a_value_or_a_clean_error(data: bytes) -> None:
    for run in (Unpickler(b"\x80\x02" + data, no_storage).load, Unpickler(data, no_storage).load_body):
        try:
            run()
        except FormatError:
            pass


@given(st.integers(0, 2**31), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_mutated_pickles_give_a_value_or_a_clean_error(place: int, value: int) -> None:
    body, storages = pickled([trajectory(1, 0)])
    mutated = bytearray(body)
    mutated[place % len(body)] = value

    def fetch(key: str) -> bytes:
        return storages[key] if key in storages else no_storage(key)

    try:
        Unpickler(bytes(mutated), fetch).load_body()
    except FormatError:
        pass


@given(st.binary(max_size=50), st.binary(max_size=3000))
@settings(deadline=None)
def test_checksums_combine(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_checksums_combine_over_more_than_4_gb() -> None:
    size, zeros = 5 << 30, bytes(1 << 20)
    expected = tail = 0
    for done in range(0, size, len(zeros)):  # by doubling: 5 GB of zeros are not read
        expected = crc32_combine(expected, zlib.crc32(zeros), len(zeros))
        assert done < size
    for bit in (32, 30):
        half = zlib.crc32(zeros)
        for power in range(20, bit):
            half = crc32_combine(half, half, 1 << power)
        tail = crc32_combine(tail, half, 1 << bit)
    assert expected == tail


def make_zip(path: Path, contents: dict[str, bytes]) -> None:
    with path.open("wb") as stream:
        entries = []
        for name, content in contents.items():
            entries.append(make_entry(name, len(content), zlib.crc32(content), stream.tell()))
            stream.write(header_bytes(entries[-1]) + content)
        for piece in list(directory_bytes(entries, stream.tell())):
            stream.write(piece)


def opened(path: Path) -> list[Entry]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_directory(fd, path.stat().st_size)
    finally:
        os.close(fd)


CONTENTS = {
    "archive/version": b"3\n",
    "archive/data/a": b"x" * 100,
    "archive/empty": b"",
    "archive/data/b": b"y" * 64,
}


def test_a_directory_is_read_again_when_the_mount_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_zip(tmp_path / "z", CONTENTS)
    failures = [errno.ESTALE, errno.EIO, errno.ESTALE]

    class Unsteady(io.FileIO):
        """What zipfile reads through."""

        def read(self, size: int | None = -1, /) -> bytes:
            if failures:
                raise OSError(failures[-1], os.strerror(failures.pop()))
            return super().read(size)

    monkeypatch.setattr(os, "fdopen", Unsteady)
    assert [entry.name for entry in opened(tmp_path / "z")] == list(CONTENTS) and not failures


@pytest.mark.parametrize("limits", [(None, None), (1, 1), (50, None), (None, 2)], ids=str)
def test_zipfile_reads_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int | None, int | None]
) -> None:
    """Lowered limits bring out the zip64 fields that files beyond 4 GB or 65535 entries have."""
    if limits[0]:
        monkeypatch.setattr(torch_zip, "ZIP64_SIZE_FROM", limits[0])
    if limits[1]:
        monkeypatch.setattr(torch_zip, "ZIP64_COUNT_FROM", limits[1])
    make_zip(tmp_path / "z", CONTENTS)
    with zipfile.ZipFile(tmp_path / "z") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == CONTENTS
        assert archive.testzip() is None
    data = (tmp_path / "z").read_bytes()
    for entry in opened(tmp_path / "z"):
        assert data[entry.data_offset : entry.end] == CONTENTS[entry.name]
        assert entry.data_offset % 64 == 0
        header = torch_zip.parse_header(data[entry.offset : entry.offset + 1024], entry.offset)
        assert header == entry


def test_more_than_65535_entries(tmp_path: Path) -> None:
    contents = {f"archive/data/{number}": b"" for number in range(65_600)}
    make_zip(tmp_path / "z", contents)
    assert len(opened(tmp_path / "z")) == 65_600
    with zipfile.ZipFile(tmp_path / "z") as archive:
        assert len(archive.namelist()) == 65_600


def test_compressed_and_overlapping_entries_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deflated", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    with pytest.raises(FormatError, match="compressed"):
        opened(tmp_path / "deflated")
    entry = make_entry("archive/a", 64, zlib.crc32(bytes(64)), 0)
    with (tmp_path / "twice").open("wb") as stream:
        stream.write(header_bytes(entry) + bytes(64))
        stream.writelines(list(directory_bytes([entry, entry], stream.tell())))
    with pytest.raises(FormatError, match="overlap"):
        opened(tmp_path / "twice")


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_files_give_a_value_or_a_clean_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    content = bytearray(write_part(folder / "whole", range(2), finished=True).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + 1] = data.draw(st.binary(max_size=4))
        if not content:
            break
    (folder / "mutated").write_bytes(content)
    tracemalloc.start()
    try:
        load(folder / "mutated")
    except FormatError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20 * len(content) + (1 << 20)


@pytest.mark.torch
def test_plain_files_of_torch_save_are_read(tmp_path: Path) -> None:
    import torch

    arrays = {
        "i": torch.arange(5, dtype=torch.int32),
        "f": torch.rand(3),
        "q": torch.arange(4),
        "e": torch.zeros(0),
    }
    saved = {"trajectories": [{"task": "x", "n": 2**40, **arrays}], "metadata": {"a": (1, None, 2.5, True)}}
    torch.save(saved, tmp_path / "plain.pt")
    loaded = load(tmp_path / "plain.pt")
    found = loaded["trajectories"][0]
    assert {name: found[name].tolist() for name in arrays} == {name: t.tolist() for name, t in arrays.items()}
    assert (found["task"], found["n"], loaded["metadata"]) == ("x", 2**40, saved["metadata"])
    torch.save({"trajectories": [torch.rand(2, 2)], "metadata": {}}, tmp_path / "square.pt")
    with pytest.raises(FormatError, match="not flat"):
        load(tmp_path / "square.pt")


@pytest.mark.torch
def test_torch_opens_zip64_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch_zip, "ZIP64_SIZE_FROM", 1)
    monkeypatch.setattr(torch_zip, "ZIP64_COUNT_FROM", 1)
    path = write_part(tmp_path / "part", range(3), finished=True)
    loaded = torch.load(path, weights_only=True)
    assert [item["task_index"] for item in loaded["trajectories"]] == [0, 0, 1, 1, 2, 2]
    assert loaded["trajectories"][3]["token_ids"].tolist() == trajectory(1, 1)["token_ids"].tolist()
    assert len(load(path)["trajectories"]) == 6


def test_the_pickle_needs_no_torch_names_beyond_the_known(tmp_path: Path) -> None:
    """The opcodes are those of protocol 2 that torch's own unpickler lists."""
    path = write_part(tmp_path / "part", range(2), finished=True)
    with zipfile.ZipFile(path) as archive:
        operations = list(pickletools.genops(io.BytesIO(archive.read("archive/data.pkl"))))
    names = {operation.name for operation, _, _ in operations}
    assert names <= WRITTEN_OPCODES
    found = {argument for operation, argument, _ in operations if operation.name == "GLOBAL"}
    assert found == {
        "torch._utils _rebuild_tensor_v2",
        "collections OrderedDict",
        *(f"torch {name}Storage" for name in ("Int", "Float", "Byte")),
    }
