"""Requests to OpenAI-compatible servers (vLLM, a judge): classification of errors, and retries.

HTTP retries for coroutines are here; filesystem retries for threads are in retry.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fsbarrier.store.foreign_json import NotJson, parse

T = TypeVar("T")

#: upper limit of the growing pauses between retries
LONGEST_PAUSE_S = 10.0
#: more of an error response is not shown
MOST_REFUSAL = 1 << 16


async def asked_again(
    request: Callable[[], Awaitable[T]],
    *,
    after: type[Exception],
    tries: int | None = None,
    within_s: float | None = None,
    first_pause_s: float = 0.2,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> T:
    """Call `request`, and retry if it raises `after`: at most `tries` calls in total, or until `within_s` have passed.

    The pauses are random and grow, so that many rejected requests do not return at the same time. Raises the last failure.
    """
    # Imported late: the daemon needs only the functions below, and must start fast.
    from tenacity import (
        AsyncRetrying,
        retry_if_exception_type,
        stop_after_attempt,
        stop_after_delay,
        stop_never,
        wait_random_exponential,
    )

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(after),
        stop=(stop_after_attempt(tries) if tries is not None else stop_never)
        | (stop_after_delay(within_s) if within_s is not None else stop_never),
        wait=wait_random_exponential(multiplier=first_pause_s, max=longest_pause_s),
        reraise=True,
    )

    # This must be a coroutine function, because tenacity does not await the result of a lambda.
    async def attempt() -> T:
        return await request()

    return await retrying(attempt)


def given_logprobs(answer: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probability of each token of the prompts given those before it, from vLLM's answer to a request with `prompt_logprobs`; 0
    for the first token. Raises ValueError if the answer does not have them."""
    try:
        given = {choice["index"]: choice["prompt_logprobs"][1:] for choice in answer["choices"]}
        return [
            [0.0, *(float(entry[str(t)]["logprob"]) for entry, t in zip(given[n], tokens[1:], strict=True))]
            for n, tokens in enumerate(prompts)
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"no log-probability of each token: {type(error).__name__}: {error}") from None


#: URL prefix of a server that listens on a Unix socket; the rest is the socket's path
UNIX = "unix:"


def base_and_socket(url: str) -> tuple[str, str | None]:
    """The HTTP base URL for a server's `url`, and the path of its socket; None for TCP."""
    return ("http://localhost", url.removeprefix(UNIX)) if url.startswith(UNIX) else (url, None)


def may_pass(status: int) -> bool:
    """Whether the same request may succeed later: the server was too slow, too busy, or failed internally."""
    return status in (408, 425, 429) or status >= 500


def bearer(api_key: str) -> dict[str, str]:
    """The authorization header; {} without a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def described(error: Exception) -> str:
    """A failed connection as one line. Some of these errors have no message, only a class name."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def refusal_text(body: bytes) -> str:
    """The message in an error response, as one line."""
    text = body[:MOST_REFUSAL].decode("utf-8", errors="replace")
    try:
        value = parse(body)
        error = value.get("error", value.get("detail", value)) if isinstance(value, dict) else value
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)[
            :MOST_REFUSAL
        ]
    except NotJson:
        pass
    return " ".join(text.split())[:500] or "no message"
