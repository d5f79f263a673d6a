"""Limits the requests of LMDeploy's api_server: how many it holds at once, and how long each may take.

Without limits LMDeploy queues any number of requests, and computes each request to its end, even if the client no
longer waits for the answer.
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from dlinfer import settings

ROUTES = frozenset(
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/pooling",
        "/get_ppl",
    ]
)
"""Paths of requests that need the engine. Requests to other paths, such as /health, have no limits."""
HEADER = b"x-request-timeout"
"""Header with a request's own time limit, in seconds. The server's limit still applies."""

_KEPT = 32
_LONGEST_RETRY = 60

App = Callable[[Any, Any, Any], Awaitable[None]]


class Limits:
    """Applies the limits. It counts the requests that the server holds, and remembers how long the latest ones took."""

    def __init__(self) -> None:
        self._held = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    async def run(self, app: App, scope: Any, receive: Any, send: Any) -> None:
        """Let an ASGI application answer a request within the limits. Otherwise answer with HTTP status 429 or 504.

        app: the application. scope, receive, send: the arguments of an ASGI call.
        """
        if scope["type"] != "http" or scope["method"] != "POST" or _path(scope) not in ROUTES:
            await app(scope, receive, send)
            return
        most = settings.current().max_requests
        if most is not None and self._held >= most:
            await self._refuse(most, scope, receive, send)
            return
        self._held += 1
        start = time.monotonic()
        try:
            await _within(_deadline(scope), app, scope, receive, send)
        finally:
            self._held -= 1
            self._seconds.append(time.monotonic() - start)

    async def _refuse(self, most: int, scope: Any, receive: Any, send: Any) -> None:
        text = f"The server already has {most} requests, its limit (DLINFER_MAX_REQUESTS). Try again later."
        response = _error(scope, "ENGINE_UNAVAILABLE", 429, text)
        response.headers["Retry-After"] = str(self._retry_after(most))
        await response(scope, receive, send)

    def _retry_after(self, most: int) -> int:
        """Return the estimated seconds until one of the held requests ends.

        most: the number of requests that the server may hold at once. It holds this number now.
        """
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        return min(max(1, math.ceil(mean / most)), _LONGEST_RETRY)


def _path(scope: Any) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _deadline(scope: Any) -> float | None:
    """Return how many seconds a request may take at most; None if it has no limit.

    scope: the request's ASGI scope, whose headers may hold the request's own limit.
    """
    own = [_seconds(value) for name, value in scope["headers"] if name == HEADER]
    limits = [seconds for seconds in (settings.current().request_seconds, *own) if seconds is not None]
    return min(limits, default=None)


def _seconds(text: bytes) -> float | None:
    """Return a header's value as seconds; None if it is no positive number."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


async def _within(seconds: float | None, app: App, scope: Any, receive: Any, send: Any) -> None:
    """Run an ASGI application, and cancel it after ``seconds``; None means no limit.

    After a cancellation the client gets HTTP status 504. If a stream has already started, its last event is an error
    instead. LMDeploy's endpoints treat a cancellation as the normal end of an answer, so everything that they send
    after the cancellation is dropped.
    """
    started: dict[bytes, bytes] | None = None

    async def watched(message: Any) -> None:
        nonlocal started
        if limit.expired():
            return
        if message["type"] == "http.response.start":
            started = dict(message["headers"])
        await send(message)

    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await app(scope, receive, watched)
    except TimeoutError:
        if not limit.expired():
            raise
    if not limit.expired():
        return
    text = f"The answer was not complete after {seconds:g} s, the time limit of this request."
    response = _error(scope, "REQUEST_CANCELLED", 504, text)
    if started is None:
        await response(scope, receive, send)
    elif started.get(b"content-type", b"").startswith(b"text/event-stream"):
        await send({"type": "http.response.body", "body": _event(response.body)})


def _event(body: bytes) -> bytes:
    """Return the bytes of a stream's last event, which reports an error in OpenAI's or Anthropic's form.

    body: the JSON body of the error response.
    """
    error = json.loads(body)
    if error.get("type") == "error":
        return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": error.get("error", error)}).encode() + b"\n\n"


def _error(scope: Any, code: str, status: int, text: str) -> Any:
    """Return an error response in the protocol of the request's path. code: the name of an LMDeploy ErrorCode."""
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    from lmdeploy.serve.utils.server_utils import protocol_error_response

    error = RequestError(getattr(ErrorCode, code), text)
    error.status_code = status
    return protocol_error_response(_path(scope), error)
