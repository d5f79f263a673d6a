"""``/v1/messages`` says which of its ``stop_sequences`` ended an answer.

LMDeploy 0.18 says ``end_turn``, and ``stop_sequence`` where a request was aborted.
"""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.framework.lmdeploy_ext.answers.stop_text import StopReason
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch


class _Ended(str):
    """Anthropic's reason ``"stop_sequence"`` with the sequence."""

    sequence: str


def _map_finish_reason(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def map_finish_reason(reason: str | None) -> str:
        if not isinstance(reason, StopReason):
            return original(reason)
        ended = _Ended("stop_sequence")
        ended.sequence = reason.sequence
        return ended

    return map_finish_reason


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, /, **data: Any) -> None:
        reason = data.get("stop_reason")
        if isinstance(reason, _Ended):
            data["stop_sequence"] = reason.sequence
        original(self, **data)

    return __init__


PATCHES = (
    Patch(
        target="lmdeploy.serve.anthropic.adapter:map_finish_reason",
        why="knows no stop sequence",
        signature="(reason)",
        build=_map_finish_reason,
        versions=FAULTY,
        essential=False,
    ),
    Patch(
        target="lmdeploy.serve.anthropic.protocol:MessagesResponse.__init__",
        why="is given None for the stop sequence in every case",
        signature="(self, /, **data)",
        build=_init,
        versions=FAULTY,
        essential=False,
    ),
    Patch(
        target="lmdeploy.serve.anthropic.protocol:MessageDelta.__init__",
        why="is given None for the stop sequence in every case, streamed",
        signature="(self, /, **data)",
        build=_init,
        versions=FAULTY,
        essential=False,
    ),
)
