"""A request that we refuse gets a 400 in the words of its protocol, wherever in the server the refusal is raised.

LMDeploy's endpoints answer the errors that they expect; any other becomes a 500 without a word.
"""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.errors import GenerationOptionError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation, kv_memory
from dlinfer.framework.patching import Patch


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def __call__(self: Any, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await original(self, scope, receive, watched)
        except (GenerationOptionError, UnsupportedFeatureError) as error:
            if started:  # too late for a status
                raise
            await _response(scope["path"], error)(scope, receive, send)

    return __call__


def _response(path: str, error: GenerationOptionError | UnsupportedFeatureError) -> Any:
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    from lmdeploy.serve.utils.server_utils import protocol_error_response

    unsupported = isinstance(error, UnsupportedFeatureError)
    code = ErrorCode.UNSUPPORTED_FEATURE if unsupported else ErrorCode.INVALID_REQUEST
    return protocol_error_response(path, RequestError(code, str(error)))


def _request_error(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _request_error_from_status(status: Any) -> Any:
        from lmdeploy.messages import ResponseType
        from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

        if activation.active() is None or status != ResponseType.INPUT_LENGTH_ERROR:
            return original(status)
        # What is longer than session_len was refused before.
        longest = kv_memory.longest_session()
        shown = "" if longest is None else f" ({longest} tokens)"
        text = f"The request is longer than the longest session that the KV cache holds{shown}."
        return RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, text)

    return _request_error_from_status


PATCHES = (
    Patch(
        target="lmdeploy.serve.core.async_engine:AsyncEngine._request_error_from_status",
        why="calls the limit of the KV cache the model's context length",
        signature="(status)",
        build=_request_error,
        essential=False,
    ),
    Patch(
        target="lmdeploy.serve.utils.server_utils:EngineSleepingMiddleware.__call__",
        why="stands around every endpoint, where an error that none of them expects is a 500 without a word",
        signature="(self, scope, receive, send)",
        build=_call,
        essential=False,
    ),
)
