"""Let ``/v1/messages`` report which of its ``stop_sequences`` ended an answer.

LMDeploy 0.18 reports ``end_turn`` if a stop sequence ended the answer, and ``stop_sequence`` if the request was
aborted.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

_sequence: ContextVar[str | None] = ContextVar("stop_sequence", default=None)
"""The stop sequence that ended the last answer in the current asyncio task; None if none did."""


@corrects(
    "lmdeploy.serve.anthropic.adapter:map_finish_reason",
    why="maps the end at a stop sequence to end_turn",
    essential=False,
)
def _map_finish_reason(original: Original, reason: str | None) -> str:
    _sequence.set(getattr(reason, "sequence", None))  # only a StopReason has it
    return "stop_sequence" if _sequence.get() is not None else original(reason)


@corrects(
    "lmdeploy.serve.anthropic.endpoints.messages:register",
    why="always returns None as the stop sequence",
    essential=False,
)
def _register(
    original: Original, router: Any, server_context: Any, *, merge_inline_system: bool = False
) -> None:
    def post(*args: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        def decorate(endpoint: Callable[..., Any]) -> Any:
            @functools.wraps(endpoint)
            async def naming(*arguments: Any, **named: Any) -> Any:
                answer = await endpoint(*arguments, **named)
                if isinstance(answer, dict) and answer.get("stop_reason") == "stop_sequence":
                    answer["stop_sequence"] = _sequence.get()
                return answer

            return router.post(*args, **options)(naming)

        return decorate

    original(SimpleNamespace(post=post), server_context, merge_inline_system=merge_inline_system)


@corrects(
    "lmdeploy.serve.anthropic.streaming:_format_sse",
    why="sends None as the stop sequence, because its caller never sets another value",
    essential=False,
)
def _format_sse(original: Original, data: Any) -> str:
    delta: Any = getattr(data, "delta", None)
    if getattr(delta, "stop_reason", None) == "stop_sequence":
        delta.stop_sequence = _sequence.get()
    return original(data)
