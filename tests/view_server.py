"""`fsbarrier view` as a process, and a browser that looks at it."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@dataclass
class Viewer:
    """A running `fsbarrier view`: the lines that it printed, and its process."""

    process: subprocess.Popen[str]
    said: list[str]

    @property
    def address(self) -> str:
        """The printed address, with the key."""
        (found,) = re.findall(r"http://\S+", "".join(self.said))
        return str(found)

    @property
    def base(self) -> str:
        return self.address.partition("/?")[0]

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Its exit code after a signal, and what it said since."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, rest


@contextlib.contextmanager
def viewing(*words: object, cwd: Path | None = None) -> Iterator[Viewer]:
    argv = [sys.executable, "-m", "fsbarrier", "view", *map(str, words)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    said: list[str] = []
    try:
        assert process.stdout
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ctrl-C"):
                break
        else:
            pytest.fail(f"it ended: {said}")
        yield Viewer(process, said)
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def asked(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, Mapping[str, str], str]:
    """Status, headers and text of a GET that follows nothing."""
    opener = urllib.request.build_opener(_Stays, urllib.request.ProxyHandler({}))
    try:
        answer: HTTPResponse = opener.open(
            urllib.request.Request(url, headers=dict(headers or {})), timeout=60
        )
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers), refused.read().decode()
    with answer:
        return answer.status, dict(answer.headers), answer.read().decode()


def cookie_of(viewer: Viewer) -> str:
    """The cookie that the printed address gives."""
    return asked(viewer.address)[1]["set-cookie"].partition(";")[0]
