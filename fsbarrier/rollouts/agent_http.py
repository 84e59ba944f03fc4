"""Serves the policy as an OpenAI-compatible API on loopback, for agents with their own client library.

Each episode has its own base URL. Requests go through the episode's recorder (agent_client.py), as if the agent had called it. The
server runs in the rollout's process and event loop. A streamed answer comes in one piece, once it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fsbarrier.network.listening import on_loopback, same_key
from fsbarrier.network.own_user_http import own_user_config
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.agent_client import Recorder
from fsbarrier.rollouts.episode import Reply, TurnFailed
from fsbarrier.rollouts.samples import EngineGone, Refusal
from fsbarrier.store.foreign_json import NotJson, parse_object

HOST = "127.0.0.1"
MAX_BODY = 64 << 20
#: status codes of requests rejected before their body was read
UNREAD = (401, 404, 413)
#: An agent may pause for long between two turns; its next request would fail if the connection had been closed.
KEEPALIVE_S = 24 * 3600
#: Fields that would change an answer in a way that is not recorded, or whose result is not returned, and the values that change nothing.
NEUTRAL_FIELDS: dict[str, tuple[object, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
#: fields that are honoured, and those that say nothing about the answer
READ_FIELDS = frozenset(
    (
        *("model", "messages", "prompt", "tools", "stop", "max_tokens", "max_completion_tokens", "stream"),
        *("stream_options", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    )
)
#: timeout for connections whose client does not read its last response
CLOSE_S = 1


class _Error(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class _Server(uvicorn.Server):
    """Installs no signal handlers: rollout.py handles signals and stops this server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """An HTTP server with one URL per episode. `serving` sets a client's `base_url` and `api_key`."""

    def __init__(self) -> None:
        self._key = secrets.token_urlsafe(24)
        self._clients: dict[str, Recorder] = {}
        config = own_user_config(
            self._application,
            "agents' address",
            interface="asgi3",
            ws="none",
            lifespan="off",
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(config)

    async def open(self) -> None:
        self._socket = on_loopback()
        self._port = self._socket.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        # Remaining requests belong to finished episodes: cancel them.
        for request in list(self._server.server_state.tasks):
            request.cancel()
        self._server.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def serving(self, client: Recorder) -> Iterator[None]:
        """Serve this client's URL for the duration of its episode."""
        name = secrets.token_hex(8)
        client.base_url, client.api_key = f"http://{HOST}:{self._port}/episode/{name}/v1", self._key
        self._clients[name] = client
        try:
            yield
        finally:
            del self._clients[name]

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        try:
            response = await self._answer(Request(scope, receive))
        except _Error as error:
            response = _error_response(error.status, str(error), error.param)
        except asyncio.CancelledError:
            response = _error_response(503, "the rollout is ending")
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        key = request.headers.get("authorization", "")
        if not same_key(key, f"Bearer {self._key}"):
            raise _Error(401, "wrong API key; use the client's api_key")
        # Not `request.url`, which raises for some values of the header Host.
        path = str(request.scope["path"])
        parts = path.strip("/").split("/")
        client = self._clients.get(parts[1]) if len(parts) > 2 and parts[0] == "episode" else None
        if client is None:
            raise _Error(404, "no such episode, or it has ended")
        asked = await _asked(request)
        match (request.method, "/".join(parts[2:])):
            case ("GET", "v1/models"):
                return JSONResponse({"object": "list", "data": [{"id": client.model, "object": "model"}]})
            case ("POST", "v1/chat/completions"):
                return await _turn(client, asked, chat=True)
            case ("POST", "v1/completions"):
                return await _turn(client, asked, chat=False)
        raise _Error(404, f"{request.method} {path} is not served to agents")


def _error_response(status: int, message: str, param: str | None = None) -> JSONResponse:
    # Close the connection: the unread body must not be parsed as the next request.
    headers = {"Connection": "close"} if status in UNREAD else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status, headers)


async def _asked(request: Request) -> JsonObject:
    """The JSON object in a request's body; {} for an empty body."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise _Error(413, f"the request is longer than {MAX_BODY >> 20} MiB")
    try:
        return parse_object(body or b"{}")
    except NotJson as error:
        raise _Error(400, f"the request {error}") from None


async def _turn(client: Recorder, asked: JsonObject, *, chat: bool) -> Response:
    """Execute one request as a turn of the episode."""
    for name, value in client.sampling.items():
        if asked.get(name) not in (None, value):
            wanted = f"{name}={asked[name]!r}"
            raise _Error(
                400,
                f"{wanted}: must equal the run's setting ({value!r}), so that training matches sampling; drop it",
                name,
            )
    for name in asked.keys() - READ_FIELDS - client.sampling.keys():
        if asked[name] not in (None, *NEUTRAL_FIELDS.get(name, ())):
            raise _Error(
                400,
                f"{name}: not supported in a recorded turn ({json.dumps(asked[name])[:80]}); drop it",
                name,
            )
    if asked.get("tool_choice") == "none":
        # As in OpenAI's API, tool_choice "none" hides the tools from the policy, so it calls none.
        asked = {**asked, "tools": None}
    stop = asked.get("stop") or ()
    known: JsonObject = {
        "max_tokens": asked.get("max_completion_tokens") or asked.get("max_tokens"),
        "stop": [stop] if isinstance(stop, str) else stop,
    }
    _check_types(asked, known, chat=chat)
    try:
        if chat:
            reply = await client.chat(asked["messages"], tools=asked.get("tools"), **known)
        else:
            reply = await client.complete(asked["prompt"], **known)
    except (TurnFailed, Refusal) as error:
        raise _Error(400, str(error)) from None
    except RecursionError:
        raise _Error(400, "the request is nested too deeply") from None
    except UnicodeEncodeError:
        raise _Error(400, "the request contains half of a surrogate pair, which is no text") from None
    except EngineGone as error:
        raise _Error(503, str(error)) from None
    answer = _as_openai(client, reply, chat=chat)
    if not asked.get("stream"):
        return JSONResponse(answer)
    options = asked.get("stream_options")
    with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return Response(_as_events(answer, chat=chat, with_usage=with_usage), media_type="text/event-stream")


def _check_types(asked: JsonObject, known: JsonObject, *, chat: bool) -> None:
    """Raises _Error for a field of a turn that has another type than OpenAI's."""

    def listed(value: object, kind: type) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)

    messages, tools, most = asked.get("messages"), asked.get("tools"), known["max_tokens"]
    if chat and not (messages and listed(messages, dict)):
        raise _Error(400, "messages: must be a list of objects")
    if not chat and not isinstance(asked.get("prompt"), str):
        raise _Error(400, "prompt: must be one string")
    if chat and tools is not None and not listed(tools, dict):
        raise _Error(400, "tools: must be a list of objects")
    if not listed(known["stop"], str):
        raise _Error(400, "stop: must be a string or a list of strings")
    if most is not None and (type(most) is not int or most < 1):
        raise _Error(400, "max_tokens: must be a positive whole number")


def _as_openai(client: Recorder, reply: Reply, *, chat: bool) -> dict[str, object]:
    reason = "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
    choice: dict[str, object] = {"index": 0, "finish_reason": reason, "logprobs": None}
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


def _as_events(answer: dict[str, Any], *, chat: bool, with_usage: bool) -> bytes:
    """The events of a streamed answer: the whole text, the finish reason, and the token counts if requested."""
    choice = answer["choices"][0]
    whole: JsonObject = {"text": choice.get("text")}
    nothing: JsonObject = {"text": ""}
    if chat:
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        whole, nothing = {"delta": message}, {"delta": {}}
    common = {name: answer[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk" if chat else answer["object"]
    events: list[object] = [
        {**common, "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **part}]}
        for part, reason in ((whole, None), (nothing, choice["finish_reason"]))
    ]
    if with_usage:
        events.append({**common, "choices": [], "usage": answer["usage"]})
    texts = [*(json.dumps(event).encode() for event in events), b"[DONE]"]
    return b"".join(b"data: %b\n\n" % text for text in texts)
