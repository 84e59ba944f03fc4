"""Records what a piece of code does to files, in order: what is written, flushed, named and removed, by which path."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Operation(NamedTuple):
    """`verb`: write, flush (a file), flush-dir, link, rename, symlink, unlink, mkdir, look. `path`: what it makes or changes."""

    verb: str
    path: str
    source: str = ""


class Recorder:
    """All operations below `root` while it records."""

    def __init__(self, root: Path) -> None:
        self.root, self.done = root, list[Operation]()

    def note(self, verb: str, path: Any, source: Any = "") -> None:
        text = os.path.relpath(os.fsdecode(path), self.root)
        if not text.startswith(".."):
            self.done.append(
                Operation(verb, text, os.path.relpath(os.fsdecode(source), self.root) if source else "")
            )

    def all(self, verb: str, path: str = "") -> list[int]:
        """The places of all such operations; `path`: how the path begins."""
        return [
            i for i, one in enumerate(self.done) if one.verb == verb and one.path.startswith(path.rstrip("*"))
        ]

    def one(self, verb: str, path: str) -> int:
        """The place of the only such operation on exactly this path."""
        found = [i for i, one in enumerate(self.done) if (one.verb, one.path) == (verb, path)]
        assert len(found) == 1, (verb, path, self.done)
        return found[0]

    def flushed_before(self, path: str, at: int) -> bool:
        """Whether all that was written to `path` (or to the name that it had before) was flushed before operation `at`."""
        names = {path} | {
            one.source for one in self.done[: at + 1] if one.path == path and one.verb in ("rename", "link")
        }
        written = [i for i, one in enumerate(self.done[:at]) if one.verb == "write" and one.path in names]
        flushed = [i for i, one in enumerate(self.done[:at]) if one.verb == "flush" and one.path in names]
        return bool(written) and bool(flushed) and flushed[-1] > written[-1]


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record what this process does below `root`."""
    recorder = Recorder(root)

    def named(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def around(name: str, note: Callable[..., None]) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            folder = kwargs.get("dir_fd")
            note(*args if folder is None else (f"{named(folder)}/{args[0]}", *args[1:]))
            return real(*args, **kwargs)

        return call

    def flush(fd: int) -> None:
        recorder.note("flush-dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "flush", named(fd))

    real_open = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # What goes through a buffer is written somewhere between here and the next flush.
        if any(letter in mode for letter in "wxa+"):
            recorder.note("write", named(file) if isinstance(file, int) else file)
        return real_open(file, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "pwrite", "pwritev", "ftruncate"):
            patch.setattr(os, name, around(name, lambda fd, *_: recorder.note("write", named(fd))))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, around(name, flush))
        for name in ("rename", "replace"):
            patch.setattr(os, name, around(name, lambda old, new: recorder.note("rename", new, old)))
        patch.setattr(os, "link", around("link", lambda old, new: recorder.note("link", new, old)))
        patch.setattr(os, "symlink", around("symlink", lambda old, new, *_: recorder.note("symlink", new)))
        patch.setattr(os, "unlink", around("unlink", lambda path, *_: recorder.note("unlink", path)))
        patch.setattr(os, "mkdir", around("mkdir", lambda path, *_: recorder.note("mkdir", path)))
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        yield recorder
