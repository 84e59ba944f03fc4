"""The policy as an OpenAI-compatible address on loopback, for agents that bring a client of their own.

Each episode has a base address; what is asked there goes through the episode's recording client (episode.py), as if the agent had
called it. One process serves all its episodes. Answers are not streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fsbarrier.rollouts.episode import Client, Reply, TurnFailed
from fsbarrier.rollouts.samples import EngineGone, Refusal

HOST = "127.0.0.1"
MAX_BODY = 64 << 20


class _Answer(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """An HTTP server with one address an episode. `serving` gives a client its `base_url` and `api_key`."""

    def __init__(self) -> None:
        self._key = secrets.token_urlsafe(24)
        self._clients: dict[str, Client] = {}
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, HOST, 0, limit=1 << 20)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @contextlib.contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """The address of this client's episode, for as long as the episode lasts."""
        assert self._server is not None
        port, name = self._server.sockets[0].getsockname()[1], secrets.token_hex(8)
        client.base_url, client.api_key = f"http://{HOST}:{port}/episode/{name}/v1", self._key
        self._clients[name] = client
        try:
            yield
        finally:
            del self._clients[name]

    # --- HTTP ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError):
            pass  # the client is gone, or speaks something else, or the phase ends
        finally:
            self._open.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether another may follow on this connection."""
        parts = (await reader.readline()).decode("latin-1").split()
        if len(parts) != 3:
            return False
        headers: dict[str, str] = {}
        while line := (await reader.readline()).decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length") or 0)
        if length > MAX_BODY or "transfer-encoding" in headers:
            return False
        body = await reader.readexactly(length)
        status, value = await self._answered(parts[0], parts[1], headers, body)
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    async def _answered(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Any]:
        try:
            return 200, await self._served(method, path, headers, body)
        except _Answer as error:
            return error.status, {"error": {"message": str(error), "code": error.status}}

    async def _served(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Any:
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self._key}".encode()):
            raise _Answer(401, "the key is the client's api_key")
        parts = path.partition("?")[0].strip("/").split("/")
        client = self._clients.get(parts[1]) if len(parts) > 2 and parts[0] == "episode" else None
        if client is None:
            raise _Answer(404, "there is no such episode, or it is over")
        try:
            asked = json.loads(body or b"{}")
        except ValueError:
            raise _Answer(400, "the request is no JSON") from None
        if not isinstance(asked, dict):
            raise _Answer(400, "the request is no JSON object")
        match (method, "/".join(parts[2:])):
            case ("GET", "v1/models"):
                return {"object": "list", "data": [{"id": client.model, "object": "model"}]}
            case ("POST", "v1/chat/completions"):
                return await _turn(client, asked, chat=True)
            case ("POST", "v1/completions"):
                return await _turn(client, asked, chat=False)
        raise _Answer(404, f"{method} {path} is not served to agents")


async def _turn(client: Client, asked: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """One request as a turn of the episode."""
    for name, value in client.sampling.items():
        if asked.get(name) not in (None, value):
            wanted = f"{name}={asked[name]!r}"
            raise _Answer(
                400,
                f"{wanted}: sampling is the run's (here {value!r}), so that training fits it; leave it out",
            )
    if asked.get("stream"):
        raise _Answer(400, "answers are not streamed to agents: leave stream out")
    stop = asked.get("stop") or ()
    known: dict[str, Any] = {
        "max_tokens": asked.get("max_completion_tokens") or asked.get("max_tokens"),
        "stop": [stop] if isinstance(stop, str) else stop,
    }
    try:
        if chat:
            reply = await client.chat(asked.get("messages") or (), tools=asked.get("tools"), **known)
        else:
            reply = await client.complete(str(asked.get("prompt", "")), **known)
    except (TurnFailed, Refusal) as error:
        raise _Answer(400, str(error)) from None
    except EngineGone as error:
        raise _Answer(503, str(error)) from None
    return _as_openai(client, reply, chat=chat)


def _as_openai(client: Client, reply: Reply, *, chat: bool) -> dict[str, Any]:
    reason = "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    choice |= {"message": reply.message} if chat else {"text": reply.text}
    used = (reply.prompt_tokens, len(reply.token_ids))
    return {
        "id": f"turn-{client.turns}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": client.model,
        "choices": [choice],
        "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
    }
