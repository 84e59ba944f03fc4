"""vLLM's own API server, started so that it comes up fast and lets nobody in without the key.

`VLLM_API_KEY=... python -m fsbarrier.workers.vllm_server --model FOLDER --host 127.0.0.1 ...`: all of vLLM's flags.
Started by fsbarrier/engine/server.py. The main is guarded: the engine processes that vLLM spawns import this
module again, and would import the API server too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fsbarrier.engine.placement import CPUS

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class KeyGuard:
    """ASGI middleware (`--middleware`): 401 for every request without the key, but for /health.

    vLLM itself asks for the key below /v1 only. The development endpoints, by which weights are reloaded and any method of the
    engine can be called, lie outside: any user of the machine could reach them.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        key = os.environ["VLLM_API_KEY"]
        if not key:
            raise ValueError("VLLM_API_KEY is empty")
        self.expected = _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health" or self._knows(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": {"message": "wrong or missing key", "code": 401}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self.expected)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


def keep_to_own_cores() -> None:
    """Where several servers share a CPU each has cores of its own; its threads and processes inherit them."""
    if cpus := os.environ.get(CPUS):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def main() -> None:
    keep_to_own_cores()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
