"""Answers a refused request with HTTP status 400, in the protocol of its endpoint, wherever the error is raised.

LMDeploy's endpoints handle only errors that they expect. Without this module any other error becomes HTTP status 500
without an explanation.
"""

import functools
from typing import Any

from dlinfer.errors import GenerationOptionError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.request.limits import Limits
from dlinfer.framework.lmdeploy_ext.device import activation, kv_memory
from dlinfer.framework.patching import Original, replaces


def request_error(code: str, text: str) -> Any:
    """Return an instance of LMDeploy's RequestError. code: the name of a member of LMDeploy's ErrorCode."""
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

    return RequestError(getattr(ErrorCode, code), text)


def shown(value: object) -> str:
    """Return a value's ``repr``, cut at 80 characters, for the text of an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_limits = Limits()


@replaces(
    "lmdeploy.serve.utils.server_utils:EngineSleepingMiddleware.__call__",
    why="limits neither the number of requests nor their time, and lets an endpoint's unexpected error become HTTP "
    "status 500 without a reason",
    essential=False,
)
async def answer_refusal(original: Original, self: Any, scope: Any, receive: Any, send: Any) -> None:
    from lmdeploy.serve.utils.server_utils import protocol_error_response

    started = False

    async def watched(message: Any) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        await _limits.run(functools.partial(original, self), scope, receive, watched)
    except (GenerationOptionError, UnsupportedFeatureError) as error:
        if started:  # the status is already sent
            raise
        unsupported = isinstance(error, UnsupportedFeatureError)
        code = "UNSUPPORTED_FEATURE" if unsupported else "INVALID_REQUEST"
        response = protocol_error_response(scope["path"], request_error(code, str(error)))
        await response(scope, receive, send)


@replaces(
    "lmdeploy.serve.core.async_engine:AsyncEngine._request_error_from_status",
    why="reports the limit of the KV cache as the model's context length",
    when=activation.is_on,
    essential=False,
)
def error_from_status(original: Original, status: Any) -> Any:
    from lmdeploy.messages import ResponseType

    if status != ResponseType.INPUT_LENGTH_ERROR:
        return original(status)
    # Requests longer than session_len were refused earlier, so the KV cache is the limit here.
    longest = kv_memory.longest_session()
    tokens = "" if longest is None else f" ({longest} tokens)"
    text = f"The request needs more tokens than the KV cache holds for one session{tokens}."
    return request_error("CONTEXT_LENGTH_EXCEEDED", text)
