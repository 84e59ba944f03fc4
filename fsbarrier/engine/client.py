"""HTTP to a vLLM server, for the daemon: the standard library only, each call with a deadline, and able to be called off.

No proxy is ever asked: the server is on this machine, or where `engine.url` says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.openai_http import UNIX, base_and_socket, bearer, refusal_text

# How soon a call notices that it was called off, or that the server's process ended.
SLICE_S = 0.1
# How long a connection may take; on this machine it takes no time, but `engine.url` may be another's.
CONNECT_S = 10.0
# All answers that the daemon asks for are far shorter.
MAX_ANSWER_BYTES = 1 << 22


class Unreachable(FsbarrierError):
    """Nobody answers at the address, or not in time, or something else than a vLLM server does."""


class CalledOff(FsbarrierError):
    """The call's `cancel` was set."""


class Refused(FsbarrierError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def normal_url(url: str) -> str:
    """A server's base address without a trailing slash or `/v1`; a socket's as it is. Raises UsageError where it is none."""
    if url.startswith(UNIX):
        return url
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    known = parts.scheme in ("http", "https") and parts.hostname and port != -1
    if not known or parts.query or parts.fragment:
        raise UsageError(f"engine.url={url}: not an address like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


class EngineClient:
    """Calls to one server. `ended` tells that its process is gone, so that nobody waits for an answer in vain."""

    def __init__(self, url: str, api_key: str = "", *, ended: Callable[[], bool] = lambda: False) -> None:
        self.url = normal_url(url)
        self.api_key = api_key
        self.ended = ended

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout_s: float,
        cancel: threading.Event | None = None,
    ) -> object:
        """One request; gives the JSON answer, None for an empty one.

        Raises Refused (status 400 and above), Unreachable, CalledOff.
        """
        deadline = time.monotonic() + timeout_s
        base, socket_path = base_and_socket(self.url)
        parts = urlsplit(base)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(timeout_s, CONNECT_S))
        headers = {"Content-Type": "application/json", "Connection": "close", **bearer(self.api_key)}
        try:
            data = None if body is None else json.dumps(body).encode()
            if socket_path is not None:
                connection.sock = _connected(socket_path, min(timeout_s, CONNECT_S))
            # A server that refuses may close its side before it has read the body; its answer says why.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, parts.path + path, body=data, headers=headers)
            self._wait(connection, path, deadline, cancel)
            with connection.getresponse() as response:
                text = response.read(MAX_ANSWER_BYTES)
                status = response.status
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url}{path}: {_reason(error)}") from None
        finally:
            connection.close()
        if status >= 400:
            raise Refused(f"{self.url}{path}: HTTP {status}: {refusal_text(text)}", status)
        try:
            answer: object = json.loads(text) if text.strip() else None
            return answer
        except ValueError:
            raise Unreachable(f"{self.url}{path}: the answer is not JSON; is it a vLLM server?") from None

    def healthy(self, timeout_s: float = 5.0, cancel: threading.Event | None = None) -> bool:
        """Whether the server says that it can serve."""
        try:
            self.call("GET", "/health", timeout_s=timeout_s, cancel=cancel)
        except (Refused, Unreachable, CalledOff):
            return False
        return True

    def model(self, timeout_s: float = 10.0, cancel: threading.Event | None = None) -> dict[str, str]:
        """The first model that the server serves: `id`, its name, and `root`, its folder ("" where it is not vLLM)."""
        answer = self.call("GET", "/v1/models", timeout_s=timeout_s, cancel=cancel)
        match answer:
            case {"data": [{"id": name, **more}, *_]}:
                return {"id": str(name), "root": str(more.get("root") or "")}
        raise Unreachable(f"{self.url}/v1/models: names no model; is it a vLLM server?")

    def _wait(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        deadline: float,
        cancel: threading.Event | None,
    ) -> None:
        """Until the answer begins. In slices: a reload of large weights takes minutes, and may be called off."""
        poller = select.poll()
        poller.register(connection.sock, select.POLLIN)
        while not poller.poll(SLICE_S * 1000):
            if cancel is not None and cancel.is_set():
                raise CalledOff(f"{self.url}{path}: called off")
            if self.ended():
                raise Unreachable(f"{self.url}{path}: the server ended before it answered")
            if time.monotonic() >= deadline:
                raise Unreachable(f"{self.url}{path}: no answer in time")


def _connected(path: str, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
