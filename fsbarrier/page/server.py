"""Serves the page on loopback: to this user of the machine, and to whoever has the key.

The address that the command prints contains the key. The first request with it gets a cookie and is sent on to the same address without the
key, so that the key is in no page, no link and no bookmark. Without the cookie nothing is answered, neither pages, scripts nor sockets.
"""

from __future__ import annotations

import http.cookies
import logging
import secrets
import socket
import sys
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsbarrier.network.listening import same_key
from fsbarrier.network.own_user_http import own_user_config
from fsbarrier.wording import one_line

HOST = "127.0.0.1"
#: how long open pages may take to close when the command ends
CLOSE_S = 1
#: Nothing is loaded from other hosts, and no other page may contain this one. Vue compiles its templates in the browser.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; frame-ancestors 'none'; form-action 'self'; base-uri 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class KeyGate:
    """An ASGI application that lets through to `inner` only requests with the key.

    `cookie`: its name. It contains the port, since browsers send the cookies of all servers of a host to each of them.
    """

    def __init__(self, inner: ASGIApp, key: str, port: int) -> None:
        self._inner, self._key = inner, key
        self.cookie = f"fsbarrier-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): text.decode("latin-1") for name, text in scope["headers"]}
        if self._has_cookie(headers) and _comes_from_here(headers):
            await self._inner(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            # Refuses the handshake: the browser sees status 403.
            await send({"type": "websocket.close", "code": 1008})
        elif scope["method"] in ("GET", "HEAD") and (without := self._without_key(scope)) is not None:
            cookie = f"{self.cookie}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, b"", {"Location": without, "Set-Cookie": cookie})
        else:
            said = b"The key is missing or wrong: open the whole address that `fsbarrier view` printed.\n"
            await _answer(send, 403, said, {"Content-Type": "text/plain; charset=utf-8"})

    def _has_cookie(self, headers: Mapping[str, str]) -> bool:
        try:
            found = http.cookies.SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except http.cookies.CookieError:
            return False
        return found is not None and same_key(found.value, self._key)

    def _without_key(self, scope: Scope) -> str | None:
        """The address without the key, if the request has the right key."""
        given = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(name == "key" and same_key(value, self._key) for name, value in given):
            return None
        rest = urlencode([(name, value) for name, value in given if name != "key"])
        # A path that begins with two slashes would be another host.
        return f"/{scope['path'].lstrip('/')}" + (f"?{rest}" if rest else "")


def _comes_from_here(headers: Mapping[str, str]) -> bool:
    """Whether a page of this server made the request, as far as the browser says. Pages of other ports of this host have the cookie too."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_encoded(HEADERS)]
        await send(message)

    return sending


async def _answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    encoded = _encoded({**HEADERS, **headers, "Content-Length": str(len(body)), "Cache-Control": "no-store"})
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), text.encode("latin-1")) for name, text in headers.items()]


class _OneLine(logging.Formatter):
    """What goes wrong while a page is made is one line in the terminal; the browser shows the rest of the page."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        text = f"{type(error).__name__}: {error}" if error is not None else record.getMessage()
        return f"fsbarrier view: {one_line(text)}"


def log_one_line() -> None:
    """Make the libraries' loggers say errors only, in one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    for name in ("nicegui", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.ERROR)


def new_key() -> str:
    return secrets.token_urlsafe(24)


def serve(application: ASGIApp, listening: socket.socket, key: str) -> None:
    """Serve until Ctrl-C or SIGTERM, which are raised again at the end."""
    log_one_line()
    gate = KeyGate(application, key, listening.getsockname()[1])
    config = own_user_config(
        gate, "fsbarrier view", ws="websockets-sansio", timeout_graceful_shutdown=CLOSE_S
    )
    uvicorn.Server(config).run(sockets=[listening])
