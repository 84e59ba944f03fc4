"""vLLM's API server with a fast start and with API key checks on all endpoints.

`VLLM_API_KEY=... python -m fsbarrier.workers.vllm_server --model FOLDER --host 127.0.0.1 ...` accepts all of vLLM's flags.
Started by fsbarrier/engine/server.py. Imports are inside main, because the engine processes that vLLM spawns import this
module again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fsbarrier.engine.placement import CPUS

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class KeyGuard:
    """ASGI middleware (`--middleware`): returns 401 for every request without the key, except /health.

    vLLM checks the key only below /v1. The development endpoints, which can reload weights and call any method of the engine, would be open
    to any user of the machine.
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
    """Pin this server to its own cores if several servers share a CPU; its threads and processes inherit this."""
    if cpus := os.environ.get(CPUS):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def main() -> None:
    keep_to_own_cores()
    if "--headless" in sys.argv:
        from vllm.entrypoints.cli.serve import run_headless
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        run_headless(
            make_arg_parser(FlexibleArgumentParser()).parse_args([*sys.argv[1:], "--api-server-count", "0"])
        )
        return
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
