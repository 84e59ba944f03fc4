"""HTTP client of the daemon for a vLLM server: standard library only, with timeouts and cancellation.

Never uses a proxy: the server is on this machine, or at `engine.url`.

A user's own server (debug mode or `engine.url`) is only queried, never managed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from fsbarrier.engine.openai_http import UNIX, base_and_socket, bearer, refusal_text
from fsbarrier.errors import FsbarrierError, ProgramFailed, UsageError
from fsbarrier.settings.sections import EngineSettings
from fsbarrier.store.foreign_json import NotJson, parse

# How quickly a call notices cancellation, or the end of the server's process.
SLICE_S = 0.1
# Connection timeout; `engine.url` may be on another machine.
CONNECT_S = 10.0
# All responses to the daemon's requests are far shorter.
MAX_ANSWER_BYTES = 1 << 22
# vLLM's default.
DEFAULT_URL = "http://127.0.0.1:8000"


class Unreachable(FsbarrierError):
    """The server does not answer (in time), or is not a vLLM server."""


class CalledOff(FsbarrierError):
    """The call was cancelled."""


class Refused(FsbarrierError):
    """The server returned an error; `status`: the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def normal_url(url: str) -> str:
    """A server's base URL without a trailing slash or `/v1`; a socket's unchanged. Raises UsageError for an invalid URL."""
    if url.startswith(UNIX):
        return url
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    known = parts.scheme in ("http", "https") and parts.hostname and port != -1
    if not known or parts.query or parts.fragment:
        raise UsageError(f"engine.url={url}: must be a URL such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


class EngineClient:
    """Client of one server. `ended`: returns whether its process is gone, to stop waiting for an answer."""

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
        is_json: bool = True,
    ) -> object:
        """Send a request; returns the JSON response, None for an empty one, or for any if it is not expected to be JSON.

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
            # A server may reject a request and close its side before it has read the body; its response has the reason.
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
            answer: object = parse(text) if text.strip() and is_json else None
            return answer
        except NotJson:
            raise Unreachable(f"{self.url}{path}: the response is not JSON; is this a vLLM server?") from None

    def healthy(self, timeout_s: float = 5.0, cancel: threading.Event | None = None) -> bool:
        """Whether the server reports that it is healthy."""
        try:
            self.call("GET", "/health", timeout_s=timeout_s, cancel=cancel)
        except (Refused, Unreachable, CalledOff):
            return False
        return True

    def model(self, timeout_s: float = 10.0, cancel: threading.Event | None = None) -> dict[str, str]:
        """The first model that the server lists: its name `id`, and its folder `root` ("" if the server is not vLLM)."""
        answer = self.call("GET", "/v1/models", timeout_s=timeout_s, cancel=cancel)
        match answer:
            case {"data": [{"id": name, **more}, *_]}:
                return {"id": str(name), "root": str(more.get("root") or "")}
        raise Unreachable(f"{self.url}/v1/models: lists no model; is this a vLLM server?")

    def _wait(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        deadline: float,
        cancel: threading.Event | None,
    ) -> None:
        """Wait until the response begins, in slices, because reloading large weights takes minutes and may be cancelled."""
        poller = select.poll()
        poller.register(connection.sock, select.POLLIN)
        while not poller.poll(SLICE_S * 1000):
            if cancel is not None and cancel.is_set():
                raise CalledOff(f"{self.url}{path}: cancelled")
            if self.ended():
                raise Unreachable(f"{self.url}{path}: the server exited before it answered")
            if time.monotonic() >= deadline:
                raise Unreachable(f"{self.url}{path}: timeout")


def _connected(path: str, timeout_s: float) -> socket.socket:
    """A socket that is connected to the server at `path`. Raises OSError."""
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


def connect(settings: EngineSettings) -> EngineClient:
    """The client of the user's own server. Raises UsageError if `engine.url` is invalid, or the key's variable is not set."""
    name = settings.api_key_env
    api_key = os.environ.get(name, "") if name is not None else ""
    if name is not None and not api_key:
        raise UsageError(f"engine.api_key_env={name}: this variable is not set on this node")
    return EngineClient(normal_url(settings.url or DEFAULT_URL), api_key)


def what_it_serves(
    client: EngineClient, weights: Path, policy_version: int, cancel: threading.Event
) -> tuple[str, str]:
    """The served model's name, and a note if it is not the one in `weights`. Raises ProgramFailed if the server does not answer."""
    try:
        model = client.model(cancel=cancel)
    except (Refused, Unreachable, CalledOff) as error:
        raise ProgramFailed(
            f"the external server (debug mode or engine.url) does not answer: {error}"
        ) from None
    root = model["root"]
    if root and Path(root).exists() and Path(root).resolve() == weights.resolve():
        note = ""
    else:
        serves = f"{client.url} serves {root or 'another model'}"
        note = f"debug mode: {serves}, not policy version {policy_version} ({weights})"
    return model["id"], note
